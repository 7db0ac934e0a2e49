"""Lowering for the CPU: a bound spec becomes a Plan. All masks become row intervals, tile lists and an element mask."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tilewise.backends.cpu.plan import Plan, TileRanges
from tilewise.block_mask import TileMap, element_mask, tile_map
from tilewise.sequences import Sequences, row_bounds, sequences
from tilewise.spec import BoundSpec


def lower(q: Tensor, k: Tensor, bound: BoundSpec, max_q: int, max_k: int) -> Plan:
    """The plan of one call. `q` and `k` give shapes and dtype only."""
    # A bound spec without tensors is the same object in every call of a training loop (`spec.bind`): so is its plan.
    make = _lower if bound.has_tensors else _lower_bare
    return make(bound, q.shape, k.shape, q.dtype, max_q, max_k)


def _lower(
    bound: BoundSpec, q_shape: torch.Size, k_shape: torch.Size, dtype: torch.dtype, max_q: int, max_k: int
) -> Plan:
    seqs = sequences(bound, q_shape, k_shape, max_q, max_k)
    if seqs.varlen:
        _check_sequences(seqs, q_shape[0], k_shape[0])
    bounds = row_bounds(bound, seqs, q_shape[0])
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    B, H = seqs.batch, q_shape[-2]
    full = (B, H, seqs.max_q, seqs.max_k)
    masks = bound.tile_masks
    keep = element_mask(masks)
    return Plan(
        seq=_sequence_table(seqs) if seqs.varlen else _dense_table(B, seqs.max_q, seqs.max_k, bound.spec.align),
        max_q=seqs.max_q,
        max_k=seqs.max_k,
        lo=bounds.lo,
        hi=bounds.hi,
        bounds_stride=bounds.stride,
        softmax_scale=bound.softmax_scale,
        softcap=bound.spec.softcap,
        slopes=None if bound.alibi_slopes is None else bound.alibi_slopes.to(acc).resolve_neg().expand(B, H),
        bias=None if bound.bias is None else bound.bias.resolve_neg().expand(full),
        sinks=None if bound.sinks is None else bound.sinks.to(acc).resolve_neg().contiguous(),
        keep=None if keep is None else keep.expand(full),
        tiles=_tile_ranges(tile_map(masks, seqs.max_q, seqs.max_k), B, H, seqs.max_k) if masks else None,
        dropout_p=bound.spec.dropout_p,
        seed=0 if bound.seed is None else int(bound.seed),
        max_logit=bound.spec.max_logit,
    )


_lower_bare = lru_cache(maxsize=64)(_lower)


def _check_sequences(seqs: Sequences, total_q: int, total_k: int) -> None:
    """Refuse lengths that would lead a kernel outside its tensors.

    `problem.check_cu_seqlens` has seen to it in eager calls; compiled ones bring the values only now.
    """
    for name, start, length, longest, total in (
        ("q", seqs.q_start, seqs.q_len, seqs.max_q, total_q),
        ("k", seqs.k_start, seqs.k_len, seqs.max_k, total_k),
    ):
        if len(start) == 0:
            continue
        inside = (start >= 0) & (length >= 0) & (start + length <= total) & (length <= longest)
        apart = start[1:] >= start[:-1] + length[:-1]
        if not bool(inside.all() & apart.all() & (start[0] == 0)):
            given = f"starts {start.tolist()[:10]}, lengths {length.tolist()[:10]}"
            raise ValueError(
                f"cu_seqlens_{name} and seqused_{name} must start at 0, never decrease and stay within {total} rows, each "
                f"sequence within max_seqlen_{name} = {longest}; got {given}"
            )


def _sequence_table(seqs: Sequences) -> Tensor:
    return torch.stack([seqs.q_start, seqs.q_len, seqs.k_start, seqs.k_len, seqs.shift], dim=1).contiguous()


@lru_cache(maxsize=256)
def _dense_table(B: int, Sq: int, Sk: int, align: str) -> Tensor:
    shift = Sk - Sq if align == "bottom_right" else 0
    return torch.tensor([[0, Sq, 0, Sk, shift]], dtype=torch.int64, device="cpu").expand(B, 5).contiguous()


def _tile_ranges(tiles: TileMap, B: int, H: int, max_k: int) -> TileRanges:
    """The visited tiles as compressed rows of key ranges; broadcast batches and heads share them."""
    b, h, nq, _ = tiles.any.shape
    where = tiles.any.nonzero()
    starts = where[:, 3] * tiles.block_n
    counts = tiles.any.sum(3).reshape(b, h, nq)
    # Rows of one (b, h) are consecutive, so its last offset is the next one's first.
    ends_of_rows = counts.flatten().cumsum(0).reshape(b, h, nq)
    offsets = torch.cat([(ends_of_rows - counts)[:, :, :1], ends_of_rows], dim=2) if nq else counts.new_zeros(b, h, 1)
    return TileRanges(
        block_m=tiles.block_m,
        offsets=offsets.contiguous().expand(B, H, nq + 1),
        starts=starts.int(),
        ends=(starts + tiles.block_n).clamp(max=max_k).int(),
        full=tiles.full[tuple(where.T)].to(torch.uint8),
    )
