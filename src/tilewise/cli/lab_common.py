"""What the lab's commands share: their options, tensors, and timing of systems on either device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from tilewise import lab
from tilewise.cli import gpu, measure
from tilewise.cli.memory import check_device
from tilewise.cli.output import dtype_of

PASSES = ("forward", "backward")

Device = Annotated[str, typer.Option(help="cpu (CPU time of one thread) or cuda (bursts after a rest).")]
Dtype = Annotated[str | None, typer.Option(help="fp32, fp64, bf16 or fp16.", show_default="fp32; on a GPU bf16")]
Rounds = Annotated[int, typer.Option(min=1, help="Timings of each pass of each system, in turns.")]
Batch = Annotated[int, typer.Option("--batch", "-B", min=1, help="Sequences.")]
Heads = Annotated[int, typer.Option("--heads", "-H", min=1, help="Heads.")]
Dim = Annotated[int, typer.Option("--dim", "-D", min=1, help="Head dim.")]
System = Annotated[
    list[str] | None,
    typer.Option("--system", help=f"Of {', '.join(lab.names('cuda'))}. Repeatable.", show_default="all there are"),
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def chosen(system: Sequence[str] | None, device: str) -> list[lab.System]:
    """The systems asked for, on a device that is there."""
    check_device(device)
    return [lab.find(name, device) for name in system or lab.names(device)]


def dtype_for(dtype: str | None, device: str) -> torch.dtype:
    return dtype_of(dtype or {"cpu": "fp32", "cuda": "bf16"}[device])


def draw(B: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and do, (B, N, H, D): the same on every machine with this device."""
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn(B, N, H, D, generator=g, device=device).to(dtype) for _ in range(4)]


def time_passes(
    systems: Mapping[str, Attend],
    tensors: Sequence[Tensor],
    rounds: int,
    on_round: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, measure.Samples]]:
    """Forward and backward of each system, all in turns in every round.

    On a CPU the CPU time of one thread counts, so that other programs disturb little; on a GPU a burst after a rest.
    """
    q, k, v, do = tensors
    calls = {name: measure.passes(attend, q, k, v, do=do) for name, attend in systems.items()}
    contestants = {f"{name} {which}": calls[name][which] for which in PASSES for name in systems}
    if q.is_cuda:
        found = _bursts(contestants, rounds, on_round)
    else:
        with measure.threads(1):
            found = measure.interleave(contestants, rounds, "cpu", on_round=on_round)
    return {name: {which: found[f"{name} {which}"] for which in PASSES} for name in systems}


def _bursts(
    contestants: dict[str, Callable[[], Any]], rounds: int, on_round: Callable[[], Any]
) -> dict[str, measure.Samples]:
    found: dict[str, list[measure.Timing]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name in list(contestants)[:: 1 if i % 2 == 0 else -1]:
            found[name].append(measure.Timing(cpu=0.0, wall=gpu.burst(contestants[name])))
        on_round()
    return {name: measure.Samples(tuple(timings), "wall") for name, timings in found.items()}


def to_dict(samples: Mapping[str, measure.Samples]) -> dict[str, Any]:
    """Seconds of both passes for a JSON file."""
    return {
        which: {"seconds": one.median, "spread": one.spread, "samples": one.seconds} for which, one in samples.items()
    }


def milliseconds(samples: measure.Samples) -> str:
    return f"{samples.median * 1e3:.{0 if samples.median >= 0.1 else 2}f}"


def clock(device: str) -> str:
    """How times were taken, in words."""
    return "CPU time of one thread, medians" if device == "cpu" else "GPU time, bursts after a rest, medians"
