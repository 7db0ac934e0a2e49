"""Memory that Triton asks for when a kernel builds tensor descriptors."""

import torch
import triton  # pyright: ignore[reportMissingImports]
from triton.runtime import _allocation  # pyright: ignore[reportMissingImports]


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def provide_scratch() -> None:
    """Give Triton an allocator where the user has set none; each thread has its own (autograd's, too)."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_allocate)
