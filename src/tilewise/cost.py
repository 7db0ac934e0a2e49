"""What a call costs: tiles visited, FLOPs, bytes moved, bytes kept for backward, peak memory. Host code for any mask.

The figures are counts, not estimates, for tiles of the given size: `plan` says which tiles are visited, `traffic` what an
algorithm moves for them. "Pairs" are (query row, key) pairs, summed over heads and sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.plan import BLOCK, schedule
from tilewise.problem import Problem
from tilewise.spec import BoundSpec
from tilewise.tiles import cdiv
from tilewise.traffic import FLASH2, STANDARD, Part, Sizes, account, accumulator_bytes


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
    work = schedule(problem, bound, block_m, block_n).work()
    sizes = Sizes.of(problem, bound, work)
    forward, backward = (per_pair * work.visible for per_pair in flops_per_pair(problem))
    return Cost(
        work.visible,
        work.visited,
        Tiles(work.full, work.masked, work.skipped),
        _pass(FLASH2.forward, sizes, forward),
        _pass(FLASH2.backward, sizes, backward),
        memory(problem, sum(t.numel() * t.element_size() for t in aux), workers_of(problem)),
        _pass(STANDARD.forward, sizes, forward),
        _pass(STANDARD.backward, sizes, backward),
        standard_memory(problem),
    )


def _pass(parts: Sequence[Part], sizes: Sizes, flops: int) -> Pass:
    found = account(parts, lambda _: sizes)
    return Pass(flops, found.matmul, found.bytes_read, found.bytes_written)


def flops_per_pair(problem: Problem) -> tuple[int, int]:
    """FLOPs of products by which benchmarks count, forward and backward.

    Forward: q.k and p.v. Backward: q.k again, dp = do.v, and one product each for dq, dk and dv: 2.5 times as much.
    """
    D, Dv = problem.D, problem.Dv
    return 2 * (D + Dv), 2 * (3 * D + 2 * Dv)


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

    return largest(lambda n: needed(n) <= memory_bytes)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n >= 1 that fits, where all smaller ones fit, too; 0 if none does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
