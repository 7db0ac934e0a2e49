"""`tilewise lab generations`: the speed of FlashAttention-1, -2 and -3 on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor

from tilewise import Causal, lab
from tilewise.cli import gpu
from tilewise.cli.lab_common import PASSES, Dtype, Rounds, chosen, clock, draw, dtype_for, time_passes, to_dict
from tilewise.cli.measure import WORKERS, first_line, in_processes, passes
from tilewise.cli.output import FAILED, JsonFile, PlotFile, console, fail, short, stderr, table, write_json, write_plot
from tilewise.cli.problems import Shape

GENERATIONS = ("flash1", "flash2", "flash3")
GRID = tuple(shape for shape in gpu.GRID if shape.D <= 128)
#: How many times faster than the one before, as the papers say: FlashAttention-2 and -3, their abstracts and figures.
PAPERS = {"flash2 over flash1": "1.7-3.0x", "flash3 over flash2": "1.5-2.0x forward, 1.5-1.75x backward"}


def generations(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help="BxHxSxD, with :causal behind it or not. Repeatable.", show_default="the papers' grid of 24"
        ),
    ] = None,
    dtype: Dtype = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu, where there is no FlashAttention-3.")] = "cuda",
    rounds: Rounds = 5,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Time FlashAttention-1, -2 and -3 in turns, forward and backward, and say how much faster each is than the last.

    The grid of the papers: 16,384 tokens, hidden size 2048, head dims 64 and 128, causal and full, N from 512 to 16,384.
    A problem is timed after one head of each system was compared with dense attention in float64. TFLOP/s count 4 N^2 D
    per head forward, 2.5 times that backward, half of it if causal.

    Example: `tilewise lab generations --device cuda --json generations.json`
    """
    systems = chosen([name for name in GENERATIONS if name in lab.names(device)], device)
    kind = dtype_for(dtype, device)
    shapes = [Shape.parse(text) for text in shape] if shape else GRID
    data: dict[str, Any] = {"dtype": short(kind), "device": device, "time": clock(device), "rounds": rounds}
    data |= {"papers": PAPERS, "refused": [], "results": [], "geometric_means": {}}
    workers = WORKERS if device == "cuda" else 1
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        checking = progress.add_task("compiling and checking", total=len(shapes))
        able, names = {}, [s.name for s in systems]
        verdicts = in_processes(_complaints, [(one, systems, kind, device) for one in shapes], workers)
        for one, wrong in zip(shapes, verdicts, strict=True):
            able[one] = [s for s in systems if s.name not in wrong]
            for name, complaint in wrong.items():
                data["refused"].append(f"{one}: {name}: {complaint}")
                stderr.print(f"refused: {data['refused'][-1]}", style="bold red", markup=False)
            progress.advance(checking)
        task = progress.add_task("measuring", total=len(shapes))
        for one in shapes:
            progress.update(task, description=str(one))
            data["results"] += _measure(one, able[one], draw(one.B, one.S, one.H, one.D, kind, device), rounds)
            data["geometric_means"] = _means(data["results"])
            progress.advance(task)
            write_json(json, "lab generations", data, say=False)  # a run cut short leaves its part
    _show(data["results"], names, data["geometric_means"])
    write_plot(plot, "lab generations", data)
    write_json(json, "lab generations", data)
    if data["refused"]:
        fail(f"{len(data['refused'])} results are missing or wrong", FAILED)


def _attend(system: lab.System, shape: Shape):
    return lambda q, k, v: system(q, k, v, Causal() if shape.causal else None)


def _complaints(shape: Shape, systems: Sequence[lab.System], dtype: torch.dtype, device: str) -> dict[str, str]:
    """Which systems cannot run a problem, or are wrong, and why. What the others compile lies in a cache on disk then."""
    tensors = draw(shape.B, shape.S, shape.H, shape.D, dtype, device)
    rule, found = gpu.judge_head(shape, *tensors), {}
    for system in systems:
        attend = _attend(system, shape)
        try:
            wrong = "; ".join(rule.verdict(attend).complaints)
            if device == "cuda":  # the whole problem: its kernels may be others than those of one head
                passes(attend, *tensors[:3], do=tensors[3])["backward"]()
        except Exception as error:  # whatever a kernel's compiler throws on another GPU: the other systems still run
            wrong = first_line(error)
        if wrong:
            found[system.name] = wrong
    return found


def _measure(
    shape: Shape, systems: Sequence[lab.System], tensors: Sequence[Tensor], rounds: int
) -> list[dict[str, Any]]:
    samples = time_passes({s.name: _attend(s, shape) for s in systems}, tensors, rounds)
    times = {name: to_dict(of_passes) for name, of_passes in samples.items()}
    flops = 4.0 * shape.B * shape.H * shape.S**2 * shape.D * (0.5 if shape.causal else 1.0)
    found = []
    for which in PASSES:
        work = flops * gpu.PASSES[which]
        rates = {name: work / t[which]["seconds"] / 1e12 for name, t in times.items()}
        row = {"shape": str(shape), "pass": which, "flops": work, "tflops": rates}
        found.append(row | {"seconds": {name: t[which]["samples"] for name, t in times.items()}})
    return found


def _means(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of each system's speed over the one before, by pass."""
    found = {}
    for which in PASSES:
        for old, new in pairwise(GENERATIONS):
            rates = [r["tflops"] for r in results if r["pass"] == which and {old, new} <= r["tflops"].keys()]
            if rates:
                found[f"{new} over {old} {which}"] = math.exp(
                    sum(math.log(r[new] / r[old]) for r in rates) / len(rates)
                )
    return found


def _show(results: Sequence[dict[str, Any]], names: Sequence[str], means: dict[str, float]) -> None:
    steps = list(pairwise(names))
    rows = []
    for r in results:
        rates = r["tflops"]
        cells = [r["shape"], r["pass"], *(f"{rates[name]:.3g}" if name in rates else "-" for name in names)]
        rows.append(cells + [f"{rates[b] / rates[a]:.2f}x" if {a, b} <= rates.keys() else "-" for a, b in steps])
    columns = ["shape", "pass", *names, *(f"{b} over {a}" for a, b in steps)]
    console.print(table("TFLOP/s, in turns", columns, rows, left=2))
    console.print("geometric means: " + ", ".join(f"{name} {mean:.2f}x" for name, mean in means.items()))
    console.print("the papers: " + ", ".join(f"{name} {times}" for name, times in PAPERS.items()))
