"""`tilewise lab memory`: bytes of a training step against sequence length, of every system."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from tilewise import cost, lab
from tilewise.cli import memory as points_of
from tilewise.cli.lab_common import Batch, Device, Dim, Dtype, Heads, System, chosen, dtype_for
from tilewise.cli.memory import LENGTHS, integers
from tilewise.cli.output import JsonFile, PlotFile, console, short, stderr, table, write_json, write_plot
from tilewise.page import human
from tilewise.problem import Problem

WHAT = {"saved": "kept for the backward pass", "peak": "peak beyond inputs, outputs and gradients"}
LONGEST = 1 << 40  # rows; no memory holds more


def memory(
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths, separated by commas.", show_default="1024 to 1048576")
    ] = LENGTHS,
    batch: Batch = 1,
    heads: Heads = 1,
    dim: Dim = 128,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")] = False,
    dtype: Dtype = None,
    device: Device = "cpu",
    system: System = None,
    measure_up_to: Annotated[int, typer.Option(help="The longest that is also measured, where it fits.")] = 8192,
    gib: Annotated[float | None, typer.Option(help="Memory to fill, in GiB.", show_default="this machine's")] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Show which systems need memory linear in the sequence length, which quadratic, and where each runs out.

    Every figure is computed, from what a system keeps; up to `--measure-up-to` a training step is also run and measured,
    as in `tilewise memory`, and the measured figure is shown. Computed ones carry a ~, and an OOM what does not fit.

    Example: `tilewise lab memory --lengths 1024,4096,1048576 --measure-up-to 4096`
    """
    systems, kind = chosen(system, device), dtype_for(dtype, device)
    names = [s.name for s in systems]
    shared = {"B": batch, "H": heads, "D": dim, "dtype": short(kind), "causal": causal, "threads": 1, "device": device}
    problems = {
        n: points_of.problem_of(batch, heads, n, dim, kind, causal, device)
        for n in sorted(integers(lengths, "--lengths"))
    }
    points = [_point(n, problem, systems) for n, problem in problems.items()]
    total = points_of.memory_of(device) if gib is None else round(gib * 2**30)
    limits = {s.name: _longest(s, shared, kind, total) for s in systems}
    data = {"problem": shared, "memory_bytes": total, "out_of_memory_at": limits, "points": points}
    jobs = [(p, who) for p in points for who in names if p["N"] <= measure_up_to and points_of.fits(p, who, device)]
    for point, who in track(jobs, "measuring", console=stderr, transient=True, disable=not stderr.is_terminal):
        point["measured"][who] = points_of.measure({**shared, "who": who, "N": point["N"]})
        write_json(json, "lab memory", data, say=False)  # a run cut short leaves its part
    for what in WHAT:
        _show(points, names, what, total, shared)
    reached = ", ".join(f"{n:,} ({name})" for name, n in limits.items())
    console.print(f"A training step fits in {human(total, 'B')} up to N = {reached}")
    write_plot(plot, "lab memory", data)
    write_json(json, "lab memory", data)


def _point(n: int, problem: Problem, systems: Sequence[lab.System]) -> dict[str, Any]:
    computed = {}
    for s in systems:
        found = s.memory(problem)
        computed[s.name] = {"saved": found.saved, "peak": max(found.peak_forward, found.peak_backward)}
    return {"N": n, "tensors": 2 * cost.tensor_bytes(problem), "computed": computed, "measured": {}}


def _longest(system: lab.System, shared: dict[str, Any], dtype: torch.dtype, total: int) -> int:
    """The longest sequence whose training step fits."""

    def needed(n: int) -> int:
        problem = points_of.problem_of(
            shared["B"], shared["H"], n, shared["D"], dtype, shared["causal"], shared["device"]
        )
        return points_of.needed(_point(n, problem, [system]), system.name)

    return bisect_right(range(1, LONGEST), total, key=needed)


def _show(
    points: Sequence[dict[str, Any]], names: Sequence[str], what: str, total: int, shared: dict[str, Any]
) -> None:
    rows = []
    for point in points:
        cells = [f"{point['N']:,}"]
        for who in names:
            measured = point["measured"].get(who)
            text = human((measured or point["computed"][who])[what], "B")
            out = " OOM" if points_of.needed(point, who) > total else ""
            cells.append((text if measured else f"~{text}") + out)
        rows.append(cells)
    shape = f"B{shared['B']} H{shared['H']} D{shared['D']} {shared['dtype']}"
    title = f"{WHAT[what]}; {shape} {'causal' if shared['causal'] else 'full'} ({shared['device']})"
    console.print(table(title, ["N", *names], rows, left=0))
