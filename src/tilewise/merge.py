"""Merging partial results: attention over parts of the keys, put together as if the keys had been one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine partial (o, lse) pairs computed over disjoint sets of keys: exact, in any order, differentiable.

    ``lse = log(sum_i exp(lse_i))`` and ``o = sum_i exp(lse_i - lse) * o_i``, accumulated in float32 (float64 if any part
    is float64). Keep parts in float32 when there are many: rounding each to 16 bits makes the error grow with their number.

    Args:
        outputs: partial outputs of one shape, (B, Sq, H, Dv) or packed (total_q, H, Dv).
        lses: their logsumexp, (B, H, Sq) or (H, total_q). A row whose lse is -inf (or +inf, as flash_attn marks a row that
            saw no key) contributes nothing, whatever its output holds.

    Returns:
        o in the dtype of the first output, and lse; a row that saw no key in any part gives o = 0 and lse = -inf.

    Raises:
        ValueError: no parts, not one lse per output, or shapes that do not fit.

    Source: FlashAttention-2 (Dao 2023, section 3.1.1, the rescaling of two blocks).

    Example:
        >>> import torch, tilewise
        >>> from tilewise.merge import merge
        >>> q, k, v = torch.randn(3, 1, 32, 2, 16).unbind()
        >>> parts = [tilewise.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(0, 20), slice(20, 32))]
        >>> o, lse = merge(*zip(*parts))
        >>> torch.allclose(o, tilewise.attention(q, k, v), atol=1e-5)
        True
    """
    outputs, lses = list(outputs), list(lses)
    _check(outputs, lses)
    acc = torch.float64 if torch.float64 in {t.dtype for t in (*outputs, *lses)} else torch.float32
    stacked = torch.stack([lse.to(acc) for lse in lses])
    seen = stacked.abs() != torch.inf
    peak = stacked.detach().masked_fill(~seen, -torch.inf).amax(0)
    empty = peak == -torch.inf
    peak = peak.masked_fill(empty, 0.0)
    # Where nothing was seen the peak stands in for lse: no infinity enters the exponential, nor its gradient.
    weights = torch.where(seen, torch.exp(torch.where(seen, stacked, peak) - peak), 0.0)
    total = torch.where(empty, 1.0, weights.sum(0))
    merged = torch.zeros_like(outputs[0], dtype=acc)
    for o, weight, used in zip(outputs, weights / total, seen, strict=True):
        merged = merged + _per_row(weight) * torch.where(_per_row(used), o.to(acc), 0.0)
    return merged.to(outputs[0].dtype), torch.where(empty, -torch.inf, torch.log(total) + peak)


def _per_row(t: Tensor) -> Tensor:
    """(B, H, Sq) as (B, Sq, H, 1), and (H, total_q) as (total_q, H, 1)."""
    return t.transpose(-2, -1).unsqueeze(-1)


def _check(outputs: list[Tensor], lses: list[Tensor]) -> None:
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"merge needs one lse per output and at least one, got {len(outputs)} and {len(lses)}")
    shape = outputs[0].shape
    if len(shape) not in (3, 4):
        raise ValueError(f"outputs must be (B, Sq, H, Dv) or packed (total_q, H, Dv), got {tuple(shape)}")
    rows = (*shape[:-3], shape[-2], shape[-3])
    for i, (o, lse) in enumerate(zip(outputs, lses, strict=True)):
        if o.shape != shape or lse.shape != rows:
            raise ValueError(
                f"part {i}: output must be {tuple(shape)} and lse {tuple(rows)}, got {tuple(o.shape)} and {tuple(lse.shape)}"
            )
