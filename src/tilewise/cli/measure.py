"""Timing that survives a busy machine: contestants take turns, CPU time is counted, medians are reported."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORKERS = min(16, os.cpu_count() or 1)  # processes that compile and check before anything is timed


class Timing(NamedTuple):
    """Seconds of one call: of all threads together, and by the clock."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Samples:
    """Timings of one contestant, one per round."""

    timings: tuple[Timing, ...]
    by: str  # "cpu" or "wall": the one that counts

    @property
    def seconds(self) -> list[float]:
        return [getattr(t, self.by) for t in self.timings]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.timings) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    def ratio_to(self, other: Samples) -> float:
        """How many times longer `other` takes: the median over rounds, in each of which both ran."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(function: Callable[[], Any], calls: int) -> Timing:
    """Seconds per call over several calls in a row."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        function()
    return Timing((time.process_time() - cpu) / calls, (time.perf_counter() - wall) / calls)


def calls_for(function: Callable[[], Any], seconds: float) -> int:
    """Warm up, and say how many calls take about so long."""
    function()
    return max(1, min(10_000, round(seconds / max(timed(function, 1).wall, 1e-7))))


def interleave(
    contestants: dict[str, Callable[[], Any]],
    rounds: int,
    by: str,
    seconds: float = 0.05,
    on_round: Callable[[], Any] = lambda: None,
) -> dict[str, Samples]:
    """Time all contestants in each round, in alternating order, so that what disturbs one disturbs all.

    Args:
        contestants: functions by name.
        rounds: timings of each.
        by: "cpu" or "wall", what counts.
        seconds: the least time of one timing; short functions are called several times.
        on_round: called after each round.
    """
    calls = {name: calls_for(function, seconds) for name, function in contestants.items()}
    found: dict[str, list[Timing]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name in list(contestants)[:: 1 if i % 2 == 0 else -1]:
            found[name].append(timed(contestants[name], calls[name]))
        on_round()
    return {name: Samples(tuple(timings), by) for name, timings in found.items()}


def passes(attention: Callable[..., Tensor], *tensors: Tensor, do: Tensor) -> dict[str, Callable[[], Any]]:
    """Forward (no graph kept) and backward (one graph, many times) of an attention function of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    o = attention(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*tensors)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    return {"forward": forward, "backward": backward}


def first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def in_processes(function: Callable[..., Any], arguments: Sequence[tuple], workers: int) -> Iterator[Any]:
    """``function(*args)`` for each of `arguments`, in their order, by so many fresh processes; by this one if one is enough.

    For what compiles: kernels of all of them then lie in Triton's cache on disk.
    """
    if workers == 1 or len(arguments) == 1:
        yield from (function(*args) for args in arguments)
        return
    with ProcessPoolExecutor(min(workers, len(arguments)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, *zip(*arguments, strict=True))
