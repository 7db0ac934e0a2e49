"""What a call costs: tiles visited, FLOPs, bytes moved, bytes kept for backward, peak memory. Host code for any mask.

Tiles come from the arithmetic that kernels run (`tiles`, `sequences.row_bounds`, `block_mask.tile_map`), so the figures are
counts, not estimates, for tiles of the given size. "Pairs" are (query row, key) pairs, summed over heads and sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.block_mask import TileMap, element_mask, tile_map
from tilewise.problem import Problem
from tilewise.sequences import RowBounds, Sequences, row_bounds, sequences
from tilewise.spec import BoundSpec
from tilewise.tiles import cdiv, kv_tile_range

SKIPPED, MASKED, FULL = 0, 1, 2
BLOCK = 128  # rows and keys of a tile unless the caller says otherwise


@dataclass(frozen=True, eq=False)
class TilePlan:
    """What happens to each tile of one sequence and head."""

    grid: Tensor  # uint8 (q tiles, kv tiles): SKIPPED, MASKED or FULL
    block_m: int
    block_n: int
    Sq: int
    Sk: int

    def count(self, kind: int) -> int:
        """How many tiles are SKIPPED, MASKED or FULL."""
        return int((self.grid == kind).sum())

    def pairs(self, *kinds: int) -> int:
        """(row, key) pairs inside tiles of these kinds; tiles at the edges hold what is left of the sequence."""
        chosen = torch.isin(self.grid, torch.tensor(kinds, dtype=torch.uint8)).long()
        return int(_sizes(self.Sq, self.block_m) @ chosen @ _sizes(self.Sk, self.block_n))

    @property
    def key_loads(self) -> int:
        """Keys read when each block of rows reads the tiles it visits."""
        return int(((self.grid != SKIPPED).long() @ _sizes(self.Sk, self.block_n)).sum())

    @property
    def row_loads(self) -> int:
        """Rows read when each block of keys reads the rows that visit it."""
        return int((_sizes(self.Sq, self.block_m) @ (self.grid != SKIPPED).long()).sum())


def tile_plan(
    bound: BoundSpec,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    block_m: int = BLOCK,
    block_n: int = BLOCK,
    *,
    max_q: int = 0,
    max_k: int = 0,
    b: int = 0,
    h: int = 0,
) -> TilePlan:
    """Classify every tile of one sequence and head.

    Args:
        bound: the call's semantics, its tensors on the CPU.
        q_shape, k_shape: (B, S, H, D), or packed (total, H, D).
        block_m, block_n: rows and keys of a tile. `Blocks` and `Dense` masks bring their own, which then hold.
        max_q, max_k: longest sequences of a packed call.
        b, h: which sequence and head.
    """
    seqs = sequences(bound, q_shape, k_shape, max_q, max_k)
    bounds = row_bounds(bound, seqs, q_shape[0])
    return _tile_plan(seqs, bounds, _tile_map(bound, seqs), block_m, block_n, b, h)


@dataclass(frozen=True)
class Pass:
    """Forward or backward: arithmetic and memory traffic."""

    flops: int  # of visible pairs: what benchmarks divide by time
    visited_flops: int  # of all pairs in visited tiles: what kernels compute
    bytes_read: int
    bytes_written: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / max(self.bytes_read + self.bytes_written, 1)


class Memory(NamedTuple):
    """Bytes: kept from forward to backward, and the peak of each pass beyond inputs, outputs and gradients."""

    saved: int
    peak_forward: int
    peak_backward: int


class Tiles(NamedTuple):
    """Tiles over all sequences and heads."""

    full: int
    masked: int
    skipped: int


@dataclass(frozen=True)
class Cost:
    """The whole account of one call, and of standard attention (S and P in memory) on the same problem."""

    visible_pairs: int
    visited_pairs: int
    tiles: Tiles
    forward: Pass
    backward: Pass
    memory: Memory
    standard_forward: Pass
    standard_backward: Pass
    standard_memory: Memory


def cost(
    problem: Problem, bound: BoundSpec, aux: Sequence[Tensor] = (), block_m: int = BLOCK, block_n: int = BLOCK
) -> Cost:
    """The account of one call.

    Args:
        problem, bound: its sizes and its semantics, tensors on the CPU.
        aux: the tensors beside q, k, v; they count among the bytes saved for backward.
        block_m, block_n: tile size, as in `tile_plan`.

    Example:
        >>> import torch, tilewise
        >>> q = k = v = torch.empty(1, 1024, 8, 64)
        >>> tilewise.explain(q, k, v, causal=True).cost.forward.flops
        1074790400
    """
    work = _work(problem, bound, block_m, block_n)
    dense = problem.B * problem.H * problem.Sq * problem.Sk
    tiled, standard = _traffic(problem, bound, work), _standard_traffic(problem)

    def passes(computed: int, moved: list[tuple[int, int]]) -> list[Pass]:
        per_pair = _flops_per_pair(problem)
        return [Pass(work.visible * f, computed * f, *bytes) for f, bytes in zip(per_pair, moved, strict=True)]

    (forward, backward), (standard_forward, standard_backward) = passes(work.visited, tiled), passes(dense, standard)
    return Cost(
        work.visible,
        work.visited,
        Tiles(work.full, work.masked, work.skipped),
        forward,
        backward,
        memory(problem, sum(t.numel() * t.element_size() for t in aux), workers_of(problem)),
        standard_forward,
        standard_backward,
        standard_memory(problem),
    )


# ---- memory ----


def tensor_bytes(problem: Problem) -> int:
    """Bytes of q, k, v and o."""
    rows, keys = problem.total_q * problem.H, problem.total_k * problem.Hkv
    return (rows + keys) * (problem.D + problem.Dv) * problem.dtype.itemsize


def memory(problem: Problem, aux_bytes: int = 0, workers: int = 0) -> Memory:
    """What tilewise keeps and needs: linear in the sequence lengths.

    Saved are q, k, v, o, one number (lse) per row and the call's other tensors. Forward needs nothing more that grows.

    Args:
        problem: the call's sizes.
        aux_bytes: bytes of its tensors beside q, k, v.
        workers: 0 for kernels that add to dq in memory (GPUs): backward then needs delta, and for 16-bit dtypes gradients
            summed in float32. The CPU's threads instead each sum dk and dv of one kv head, and where there are fewer
            heads than threads, dq in several parts.
    """
    rows, keys = problem.total_q * problem.H, problem.total_k * problem.Hkv
    row, D, Dv = accumulator_bytes(problem), problem.D, problem.Dv
    if workers:
        parts = cdiv(workers, max(problem.B * problem.Hkv, 1))
        beside = workers * cdiv(problem.Sk, parts) * (D + Dv) * row + (parts * rows * D * row if parts > 1 else 0)
    else:
        beside = rows * row + (row * (rows * D + keys * (D + Dv)) if row > problem.dtype.itemsize else 0)
    return Memory(tensor_bytes(problem) + rows * row + aux_bytes, rows * row, rows * row + beside)


def workers_of(problem: Problem) -> int:
    """The `workers` of `memory` on this machine."""
    return torch.get_num_threads() if problem.device == "cpu" else 0


def standard_memory(problem: Problem) -> Memory:
    """What attention with S and P in memory keeps and needs.

    P is kept for backward, and the boolean mask of a masked call; forward holds S and P, backward P, dP and dS.
    """
    rows, keys, e = problem.total_q * problem.H, problem.total_k * problem.Hkv, problem.dtype.itemsize
    matrix = problem.B * problem.H * problem.Sq * problem.Sk * e
    mask = problem.Sq * problem.Sk if problem.spec.mask else 0
    saved = (rows * problem.D + keys * (problem.D + problem.Dv)) * e + matrix + mask
    return Memory(saved, 2 * matrix + mask, 3 * matrix + mask)


def out_of_memory_point(problem: Problem, memory_bytes: int, standard: bool = True) -> int:
    """The longest Sq = Sk for which a training step fits: inputs, outputs, gradients of all of them, and the peak."""

    def needed(n: int) -> int:
        sized = replace(problem, Sq=n, Sk=n, total_q=problem.B * n, total_k=problem.B * n)
        extra = standard_memory(sized) if standard else memory(sized, 0, workers_of(sized))
        return 2 * tensor_bytes(sized) + max(extra.peak_forward, extra.peak_backward)

    low, high = 0, 1
    while needed(high) <= memory_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= memory_bytes else (low, middle)
    return low


def accumulator_bytes(problem: Problem) -> int:
    """Bytes of one number of lse, delta and accumulators: float64 for float64, else float32."""
    return 8 if problem.dtype == torch.float64 else 4


# ---- FLOPs and traffic ----


def _flops_per_pair(problem: Problem) -> tuple[int, int]:
    """Forward: q.k and p.v. Backward: q.k again, dp = do.v, and one product each for dq, dk and dv: 2.5 times as much."""
    D, Dv = problem.D, problem.Dv
    return 2 * (D + Dv), 2 * (3 * D + 2 * Dv)


def _traffic(problem: Problem, bound: BoundSpec, work: _Work) -> list[tuple[int, int]]:
    """Bytes (read, written) by each pass.

    Forward (FlashAttention-2, algorithm 1): every block of rows reads its key tiles. Backward (algorithm 2): delta first, then
    every block of keys reads the rows that visit it and adds to their dq.
    """
    D, Dv, e, acc = problem.D, problem.Dv, problem.dtype.itemsize, accumulator_bytes(problem)
    rows, keys, kv = problem.total_q * problem.H, problem.total_k * problem.H, problem.total_k * problem.Hkv
    # Row bounds are two int32 per row; a bias is read wherever a tile is visited, a dense mask where a tile is masked.
    beside = 8 * rows
    if bound.bias is not None:
        beside += work.visited * bound.bias.element_size()
    if element_mask(bound.tile_masks) is not None:
        beside += work.masked_pairs
    forward_read = rows * D * e + work.key_loads * (D + Dv) * e + beside
    forward_written = rows * (Dv * e + acc)
    delta_read, delta_written = rows * 2 * Dv * e, rows * acc
    backward_read = delta_read + keys * (D + Dv) * e + work.row_loads * ((D + Dv) * e + (D + 2) * acc) + beside
    backward_written = delta_written + work.row_loads * D * acc + kv * (D + Dv) * e
    return [(forward_read, forward_written), (backward_read, backward_written)]


def _standard_traffic(problem: Problem) -> list[tuple[int, int]]:
    """Every step reads its operands from memory and writes its result there (FlashAttention, algorithm 0)."""
    rows, keys, e = problem.total_q * problem.H, problem.total_k * problem.Hkv, problem.dtype.itemsize
    matrix = problem.B * problem.H * problem.Sq * problem.Sk * e
    q, o, kv = rows * problem.D * e, rows * problem.Dv * e, keys * (problem.D + problem.Dv) * e
    return [
        (q + kv + 2 * matrix, o + 2 * matrix),  # S = q.k; P = softmax(S); o = P.v
        (q + kv + 2 * o + 5 * matrix, q + kv + 2 * matrix),  # dv: P; dP; dS: P, dP; dq: dS; dk: dS
    ]


class _Work(NamedTuple):
    """Counts over all sequences and heads."""

    visible: int = 0
    visited: int = 0
    masked_pairs: int = 0
    key_loads: int = 0
    row_loads: int = 0
    full: int = 0
    masked: int = 0
    skipped: int = 0


def _work(problem: Problem, bound: BoundSpec, block_m: int, block_n: int) -> _Work:
    if bound.spec.varlen:
        q_shape, k_shape = (problem.total_q, problem.H), (problem.total_k, problem.Hkv)
    else:
        q_shape, k_shape = (problem.B, problem.Sq, problem.H), (problem.B, problem.Sk, problem.Hkv)
    seqs = sequences(bound, q_shape, k_shape, problem.Sq, problem.Sk)
    bounds, tiles, keep = row_bounds(bound, seqs, q_shape[0]), _tile_map(bound, seqs), element_mask(bound.tile_masks)
    total = _Work()
    for b, h, times in _distinct(seqs, bounds, tiles, problem.H):
        plan = _tile_plan(seqs, bounds, tiles, block_m, block_n, b, h)
        one = _Work(
            visible=_visible_pairs(seqs, bounds, tiles, keep, b, h),
            visited=plan.pairs(FULL, MASKED),
            masked_pairs=plan.pairs(MASKED),
            key_loads=plan.key_loads,
            row_loads=plan.row_loads,
            full=plan.count(FULL),
            masked=plan.count(MASKED),
            skipped=plan.count(SKIPPED),
        )
        total = _Work(*(a + times * n for a, n in zip(total, one, strict=True)))
    return total


def _distinct(seqs: Sequences, bounds: RowBounds, tiles: TileMap | None, H: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, head, how many are the same) for each distinct set of tiles."""
    batches, heads = (1, 1) if tiles is None else tiles.any.shape[:2]
    if seqs.varlen or bounds.stride:
        batches = seqs.batch
    batches = min(batches, seqs.batch)
    for b in range(batches):
        for h in range(heads):
            yield b, h, (seqs.batch // batches) * (H // heads)


# ---- tiles ----


def _tile_map(bound: BoundSpec, seqs: Sequences) -> TileMap | None:
    return tile_map(bound.tile_masks, seqs.max_q, seqs.max_k) if bound.tile_masks else None


def _tile_plan(
    seqs: Sequences, bounds: RowBounds, tiles: TileMap | None, block_m: int, block_n: int, b: int, h: int
) -> TilePlan:
    if tiles is not None:
        block_m, block_n = tiles.block_m, tiles.block_n
    lo, hi = _bounds_of(seqs, bounds, b)
    Sq, Sk = len(lo), int(seqs.k_len[b])
    grid = torch.zeros(cdiv(Sq, block_m), cdiv(Sk, block_n), dtype=torch.uint8)
    for i, (lo_min, lo_max, hi_min, hi_max) in enumerate(_extremes(lo, hi, block_m)):
        visit = kv_tile_range(lo_min, lo_max, hi_min, hi_max, block_n)
        grid[i, visit.first : visit.last] = MASKED
        grid[i, visit.full_first : visit.full_last] = FULL
    if tiles is not None:
        listed, full = (_of(t, b, h)[: grid.shape[0], : grid.shape[1]] for t in (tiles.any, tiles.full))
        grid = torch.where(listed, torch.where(full, grid, grid.clamp(max=MASKED)), SKIPPED)
    return TilePlan(grid, block_m, block_n, Sq, Sk)


def _bounds_of(seqs: Sequences, bounds: RowBounds, b: int) -> tuple[Tensor, Tensor]:
    start = b * bounds.stride + int(seqs.q_start[b])
    rows = slice(start, start + int(seqs.q_len[b]))
    return bounds.lo[rows].long(), bounds.hi[rows].long()


def _extremes(lo: Tensor, hi: Tensor, block_m: int) -> list[list[int]]:
    """(lo_min, lo_max, hi_min, hi_max) of each block of rows. A row that sees no key visits no tile and leaves none full."""
    far = 2**31 - 1

    def split(t: Tensor, padding: int) -> Tensor:
        return F.pad(t, (0, -len(t) % block_m), value=padding).reshape(-1, block_m)

    sees = lo < hi
    found = (
        split(torch.where(sees, lo, far), far).amin(1),
        split(lo, 0).amax(1),
        split(hi, far).amin(1),
        split(torch.where(sees, hi, 0), 0).amax(1),
    )
    return torch.stack(found, 1).tolist()


def _visible_pairs(
    seqs: Sequences, bounds: RowBounds, tiles: TileMap | None, keep: Tensor | None, b: int, h: int
) -> int:
    lo, hi = _bounds_of(seqs, bounds, b)
    if tiles is None:
        return int((hi - lo).sum())
    listed, total = _of(tiles.any, b, h), 0
    for i in range(cdiv(len(lo), tiles.block_m)):
        rows = slice(i * tiles.block_m, (i + 1) * tiles.block_m)
        kept = listed[i].repeat_interleave(tiles.block_n)[None, : seqs.max_k]
        if keep is not None:
            elements = _of(keep, b, h)
            kept = kept & (elements[rows][: len(lo[rows])] if elements.shape[0] > 1 else elements)
        before = F.pad(kept.long().cumsum(1), (1, 0)).expand(len(lo[rows]), -1)  # kept keys below n
        total += int((before.gather(1, hi[rows, None]) - before.gather(1, lo[rows, None])).sum())
    return total


def _of(t: Tensor, b: int, h: int) -> Tensor:
    """The part of a (B or 1, H or 1, ., .) tensor for one sequence and head."""
    return t[b if t.shape[0] > 1 else 0, h if t.shape[1] > 1 else 0]


def _sizes(length: int, block: int) -> Tensor:
    """Rows (or keys) of each tile."""
    return (length - torch.arange(0, length, block)).clamp(max=block)
