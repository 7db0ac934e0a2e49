"""The systems of the papers: which algorithm, in tiles of which size; and what one call costs on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import cost
from tilewise.cost import Memory
from tilewise.plan import schedule
from tilewise.problem import Problem
from tilewise.spec import AttentionSpec, BoundSpec
from tilewise.tiles import cdiv
from tilewise.traffic import (
    FLASH1,
    FLASH2,
    FLASH3,
    OWNED,
    STANDARD,
    Account,
    Algorithm,
    Part,
    Sizes,
    account,
    accumulator_bytes,
)

Tiles = Callable[[str], tuple[int, int]]  # (block_m, block_n) given what stays on the chip: "rows", "keys" or ""


def tiles_for(M: int, D: int) -> Tiles:
    """Tiles for a chip of M elements: what stays has ceil(M / 4d) rows or keys, what streams past has min(that, d).

    FlashAttention, algorithm 1, line 1 says so for the keys that stay there; where rows stay, the two change places.
    """
    large = cdiv(M, 4 * D)
    small = min(large, D)
    return lambda stays: (small, large) if stays == "keys" else (large, small)


@dataclass(frozen=True)
class System:
    """One way to compute attention. Its name is what commands take.

    Args:
        by_head: one program per sequence and head, rather than one per block that stays.
    """

    name: str
    title: str
    algorithm: Algorithm
    by_head: bool
    source: str

    @property
    def tiled(self) -> bool:
        return self.algorithm is not STANDARD


SYSTEMS = {
    system.name: system
    for system in (
        System("standard", "standard attention", STANDARD, False, "Dao et al. 2022, algorithm 0"),
        System("flash1", "FlashAttention-1", FLASH1, True, "Dao et al. 2022, algorithms 1 and 4"),
        System("flash2", "FlashAttention-2", FLASH2, False, "Dao 2023, algorithms 1 and 2"),
        System(
            "flash3", "FlashAttention-3", FLASH3, False, "Shah et al. 2024: FlashAttention-2's loads; dq by reduction"
        ),
        System("triton", "tilewise's portable kernels", OWNED, False, "backends/triton: every sum has one owner"),
    )
}


@dataclass(frozen=True)
class PassReport:
    """One pass of one call on one system."""

    account: Account
    block: tuple[int, int]  # rows and keys of a tile (of the first sweep where there are two)
    programs: int  # of one sequence and head, side by side
    on_chip: int  # bytes of q, k, v, o and s of a tile, in the dtype of q


@dataclass(frozen=True)
class Report:
    """What one call costs on one system."""

    system: System
    forward: PassReport
    backward: PassReport
    memory: Memory

    @property
    def both(self) -> Account:
        return self.forward.account + self.backward.account


def report(system: System, problem: Problem, bound: BoundSpec, tiles: Tiles, aux: Sequence[Tensor] = ()) -> Report:
    """Count one call on one system, in tiles of the given sizes (tile masks bring their own).

    Example:
        >>> from tilewise.io_model.systems import SYSTEMS, plain_problem, report, tiles_for
        >>> problem, bound = plain_problem(B=1, H=1, N=4096, D=64)
        >>> tiles = tiles_for(M=4 * 64 * 256, D=64)
        >>> standard, flash = (report(SYSTEMS[name], problem, bound, tiles) for name in ("standard", "flash2"))
        >>> standard.forward.account.elements == 4 * 4096**2 + 4 * 4096 * 64
        True
        >>> flash.forward.account.elements == 2 * 4096 * 64 + 4096 + 4096 // 256 * (2 * 4096 * 64)
        True
    """
    used = {part.stays for parts in system.algorithm for part in parts}
    plans = {stays: schedule(problem, bound, *tiles(stays)) for stays in used}
    sizes = {stays: Sizes.of(problem, bound, plan.work()) for stays, plan in plans.items()}

    def one_pass(parts: Sequence[Part]) -> PassReport:
        stays = parts[0].stays
        block = (plans[stays].block_m, plans[stays].block_n)
        blocks = cdiv(problem.Sq, block[0]) if stays == "rows" else cdiv(problem.Sk, block[1])
        elements = sum(block) * (problem.D + problem.Dv) + block[0] * block[1]
        return PassReport(
            account(parts, sizes.__getitem__),
            block,
            1 if system.by_head or not stays else max(blocks, 1),
            elements * problem.dtype.itemsize if stays else 0,
        )

    forward, backward = (one_pass(parts) for parts in system.algorithm)
    return Report(system, forward, backward, system_memory(system, problem, aux))


def system_memory(system: System, problem: Problem, aux: Sequence[Tensor] = ()) -> Memory:
    """Bytes kept for backward, and the peaks of both passes beyond inputs, outputs and gradients.

    Per row one lse, or m and l for FlashAttention-1, in the backward pass delta besides; and o or dq once more where they are
    summed in slow memory in another dtype. Standard attention keeps P, with dropout also its mask and the dropped P.
    """
    if system.algorithm is STANDARD:
        found = cost.standard_memory(problem)
        if not problem.spec.dropout_p:
            return found
        dropped = problem.B * problem.H * problem.Sq * problem.Sk * (1 + problem.dtype.itemsize)
        return Memory(*(size + dropped for size in found))
    saved = cost.memory(problem, sum(t.numel() * t.element_size() for t in aux)).saved
    row = problem.total_q * problem.H * accumulator_bytes(problem)  # one number for each row
    rounded = accumulator_bytes(problem) != problem.dtype.itemsize  # then a sum in memory is a tensor of its own
    if system.algorithm is FLASH1:
        return Memory(saved + row, 2 * row + rounded * row * problem.Dv, 2 * row + rounded * row * problem.D)
    if system.algorithm is OWNED:
        return Memory(saved, row, 3 * row)
    return Memory(saved, row, 2 * row + rounded * row * problem.D)


def plain_problem(
    B: int = 1, H: int = 1, N: int = 1024, D: int = 64, dtype: torch.dtype = torch.float16, dropout_p: float = 0.0
) -> tuple[Problem, BoundSpec]:
    """Self-attention on a GPU without a mask: what laws and models are made of."""
    spec = AttentionSpec(dropout_p=dropout_p)
    return Problem(spec, B, H, H, N, N, D, D, dtype, "cuda", B * N, B * N), spec.bind([], D**-0.5)
