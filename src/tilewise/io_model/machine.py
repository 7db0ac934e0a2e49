"""A machine of two levels for `simulator`: a slow memory that counts loads and stores, a chip that counts FLOPs.

Memory that was allocated and not yet written holds NaN, so that a schedule which reads too early cannot give the right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tilewise.plan import FULL, SKIPPED, Schedule, TilePlan
from tilewise.problem import Problem
from tilewise.traffic import accumulator_bytes

Array = Any  # np.ndarray; its shape and dtype parameters say nothing here


class Memory:
    """Slow memory: named arrays, whose every load and store is counted in elements."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.loads: dict[str, int] = {}
        self.stores: dict[str, int] = {}

    def place(self, name: str, array: Array) -> None:
        """Put an input there: it was in memory before, so nothing is counted."""
        self.arrays[name] = array

    def allocate(self, name: str, shape: tuple[int, ...]) -> None:
        self.arrays[name] = np.full(shape, np.nan)

    def load(self, name: str, *index: Any) -> Array:
        found = np.array(self.arrays[name][index])
        self.loads[name] = self.loads.get(name, 0) + found.size
        return found

    def store(self, name: str, value: Array, *index: Any) -> None:
        self.arrays[name][index] = value
        self.stores[name] = self.stores.get(name, 0) + self.arrays[name][index].size

    def add(self, name: str, value: Array, *index: Any) -> None:
        """Slow memory adds: what was there does not come to the chip."""
        self.store(name, self.arrays[name][index] + value, *index)

    def counts(self) -> dict[str, tuple[int, int]]:
        """(loads, stores) of every tensor that moved."""
        both = {n: (self.loads.get(n, 0), self.stores.get(n, 0)) for n in {*self.loads, *self.stores}}
        return {name: counts for name, counts in both.items() if any(counts)}


@dataclass
class Chip:
    """Fast memory and arithmetic: products are counted apart from all else, and what is recomputed twice over."""

    matmul: int = 0
    other: int = 0
    exponentials: int = 0
    recomputed: int = 0
    other_recomputed: int = 0

    def product(self, a: Array, b: Array, again: bool = False) -> Array:
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.matmul += flops
        self.recomputed += flops * again
        return a @ b

    def each(self, value: Array, flops: int = 1, again: bool = False) -> Array:
        """`value`, of which every element took so many FLOPs."""
        self.other += flops * value.size
        self.other_recomputed += flops * value.size * again
        return value

    def exp(self, x: Array, again: bool = False) -> Array:
        self.exponentials += x.size
        return self.each(np.exp(x), 1, again)

    def reduce(self, how: Callable[..., Array], value: Array) -> Array:
        """Maximum or sum of each row: one FLOP per element."""
        self.other += value.size
        return how(value, axis=1, keepdims=True)


class Tile(NamedTuple):
    """One tile of one head, with where its rows and keys lie in the packed arrays (heads, total, dim)."""

    b: int
    h: int
    kind: int
    m: slice  # inside the sequence
    n: slice
    rows: slice  # inside the array
    keys: slice


@dataclass
class Call:
    """One call in a counted memory."""

    problem: Problem
    schedule: Schedule
    scale: float
    memory: Memory
    kept: Array | None  # dropout's factor of every pair, (B, H, Sq, Sk)
    bounds_in_memory: bool  # else rows' bounds are computed, and no loads are counted
    chip: Chip = field(default_factory=Chip)
    plans: dict[tuple[int, int], TilePlan] = field(default_factory=dict)

    def begin(self) -> None:
        self.chip, self.memory.loads, self.memory.stores = Chip(), {}, {}

    def sequences(self) -> Iterator[tuple[int, int, slice, slice]]:
        """(sequence, head, its rows, its keys), the heads of a group one after the other."""
        seqs = self.schedule.seqs
        dense = (0, 0) if seqs.varlen else (self.problem.Sq, self.problem.Sk)
        for b in range(seqs.batch):
            q, k = int(seqs.q_start[b]) + b * dense[0], int(seqs.k_start[b]) + b * dense[1]
            for h in range(self.problem.H):
                yield b, h, slice(q, q + int(seqs.q_len[b])), slice(k, k + int(seqs.k_len[b]))

    def plan(self, b: int, h: int) -> TilePlan:
        if (b, h) not in self.plans:
            self.plans[b, h] = self.schedule.plan(b, h)
        return self.plans[b, h]

    def tile(self, b: int, h: int, i: int, j: int, rows: slice, keys: slice) -> Tile:
        plan = self.plan(b, h)
        m = slice(i * plan.block_m, min((i + 1) * plan.block_m, plan.Sq))
        n = slice(j * plan.block_n, min((j + 1) * plan.block_n, plan.Sk))
        rows, keys = shifted(m, rows.start), shifted(n, keys.start)
        return Tile(b, h, int(plan.grid[i, j]) if plan.grid.numel() else SKIPPED, m, n, rows, keys)

    def row_tiles(self) -> Iterator[tuple[Tile, list[Tile]]]:
        """Each block of rows (as a tile, whose keys do not count) with the tiles it visits."""
        for b, h, rows, keys in self.sequences():
            nq, nk = self.plan(b, h).grid.shape
            for i in range(nq):
                visited = [self.tile(b, h, i, j, rows, keys) for j in range(nk)]
                m = slice(i * self.schedule.block_m, min((i + 1) * self.schedule.block_m, rows.stop - rows.start))
                first = Tile(b, h, SKIPPED, m, slice(0, 0), shifted(m, rows.start), slice(0, 0))
                yield first, [tile for tile in visited if tile.kind != SKIPPED]

    def key_tiles(self) -> Iterator[tuple[int, int, slice, list[tuple[int, list[Tile]]]]]:
        """(sequence, kv head, keys) of each block of keys, with the visiting tiles of each query head of the group."""
        G, heads = self.problem.G, {(b, h): (rows, keys) for b, h, rows, keys in self.sequences()}
        for (b, h), (rows, keys) in heads.items():
            if h % G:
                continue
            nq, nk = self.plan(b, h).grid.shape
            for j in range(nk):
                n = slice(j * self.schedule.block_n, min((j + 1) * self.schedule.block_n, keys.stop - keys.start))
                group = []
                for head in range(h, h + G):
                    tiles = [self.tile(b, head, i, j, rows, keys) for i in range(nq)]
                    group.append((head, [tile for tile in tiles if tile.kind != SKIPPED]))
                yield b, h // G, shifted(n, keys.start), group

    def bounds(self, tile: Tile) -> Array:
        """(lo, hi) of a block of rows."""
        start = tile.b * self.schedule.bounds.stride + int(self.schedule.seqs.q_start[tile.b])
        rows = shifted(tile.m, start)
        if not self.bounds_in_memory:
            return self.memory.arrays["bounds"][:, rows]
        return self.memory.load("bounds", slice(None), rows)

    def scores(self, tile: Tile, q: Array, k: Array, bounds: Array, again: bool = False) -> Array:
        """A tile of scores; -inf where a row does not see a key."""
        s = self.chip.each(self.chip.product(q, k.T, again) * self.scale, 1, again)
        if "bias" in self.memory.arrays:
            s = self.chip.each(s + self.memory.load("bias", tile.b, tile.h, tile.m, tile.n), 1, again)
        if tile.kind == FULL:
            return s
        n = np.arange(tile.n.start, tile.n.stop)
        keep = (bounds[0][:, None] <= n) & (n < bounds[1][:, None])
        if "mask" in self.memory.arrays:
            keep &= self.memory.load("mask", tile.b, tile.h, tile.m, tile.n)
        return self.chip.each(np.where(keep, s, -np.inf), 1, again)

    def drop(self, tile: Tile, values: Array, again: bool = False) -> Array:
        """A tile of P or dP with dropout applied; the mask comes from a counter and costs no loads."""
        if self.kept is None:
            return values
        return self.chip.each(values * self.kept[tile.b, tile.h, tile.m, tile.n], 1, again)

    def sum_in_memory(self, name: str, shape: tuple[int, ...]) -> str:
        """Zero a sum in slow memory; its name says whether it has to be rounded at the end."""
        rounded = accumulator_bytes(self.problem) != self.problem.dtype.itemsize
        total = f"{name}_sum" if rounded else name
        self.memory.allocate(name, shape)
        self.memory.allocate(total, shape)
        self.memory.store(total, np.zeros(shape))
        return total

    def round(self, total: str, name: str) -> None:
        """The pass that rounds a sum to the call's dtype (the simulation keeps its precision)."""
        if total != name:
            self.memory.store(name, self.memory.load(total))


def shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def finite(x: Array) -> Array:
    """0 for the maximum of a row that has seen no key yet: exp(-inf - 0) is the 0 it should be."""
    return np.where(np.isneginf(x), 0.0, x)
