"""Who else computes the features of `tilewise bench --features`: PyTorch's fused kernels and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import Blocks, Document
from tilewise.cli import measure
from tilewise.cli.gpu import compiled_flex
from tilewise.testing import Inputs

#: o of q, k and v as `Inputs` holds them: (B, S, H, D), or (T, H, D) where sequences are packed.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

LARGEST_DIFFERENCE = 0.05  # of outputs, over the largest value: half precision is far below it, another mask far above


def _sdpa(backend: SDPBackend) -> Callable[[Inputs], Attend]:
    def of(inputs: Inputs) -> Attend:
        dropout, gqa = inputs.options.get("dropout_p", 0.0), inputs.q.shape[2] != inputs.k.shape[2]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                heads = [t.transpose(1, 2) for t in (q, k, v)]
                o = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True, enable_gqa=gqa)
            return o.transpose(1, 2)

        return attend

    return of


def _varlen(inputs: Inputs) -> Attend:
    """FlashAttention-2 on packed sequences, or within a window."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  PyTorch 2.10 and newer

    S = inputs.q.shape[-3]
    ends = inputs.options.get("cu_seqlens_q", torch.tensor([0, S], dtype=torch.int32, device=inputs.q.device))
    longest = inputs.options.get("max_seqlen_q", S)
    window = (-1, 0) if inputs.options.get("causal") else inputs.options["window_size"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = [t.reshape(-1, *t.shape[-2:]) for t in (q, k, v)]
        o = varlen_attn(packed[0], packed[1], packed[2], ends, ends, longest, longest, window_size=window)
        return o.view(q.shape)  # pyright: ignore[reportAttributeAccessIssue]  one tensor where nothing else is asked for

    return attend


def _flex(inputs: Inputs) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415  imports a compiler

    compiled = compiled_flex()
    S, device, gqa = inputs.q.shape[1], str(inputs.q.device), inputs.q.shape[2] != inputs.k.shape[2]
    visible = _visible(inputs.options)
    mask = create_block_mask(visible, None, None, S, S, device) if visible else None
    modify = _modify(inputs.options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(*heads, score_mod=modify, block_mask=mask, enable_gqa=gqa).transpose(1, 2)  # pyright: ignore

    return attend


def _visible(options: dict[str, Any]) -> Visible | None:
    """FlexAttention's function for the masks of a call."""
    parts: list[Visible] = []
    if options.get("causal"):
        parts.append(lambda b, h, m, n: m >= n)
    if "window_size" in options:
        left, right = options["window_size"]
        parts.append(lambda b, h, m, n: (m - n <= left) & (n - m <= right))
    mask = options.get("mask")
    if isinstance(mask, Document):
        first, end = mask.lo[0], mask.hi[0]
        parts.append(lambda b, h, m, n: (n >= first[m]) & (n < end[m]))
    elif isinstance(mask, Blocks):
        kept, rows, columns = mask.pattern, mask.block_m, mask.block_n
        parts.append(lambda b, h, m, n: kept[m // rows, n // columns])
    if not parts:
        return None
    return lambda b, h, m, n: reduce(torch.logical_and, [part(b, h, m, n) for part in parts])


def _modify(options: dict[str, Any]) -> Callable[..., Tensor] | None:
    """FlexAttention's function for the modified scores of a call."""
    if "softcap" in options:
        cap = options["softcap"]
        return lambda s, b, h, m, n: cap * torch.tanh(s / cap)
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"].detach()
        return lambda s, b, h, m, n: s - slopes[h] * (m - n).abs()
    if "bias" in options:
        bias = options["bias"].detach()
        return lambda s, b, h, m, n: s + bias[0, h, m, n]
    return None


RIVALS: dict[str, Callable[[Inputs], Attend]] = {
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "varlen": _varlen,
    "flex": _flex,
}


def able(names: Sequence[str], inputs: Inputs, o: Tensor) -> tuple[dict[str, Attend], dict[str, str]]:
    """The named rivals that can run this call and agree with our output; what is the matter with the others.

    They also have to give gradients where q, k and v ask for them. With dropout nothing is compared: each draws its own.
    """
    found, missing = {}, {}
    for name in names:
        try:
            attend = RIVALS[name](inputs)
            theirs = attend(inputs.q, inputs.k, inputs.v)
            if theirs.requires_grad:
                torch.autograd.grad(theirs, (inputs.q, inputs.k, inputs.v), torch.ones_like(theirs))
            with torch.no_grad():
                attend(inputs.q, inputs.k, inputs.v)
        except (ImportError, RuntimeError, TypeError) as error:  # what a PyTorch without it, or its kernels, raise
            missing[name] = measure.first_line(error)
            continue
        difference = float((theirs.detach() - o).abs().max() / o.abs().max())
        if difference < LARGEST_DIFFERENCE or inputs.options.get("dropout_p"):
            found[name] = attend
        else:
            missing[name] = f"its output differs from ours by {difference:.1e} of the largest value"
    return found, missing
