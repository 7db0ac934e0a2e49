"""Where each sequence of a call lies, and the key interval of each of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import tiles
from tilewise.masks import IntervalMask, Rows
from tilewise.spec import BoundSpec


class Sequences(NamedTuple):
    """Start and length of each sequence's queries and keys, int64 (B,). Starts are 0 in the dense layout."""

    q_start: Tensor
    q_len: Tensor
    k_start: Tensor
    k_len: Tensor
    shift: Tensor  # m = row + shift
    max_q: int
    max_k: int
    varlen: bool

    @property
    def batch(self) -> int:
        return len(self.q_len)


class RowBounds(NamedTuple):
    """Row ``r`` of sequence ``b`` sees keys ``[lo, hi)`` read at index ``b * stride + q_start[b] + r``; int32, proper."""

    lo: Tensor
    hi: Tensor
    stride: int


def sequences(
    bound: BoundSpec,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    max_q: int,
    max_k: int,
    device: torch.device | str = "cpu",
) -> Sequences:
    """The sequences of a call whose q and k have these shapes, (B, S, H, D) or packed (total, H, D)."""
    if not bound.spec.varlen:
        return _made_on(device, _dense_sequences)(q_shape[0], q_shape[1], k_shape[1], bound.spec.align, device)
    assert bound.cu_seqlens_q is not None and bound.cu_seqlens_k is not None
    cu_q, cu_k = bound.cu_seqlens_q.long(), bound.cu_seqlens_k.long()
    q_len = cu_q.diff() if bound.seqused_q is None else bound.seqused_q.long()
    k_len = cu_k.diff() if bound.seqused_k is None else bound.seqused_k.long()
    shift = k_len - q_len if bound.spec.align == "bottom_right" else torch.zeros_like(q_len)
    return Sequences(cu_q[:-1], q_len, cu_k[:-1], k_len, shift, max_q, max_k, True)


def _made_on(device: torch.device | str, remembering: Any) -> Callable[..., Any]:
    """The function itself on a GPU: what it made once may be read by another stream before it is there, and made while a
    CUDA graph was captured it holds nothing until the graph is replayed."""
    return remembering if torch.device(device).type == "cpu" else remembering.__wrapped__


@lru_cache(maxsize=256)
def _dense_sequences(B: int, Sq: int, Sk: int, align: str, device: torch.device | str) -> Sequences:
    zero = torch.zeros(B, dtype=torch.int64, device=device)
    shift = Sk - Sq if align == "bottom_right" else 0
    return Sequences(zero, zero + Sq, zero, zero + Sk, zero + shift, Sq, Sk, False)


def row_bounds(bound: BoundSpec, seqs: Sequences, total_q: int) -> RowBounds:
    """The intersection of all interval masks, clipped to each sequence's keys.

    Args:
        bound: the call.
        seqs: its sequences.
        total_q: rows of the packed q; ignored in the dense layout.
    """
    masks = bound.interval_masks
    if seqs.varlen and not seqs.batch:  # every row belongs to no sequence
        nothing = torch.zeros(total_q, dtype=torch.int32, device=seqs.q_len.device)
        return RowBounds(nothing, nothing, 0)
    if not seqs.varlen and not any(mask.per_batch for mask in masks) and not any(mask.tensors for mask in masks):
        device = seqs.q_len.device
        return _made_on(device, _shared_bounds)(tuple(masks), seqs.max_q, seqs.max_k, bound.spec.align, device)
    rows, k_len, stride = _all_rows(seqs, total_q, any(mask.per_batch for mask in masks))
    lo, hi = _intersect(masks, rows, k_len)
    return RowBounds(lo, hi, stride)


@lru_cache(maxsize=32)
def _shared_bounds(masks: tuple[IntervalMask, ...], Sq: int, Sk: int, align: str, device: torch.device) -> RowBounds:
    # Closed-form masks of one (Sq, Sk) are the same for every call: training steps find them here.
    index = torch.arange(Sq, device=device)
    m = index + (Sk - Sq if align == "bottom_right" else 0)
    lo, hi = _intersect(masks, Rows(m, torch.zeros_like(index), index), torch.full_like(index, Sk))
    return RowBounds(lo, hi, 0)


def _all_rows(seqs: Sequences, total_q: int, per_batch: bool) -> tuple[Rows, Tensor, int]:
    device = seqs.q_len.device
    if seqs.varlen:
        position = torch.arange(total_q, device=device)
        batch = torch.searchsorted(seqs.q_start.contiguous(), position, right=True) - 1
        index = position - seqs.q_start[batch]
        k_len = torch.where(index < seqs.q_len[batch], seqs.k_len[batch], 0)
        return Rows(index + seqs.shift[batch], batch, index), k_len, 0
    B = seqs.batch if per_batch else 1
    index = torch.arange(seqs.max_q, device=device).repeat(B)
    batch = torch.arange(B, device=device).repeat_interleave(seqs.max_q)
    k_len = seqs.k_len[batch] if seqs.batch else torch.full_like(index, seqs.max_k)
    shift = seqs.shift[batch] if seqs.batch else torch.zeros_like(index)
    return Rows(index + shift, batch, index), k_len, seqs.max_q if per_batch else 0


def _intersect(masks: Sequence[IntervalMask], rows: Rows, k_len: Tensor) -> tuple[Tensor, Tensor]:
    lo, hi = torch.zeros_like(rows.m), k_len
    for mask in masks:
        mask_lo, mask_hi = mask.interval(rows)
        lo = lo if mask_lo is None else torch.maximum(lo, mask_lo)
        hi = hi if mask_hi is None else torch.minimum(hi, mask_hi)
    lo, hi = tiles.clip_interval(lo, hi, k_len, _minimum, _maximum)
    return lo.int(), hi.int()


def _minimum(a, b):
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


def _maximum(a, b):
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
