"""What PyTorch's settings say about the precision of float32 products."""

import torch


def tf32_allowed() -> bool:
    """Whether products may round float32 to TF32: PyTorch's own setting, by whichever of its names it was made."""
    matmul = torch.backends.cuda.matmul
    chosen = getattr(matmul, "fp32_precision", None)  # from PyTorch 2.9 on; reading the older name then may fail
    return bool(matmul.allow_tf32) if chosen is None else chosen == "tf32"
