"""Tile plans: which tiles of which sequence and head are visited, and the counts that follow. Host code for any mask.

Tiles come from the arithmetic that kernels run (`tiles`, `sequences.row_bounds`, `block_mask.tile_map`), so what is built
on them are counts, not estimates, for tiles of the given size. "Pairs" are (query row, key) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
        chosen = sum((self.grid == kind).double() for kind in kinds)  # exact to 2^53, and much faster than integers
        return int(_sizes(self.Sq, self.block_m).double() @ chosen @ _sizes(self.Sk, self.block_n).double())

    @property
    def key_loads(self) -> int:
        """Keys read when each block of rows reads the tiles it visits."""
        return int((self.grid != SKIPPED).sum(0) @ _sizes(self.Sk, self.block_n))

    @property
    def row_loads(self) -> int:
        """Rows read when each block of keys reads the rows that visit it."""
        return int(_sizes(self.Sq, self.block_m) @ (self.grid != SKIPPED).sum(1))


class Work(NamedTuple):
    """Counts over all sequences and heads."""

    visible: int = 0  # pairs
    visited: int = 0  # pairs in visited tiles
    masked_pairs: int = 0  # of them in tiles that need a mask
    key_loads: int = 0
    row_loads: int = 0
    full: int = 0  # tiles
    masked: int = 0
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tiles of a whole call: what a kernel's work is made of, and what there is to count.

    Args:
        seqs, bounds: where sequences lie and which keys each row sees.
        tiles, keep: tile lists and element-wise part of tile masks, None where there are none.
        H: query heads.
        block_m, block_n: rows and keys of a tile; those of tile masks where there are any.
    """

    seqs: Sequences
    bounds: RowBounds
    tiles: TileMap | None
    keep: Tensor | None
    H: int
    block_m: int
    block_n: int

    @classmethod
    def of(
        cls, bound: BoundSpec, q_shape: Sequence[int], k_shape: Sequence[int], max_q: int, max_k: int,
        block_m: int, block_n: int,
    ) -> Schedule:  # fmt: skip
        seqs = sequences(bound, q_shape, k_shape, max_q, max_k)
        bounds = row_bounds(bound, seqs, q_shape[0])
        tiles = tile_map(bound.tile_masks, seqs.max_q, seqs.max_k) if bound.tile_masks else None
        if tiles is not None:
            block_m, block_n = tiles.block_m, tiles.block_n
        return cls(seqs, bounds, tiles, element_mask(bound.tile_masks), q_shape[-2], block_m, block_n)

    def rows(self, b: int) -> tuple[Tensor, Tensor]:
        """First and one-past-last key of each row of a sequence."""
        start = b * self.bounds.stride + int(self.seqs.q_start[b])
        rows = slice(start, start + int(self.seqs.q_len[b]))
        return self.bounds.lo[rows].long(), self.bounds.hi[rows].long()

    def plan(self, b: int, h: int) -> TilePlan:
        """The tiles of one sequence and head."""
        lo, hi = self.rows(b)
        Sq, Sk = len(lo), int(self.seqs.k_len[b])
        grid = torch.zeros(cdiv(Sq, self.block_m), cdiv(Sk, self.block_n), dtype=torch.uint8)
        for i, (lo_min, lo_max, hi_min, hi_max) in enumerate(_extremes(lo, hi, self.block_m)):
            visit = kv_tile_range(lo_min, lo_max, hi_min, hi_max, self.block_n)
            grid[i, visit.first : visit.last] = MASKED
            grid[i, visit.full_first : visit.full_last] = FULL
        if self.tiles is not None:
            listed, full = (_of(t, b, h)[: grid.shape[0], : grid.shape[1]] for t in (self.tiles.any, self.tiles.full))
            grid = torch.where(listed, torch.where(full, grid, grid.clamp(max=MASKED)), SKIPPED)
        return TilePlan(grid, self.block_m, self.block_n, Sq, Sk)

    def kept(self, b: int, h: int) -> Tensor | None:
        """What the element-wise mask of one sequence and head keeps, (Sq or 1, Sk or 1)."""
        return None if self.keep is None else _of(self.keep, b, h)

    def visible(self, b: int, h: int) -> int:
        """Pairs of one sequence and head that the masks let through."""
        lo, hi = self.rows(b)
        if self.tiles is None:
            return int((hi - lo).sum())
        listed, keep, total = _of(self.tiles.any, b, h), self.kept(b, h), 0
        for i in range(cdiv(len(lo), self.block_m)):
            rows = slice(i * self.block_m, (i + 1) * self.block_m)
            kept = listed[i].repeat_interleave(self.block_n)[None, : self.seqs.max_k]
            if keep is not None:
                kept = kept & (keep[rows][: len(lo[rows])] if keep.shape[0] > 1 else keep)
            before = F.pad(kept.long().cumsum(1), (1, 0)).expand(len(lo[rows]), -1)  # kept keys below n
            total += int((before.gather(1, hi[rows, None]) - before.gather(1, lo[rows, None])).sum())
        return total

    def work(self) -> Work:
        """The counts of all sequences and heads."""
        total = Work()
        for b, h, times in self._distinct():
            plan = self.plan(b, h)
            one = Work(
                visible=self.visible(b, h),
                visited=plan.pairs(FULL, MASKED),
                masked_pairs=plan.pairs(MASKED),
                key_loads=plan.key_loads,
                row_loads=plan.row_loads,
                full=plan.count(FULL),
                masked=plan.count(MASKED),
                skipped=plan.count(SKIPPED),
            )
            total = Work(*(a + times * n for a, n in zip(total, one, strict=True)))
        return total

    def _distinct(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, head, how many are the same) for each distinct set of tiles."""
        batches, heads = (1, 1) if self.tiles is None else self.tiles.any.shape[:2]
        if self.seqs.varlen or self.bounds.stride:
            batches = self.seqs.batch
        batches = min(batches, self.seqs.batch)
        for b in range(batches):
            for h in range(heads):
                yield b, h, (self.seqs.batch // batches) * (self.H // heads)


def schedule(problem: Problem, bound: BoundSpec, block_m: int = BLOCK, block_n: int = BLOCK) -> Schedule:
    """The tiles of a call, in tiles of `block_m` rows by `block_n` keys (tile masks bring their own)."""
    if bound.spec.varlen:
        q_shape, k_shape = (problem.total_q, problem.H, problem.D), (problem.total_k, problem.Hkv, problem.D)
    else:
        q_shape = (problem.B, problem.Sq, problem.H, problem.D)
        k_shape = (problem.B, problem.Sk, problem.Hkv, problem.D)
    return Schedule.of(bound, q_shape, k_shape, problem.Sq, problem.Sk, block_m, block_n)


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
    return Schedule.of(bound, q_shape, k_shape, max_q, max_k, block_m, block_n).plan(b, h)


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


def _of(t: Tensor, b: int, h: int) -> Tensor:
    """The part of a (B or 1, H or 1, ., .) tensor for one sequence and head."""
    return t[b if t.shape[0] > 1 else 0, h if t.shape[1] > 1 else 0]


def _sizes(length: int, block: int) -> Tensor:
    """Rows (or keys) of each tile."""
    return (length - torch.arange(0, length, block)).clamp(max=block)
