"""What each attention algorithm moves between slow memory and the chip, and computes there: exact counts, in closed form.

One function per algorithm and pass turns a `Work` (the counts of a tile schedule) into an `Account`. `io_model.simulator`
executes the same schedules with a counted memory and must find the same numbers. What is counted:

- elements loaded and stored, by tensor. Every step of standard attention reads its operands once and writes its result;
  a tiled kernel loads what its tile needs each time it visits a tile;
- what several tiles add to in slow memory is kept in the precision of accumulators (`o_sum`, `dq_sum`): it is zeroed first,
  read and written at every visit, and for 16-bit dtypes rounded by one more pass;
- two int32 per row ("bounds") where kernels read which keys a row sees rather than compute it; one byte per pair for boolean
  masks; a bias where it is visited;
- FLOPs of products (2 m n k), and apart from them one per addition, multiplication, comparison or exponential of an element.
  Recomputed are those that standard attention's backward pass reads from memory instead.

Dropout is one FLOP per pair for each time that its mask is applied; tiled kernels make the mask anew from a counter, standard
attention keeps it, one byte per pair. Not counted: O(H) tensors (sinks, slopes), arithmetic of softcap, ALiBi and of random
numbers, and the gradient of a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tilewise.block_mask import element_mask
from tilewise.plan import Work
from tilewise.problem import Problem
from tilewise.spec import BoundSpec

BOUNDS_BYTES = 4


@dataclass(frozen=True)
class Moved:
    """Loads and stores of one tensor by one kernel, in elements of `itemsize` bytes."""

    name: str
    itemsize: int
    size: int  # elements of the tensor
    loads: int = 0
    stores: int = 0

    @property
    def compulsory(self) -> tuple[int, int]:
        """Loads and stores that are left if a cache holds whatever a kernel reads or writes again."""
        return min(self.loads, self.size), min(self.stores, self.size)


@dataclass(frozen=True)
class Account:
    """One pass of one algorithm: what moves, and how many FLOPs it takes."""

    moved: tuple[Moved, ...]
    matmul: int  # FLOPs of products
    other: int  # all other FLOPs
    exponentials: int  # of `other`
    recomputed: int = 0  # of `matmul`: what standard attention would have kept
    other_recomputed: int = 0

    @property
    def bytes_read(self) -> int:
        return sum(m.loads * m.itemsize for m in self.moved)

    @property
    def bytes_written(self) -> int:
        return sum(m.stores * m.itemsize for m in self.moved)

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def elements(self) -> int:
        return sum(m.loads + m.stores for m in self.moved)

    @property
    def compulsory_bytes(self) -> int:
        """Bytes to and from a memory behind a cache that holds whatever one kernel uses again."""
        return sum(sum(m.compulsory) * m.itemsize for m in self.moved)

    @property
    def footprint(self) -> int:
        """Bytes of all tensors that move."""
        return sum({m.name: m.size * m.itemsize for m in self.moved if m.loads or m.stores}.values())

    def by_tensor(self) -> dict[str, tuple[int, int]]:
        """(loads, stores) of each tensor that moves, all kernels together."""
        total: dict[str, tuple[int, int]] = {}
        for m in self.moved:
            loads, stores = total.get(m.name, (0, 0))
            total[m.name] = (loads + m.loads, stores + m.stores)
        return {name: counts for name, counts in total.items() if any(counts)}

    def __add__(self, other: Account) -> Account:
        numbers = ("matmul", "other", "exponentials", "recomputed", "other_recomputed")
        return Account(self.moved + other.moved, *(getattr(self, n) + getattr(other, n) for n in numbers))


class Sizes(NamedTuple):
    """The numbers of a call from which every count is made."""

    D: int
    Dv: int
    rows: int  # (row, head) pairs
    keys: int  # (key, query head) pairs: each query head reads the keys of its kv head
    kv: int  # (key, kv head) pairs
    pairs: int  # of the whole score matrices
    itemsize: int
    sums: int  # bytes of one number of accumulators
    masked: bool  # standard attention reads a boolean mask
    bias: int  # bytes of one number of the bias; 0: there is none
    bias_size: int
    dense: int  # elements of the element-wise mask; 0: there is none
    bounds: bool  # row bounds are read from memory
    dropout: bool
    work: Work

    @classmethod
    def of(cls, problem: Problem, bound: BoundSpec, work: Work) -> Sizes:
        keep, bias = element_mask(bound.tile_masks), bound.bias
        rows, kv = problem.total_q * problem.H, problem.total_k * problem.Hkv
        pairs = problem.B * problem.H * problem.Sq * problem.Sk
        bounds = reads_bounds(problem, bound)
        return cls(
            problem.D, problem.Dv, rows, kv * problem.G, kv, pairs, problem.dtype.itemsize, accumulator_bytes(problem),
            bool(problem.spec.mask), 0 if bias is None else bias.element_size(), 0 if bias is None else bias.numel(),
            0 if keep is None else keep.numel(), bounds, bool(problem.spec.dropout_p), work,
        )  # fmt: skip


def reads_bounds(problem: Problem, bound: BoundSpec) -> bool:
    """Whether kernels read the bounds of each row: always on a CPU, on GPUs where no closed formula gives them."""
    return problem.device == "cpu" or any(mask.tensors for mask in bound.interval_masks)


def accumulator_bytes(problem: Problem) -> int:
    """Bytes of one number of lse, delta and accumulators: float64 for float64, else float32."""
    return 8 if problem.dtype == torch.float64 else 4


@dataclass
class _Ledger:
    """Collects what moves, kernel by kernel."""

    sizes: Sizes
    moved: list[Moved] = field(default_factory=list)

    def move(self, name: str, size: int, loads: int = 0, stores: int = 0, itemsize: int = 0) -> None:
        """Note a kernel's loads and stores of a tensor, by default in the dtype of q."""
        self.moved.append(Moved(name, itemsize or self.sizes.itemsize, size, loads, stores))

    def statistics(self, name: str, loads: int = 0, stores: int = 0, per_row: int = 1) -> None:
        """Note loads and stores of numbers per row: lse, delta, (m, l)."""
        self.move(name, per_row * self.sizes.rows, per_row * loads, per_row * stores, self.sizes.sums)

    def summed(self, name: str, size: int, visits: int, reads: int) -> None:
        """Note a sum in slow memory: zeroed, written at every visit and `reads` of it read, rounded at the end."""
        z = self.sizes
        rounded = z.sums != z.itemsize
        self.move(f"{name}_sum" if rounded else name, size, 0, size, z.sums)
        self.move(f"{name}_sum" if rounded else name, size, reads, visits, z.sums)
        if rounded:
            self.move(f"{name}_sum", size, size, 0, z.sums)
            self.move(name, size, 0, size)

    def masks(self, bound_rows: int) -> None:
        """Note what tells a sweep which pairs are seen, and the bias."""
        z = self.sizes
        if z.bounds:
            self.move("bounds", 2 * z.rows, 2 * bound_rows, 0, BOUNDS_BYTES)
        if z.bias:
            self.move("bias", z.bias_size, z.work.visited, 0, z.bias)
        if z.dense:
            self.move("mask", z.dense, z.work.masked_pairs, 0, 1)

    def account(self, *flops: int) -> Account:
        return Account(tuple(self.moved), *flops)


# ---- standard attention ----


def standard_forward(z: Sizes) -> Account:
    """FlashAttention's algorithm 0: S = q.k; P = softmax(S); o = P.v, each to memory and back: 4 N^2 + 4 N d elements."""
    led, matrix = _Ledger(z), z.pairs
    led.move("q", z.rows * z.D, z.rows * z.D)
    led.move("k", z.kv * z.D, z.kv * z.D)
    led.move("s", matrix, matrix, matrix)
    if z.masked:
        led.move("mask", matrix, matrix, 0, 1)
    if z.bias:
        led.move("bias", z.bias_size, matrix, 0, z.bias)
    led.move("p", matrix, matrix, matrix)
    if z.dropout:  # another step: P read, its mask and what is left of it written; the product then reads that
        led.move("dropped p", matrix, matrix, matrix)
        led.move("dropout mask", matrix, 0, matrix, 1)
    led.move("v", z.kv * z.Dv, z.kv * z.Dv)
    led.move("o", z.rows * z.Dv, 0, z.rows * z.Dv)
    return led.account(2 * (z.D + z.Dv) * matrix, (6 + z.masked + bool(z.bias) + z.dropout) * matrix, matrix)


def standard_backward(z: Sizes) -> Account:
    """dv: P, do; dP: do, v; dS: P, dP; dq: dS, k; dk: dS, q: 7 N^2 + 8 N d elements, nothing recomputed."""
    led, matrix = _Ledger(z), z.pairs
    led.move("do", z.rows * z.Dv, z.rows * z.Dv)
    led.move("dropped p" if z.dropout else "p", matrix, matrix)
    led.move("dv", z.kv * z.Dv, 0, z.kv * z.Dv)
    led.move("do", z.rows * z.Dv, z.rows * z.Dv)
    led.move("v", z.kv * z.Dv, z.kv * z.Dv)
    led.move("dp", matrix, matrix, matrix)
    if z.dropout:
        led.move("dp", matrix, matrix, matrix)
        led.move("dropout mask", matrix, matrix, 0, 1)
    led.move("p", matrix, matrix)
    led.move("ds", matrix, matrix, matrix)
    led.move("ds", matrix, matrix)
    led.move("k", z.kv * z.D, z.kv * z.D)
    led.move("dq", z.rows * z.D, 0, z.rows * z.D)
    led.move("q", z.rows * z.D, z.rows * z.D)
    led.move("dk", z.kv * z.D, 0, z.kv * z.D)
    return led.account(4 * (z.D + z.Dv) * matrix, (5 + z.dropout) * matrix, 0)


# ---- tiled: forward ----


def rows_outer_forward(z: Sizes) -> Account:
    """FlashAttention-2, algorithm 1: a block of rows stays, keys stream past it: 2 N d + 2 N d T_r + N elements."""
    led, work = _Ledger(z), z.work
    led.move("q", z.rows * z.D, z.rows * z.D)
    led.move("k", z.kv * z.D, work.key_loads * z.D)
    led.move("v", z.kv * z.Dv, work.key_loads * z.Dv)
    led.move("o", z.rows * z.Dv, 0, z.rows * z.Dv)
    led.statistics("lse", 0, z.rows)
    led.masks(z.rows)
    softmax = (5 + bool(z.bias) + z.dropout) * work.visited + work.masked_pairs
    other = softmax + (z.Dv + 5) * work.row_loads + (z.Dv + 2) * z.rows
    return led.account(2 * (z.D + z.Dv) * work.visited, other, work.visited + work.row_loads)


def keys_outer_forward(z: Sizes) -> Account:
    """FlashAttention, algorithm 1: keys stay, rows stream past; o, l and m are rescaled in slow memory at every visit.

    2 N d + T_c (3 N d + 4 N) elements, and N d + 2 N to zero o, l and m.
    """
    led, work = _Ledger(z), z.work
    led.move("k", z.kv * z.D, z.keys * z.D)
    led.move("v", z.kv * z.Dv, z.keys * z.Dv)
    led.move("q", z.rows * z.D, work.row_loads * z.D)
    led.summed("o", z.rows * z.Dv, work.row_loads * z.Dv, work.row_loads * z.Dv)
    led.statistics("m, l", 0, z.rows, per_row=2)
    led.statistics("m, l", work.row_loads, work.row_loads, per_row=2)
    led.masks(work.row_loads)
    softmax = (5 + bool(z.bias) + z.dropout) * work.visited + work.masked_pairs
    other = softmax + (4 * z.Dv + 8) * work.row_loads
    return led.account(2 * (z.D + z.Dv) * work.visited, other, work.visited + 2 * work.row_loads)


# ---- tiled: backward ----


def _keys_outer_sweep(led: _Ledger) -> None:
    """k and v stay and own dk and dv; the rows that visit them stream past."""
    z, visits = led.sizes, led.sizes.work.row_loads
    led.move("k", z.kv * z.D, z.keys * z.D)
    led.move("v", z.kv * z.Dv, z.keys * z.Dv)
    led.move("q", z.rows * z.D, visits * z.D)
    led.move("do", z.rows * z.Dv, visits * z.Dv)
    led.move("dk", z.kv * z.D, 0, z.kv * z.D)
    led.move("dv", z.kv * z.Dv, 0, z.kv * z.Dv)
    led.masks(visits)


def _recomputed(z: Sizes, per_pair: int) -> int:
    """FLOPs beside products that make p anew."""
    return (per_pair + bool(z.bias)) * z.work.visited + z.work.masked_pairs


def summed_backward(z: Sizes) -> Account:
    """FlashAttention-2, algorithm 2: delta first, then by blocks of keys, adding to dq in slow memory."""
    return _delta_first(z, z.work.row_loads * z.D)


def reduced_backward(z: Sizes) -> Account:
    """The same where slow memory adds by itself (atomic additions, Hopper's reducing copies): dq is not read for it."""
    return _delta_first(z, 0)


def _delta_first(z: Sizes, dq_reads: int) -> Account:
    led, work = _Ledger(z), z.work
    led.move("o", z.rows * z.Dv, z.rows * z.Dv)
    led.move("do", z.rows * z.Dv, z.rows * z.Dv)
    led.statistics("delta", 0, z.rows)
    _keys_outer_sweep(led)
    led.statistics("lse", work.row_loads)
    led.statistics("delta", work.row_loads)
    led.summed("dq", z.rows * z.D, work.row_loads * z.D, dq_reads)
    again = _recomputed(z, 3)
    flops = 2 * (3 * z.D + 2 * z.Dv) * work.visited
    other = again + (3 + 2 * z.dropout) * work.visited + 2 * z.Dv * z.rows
    return led.account(flops, other, work.visited, 2 * z.D * work.visited, again)


def flash1_backward(z: Sizes) -> Account:
    """FlashAttention, algorithm 4: delta is made anew from o and do at every visit, P from m and l."""
    led, work = _Ledger(z), z.work
    _keys_outer_sweep(led)
    led.move("o", z.rows * z.Dv, work.row_loads * z.Dv)
    led.statistics("m, l", work.row_loads, per_row=2)
    led.summed("dq", z.rows * z.D, work.row_loads * z.D, work.row_loads * z.D)
    again = _recomputed(z, 4)
    flops = 2 * (3 * z.D + 2 * z.Dv) * work.visited
    other = again + (3 + 2 * z.dropout) * work.visited + 2 * z.Dv * work.row_loads
    return led.account(flops, other, work.visited, 2 * z.D * work.visited, again)


def owned_keys_backward(z: Sizes) -> Account:
    """tilewise's portable GPU kernels: statistics, then dk and dv by blocks of keys, sums that stay on the chip."""
    led, work = _Ledger(z), z.work
    led.move("o", z.rows * z.Dv, z.rows * z.Dv)
    led.move("do", z.rows * z.Dv, z.rows * z.Dv)
    led.statistics("lse", z.rows)
    led.statistics("statistics", 0, z.rows, per_row=2)  # -lse and -delta
    _keys_outer_sweep(led)
    led.statistics("statistics", work.row_loads, per_row=2)
    again = _recomputed(z, 3)
    other = again + (3 + 2 * z.dropout) * work.visited + (2 * z.Dv + 2) * z.rows
    return led.account(4 * (z.D + z.Dv) * work.visited, other, work.visited, 2 * z.D * work.visited, again)


def owned_rows_backward(z: Sizes) -> Account:
    """And dq by blocks of rows, with p and dp computed a second time: the price of no sum in slow memory."""
    led, work = _Ledger(z), z.work
    led.move("q", z.rows * z.D, z.rows * z.D)
    led.move("do", z.rows * z.Dv, z.rows * z.Dv)
    led.statistics("statistics", z.rows, per_row=2)
    led.move("k", z.kv * z.D, work.key_loads * z.D)
    led.move("v", z.kv * z.Dv, work.key_loads * z.Dv)
    led.move("dq", z.rows * z.D, 0, z.rows * z.D)
    led.masks(z.rows)
    again = _recomputed(z, 3) + (3 + z.dropout) * work.visited
    flops, twice = 2 * (2 * z.D + z.Dv) * work.visited, 2 * (z.D + z.Dv) * work.visited
    return led.account(flops, again, work.visited, twice, again)


class Part(NamedTuple):
    """A sweep over tiles: what stays on the chip while the rest streams past ("rows", "keys", or "" without tiles)."""

    stays: str
    count: Callable[[Sizes], Account]


class Algorithm(NamedTuple):
    """A forward and a backward pass that fit together."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]


STANDARD = Algorithm((Part("", standard_forward),), (Part("", standard_backward),))
FLASH1 = Algorithm((Part("keys", keys_outer_forward),), (Part("keys", flash1_backward),))
FLASH2 = Algorithm((Part("rows", rows_outer_forward),), (Part("keys", summed_backward),))
FLASH3 = Algorithm(FLASH2.forward, (Part("keys", reduced_backward),))
OWNED = Algorithm(
    (Part("rows", rows_outer_forward),), (Part("keys", owned_keys_backward), Part("rows", owned_rows_backward))
)


def account(parts: Sequence[Part], sizes: Callable[[str], Sizes]) -> Account:
    """The account of one pass, the sizes of each part given what stays in it."""
    first, *rest = (part.count(sizes(part.stays)) for part in parts)
    return sum(rest, first)
