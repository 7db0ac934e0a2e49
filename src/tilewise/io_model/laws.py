"""The asymptotic laws beside the counts: exponents fitted to exact counts, and how far the counts are from their law.

FlashAttention (Dao et al. 2022, theorem 2): standard attention moves Theta(N d + N^2) elements, a tiled one
Theta(N^2 d^2 / M) for a chip of M elements (d <= M <= N d). A block-sparse one moves that times the fraction of kept tiles
(proposition 4). Each exponent comes from a least-squares line through the logarithms of counts at five sizes, where the
leading term leads: the fits say what the schedule does, so their sizes are their own, not the call's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.io_model.systems import SYSTEMS, System, plain_problem, report, tiles_for
from tilewise.masks import Blocks
from tilewise.problem import Problem
from tilewise.spec import AttentionSpec, MaskTerm

N, D, M = 1 << 16, 64, 1 << 16  # around which one of the three is varied
LENGTHS = tuple(1 << i for i in range(13, 18))
DIMS = (32, 48, 64, 96, 128)
CHIPS = tuple(1 << i for i in range(14, 19))
DENSITIES = (0.125, 0.25, 0.5, 0.75, 1.0)
SPARSE_N = 1 << 13


class Fit(NamedTuple):
    """``y = scale * x ** slope``; the residual is the root mean square of relative deviations."""

    slope: float
    scale: float
    residual: float


class Line(NamedTuple):
    """``y = offset + slope * x``, with the share of variance it explains."""

    slope: float
    offset: float
    r2: float


@dataclass(frozen=True)
class Law:
    """How elements moved by one pass grow with N, d and M; None where a size plays no part."""

    system: str
    backward: bool
    exponents: dict[str, Fit | None]


def power(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """The power law through points, by least squares of logarithms.

    Example:
        >>> power([1, 2, 4], [3, 12, 48])
        Fit(slope=2.0, scale=3.0, residual=0.0)
    """
    slope, offset = _least_squares([math.log2(x) for x in xs], [math.log2(y) for y in ys])
    scale = 2**offset
    deviations = [y / (scale * x**slope) - 1 for x, y in zip(xs, ys, strict=True)]
    return Fit(slope, scale, math.sqrt(sum(d * d for d in deviations) / len(deviations)))


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The straight line through points, by least squares."""
    slope, offset = _least_squares(xs, ys)
    middle = sum(ys) / len(ys)
    left = sum((y - offset - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = sum((y - middle) ** 2 for y in ys)
    return Line(slope, offset, 1 - left / total if total else 1.0)


def law(system: System, backward: bool = False) -> Law:
    """Fit the exponents of one pass of a system."""

    def fit(xs: Sequence[int], count: Callable[[int], int]) -> Fit:
        return power(xs, [count(x) for x in xs])

    found: dict[str, Fit | None] = {
        "N": fit(LENGTHS, lambda n: moved(system, n, D, M, backward)),
        "d": fit(DIMS, lambda d: moved(system, N, d, M, backward)) if system.tiled else None,
        "M": fit(CHIPS, lambda m: moved(system, N, D, m, backward)) if system.tiled else None,
    }
    return Law(system.name, backward, found)


def moved(system: System, n: int, d: int, m: int, backward: bool = False) -> int:
    """Elements loaded and stored by one head of plain attention, in the tiles of a chip of m elements."""
    problem, bound = plain_problem(N=n, D=d, dtype=torch.float32)
    found = report(system, problem, bound, tiles_for(m, d))
    return (found.backward if backward else found.forward).account.elements


def sparse_moved(system: System, density: float, n: int = SPARSE_N, block: int = 128) -> tuple[float, int]:
    """(fraction of kept tiles, elements moved forward) of a random tile mask of about this density."""
    tiles = n // block
    kept = torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(0)) < density
    spec = AttentionSpec((MaskTerm(Blocks.name, (block, block), 1),))
    problem = Problem(spec, 1, 1, 1, n, n, D, D, torch.float32, "cuda", n, n)
    found = report(system, problem, spec.bind([kept], D**-0.5), lambda _: (block, block))
    return float(kept.float().mean()), found.forward.account.elements


def sparsity(system: System) -> Line:
    """Elements moved against the fraction of kept tiles: a line whose offset is what no sparsity saves (q, o, lse)."""
    points = [sparse_moved(system, density) for density in DENSITIES]
    return line([x for x, _ in points], [y for _, y in points])


def all_laws() -> list[Law]:
    """The laws of every system whose schedule differs from the others'."""
    named = [system for system in SYSTEMS.values() if system.name != "flash3"]  # moves what flash2 moves
    return [law(system, backward) for system in named for backward in (False, True)]


def _least_squares(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)
    return slope, y0 - slope * x0
