"""`tilewise lab compare`: exactness, bytes and time of every system, and time against the tile size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from tilewise import Causal, lab
from tilewise.cli import memory
from tilewise.cli.lab_common import (
    PASSES,
    Attend,
    Batch,
    Device,
    Dim,
    Dtype,
    Heads,
    Rounds,
    System,
    chosen,
    clock,
    draw,
    dtype_for,
    milliseconds,
    time_passes,
    to_dict,
)
from tilewise.cli.measure import Samples
from tilewise.cli.memory import integers
from tilewise.cli.output import FAILED, JsonFile, PlotFile, console, fail, short, stderr, table, write_json, write_plot
from tilewise.page import human
from tilewise.testing import Inputs, Verdict, judge
from tilewise.training.memory import SavedForBackward

#: The two that the papers' claim is about, as far as it can be seen without a kernel of one's own.
BASELINE, TILED = "standard", "recompute-tiles"
SWEEP = "64,128,256,512,1024,2048,4096"


def compare(
    length: Annotated[int, typer.Option("--length", "-n", min=1, help="Rows and keys.")] = 4096,
    dim: Dim = 128,
    heads: Heads = 1,
    batch: Batch = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")] = False,
    dtype: Dtype = None,
    device: Device = "cpu",
    system: System = None,
    tiles: Annotated[
        str, typer.Option(help="Sides of square tiles that recompute-tiles is also timed with; 0 for none.")
    ] = SWEEP,
    rounds: Rounds = 5,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Run every system on one problem: is it exact, what does it keep, how much memory and time does it need.

    Exactness is the rule of `tilewise.testing`, forward and every gradient, of the first head; a system that fails is not
    timed. Bytes kept for the backward pass are what autograd is given to save (standard: q, scaled, k, v and P; the others:
    q, k, v, o and one or two numbers per row). The peak counts what comes on top of inputs, outputs and gradients, on a
    CPU in a process of its own.

    Example: `tilewise lab compare --length 2048 --dim 64 --json compare.json`
    """
    systems, kind = chosen(system, device), dtype_for(dtype, device)
    mask = Causal() if causal else None
    problem = {"B": batch, "H": heads, "N": length, "D": dim, "dtype": short(kind), "causal": causal, "device": device}
    tensors = draw(batch, length, heads, dim, kind, device)
    attends: dict[str, Attend] = {s.name: _bound(s, mask) for s in systems}
    sides = [] if tiles == "0" else sorted({min(side, length) for side in integers(tiles, "--tiles")})
    with stderr.status("Comparing with the float64 reference"):
        q, k, v, do = (t[:1, :, :1] for t in tensors)
        inputs = Inputs(q, k, v, {"causal": causal}, do=do)
        verdicts = judge(inputs, attends)
    right = {name: attend for name, attend in attends.items() if not verdicts[name].complaints}
    saved, peaks = _bytes(right, tensors, problem)
    data: dict[str, Any] = {"problem": problem, "time": clock(device), "rounds": rounds, "claims": {}, "sweep": []}
    data["results"] = [_result(s, verdicts[s.name], saved, peaks, {}) for s in systems]
    write_json(json, "lab compare", data, say=False)  # a run cut short leaves its part
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("measuring time", total=rounds * (2 if sides else 1))

        def advance() -> None:
            progress.advance(task)

        times = time_passes(right, tensors, rounds, advance) if right else {}
        data["results"] = [_result(s, verdicts[s.name], saved, peaks, times) for s in systems]
        write_json(json, "lab compare", data, say=False)
        sweep = _sweep(sides, mask, tensors, rounds, advance) if sides else {}
    _show(systems, verdicts, saved, peaks, times, problem)
    _show_sweep(sweep, kind)
    data["claims"] = _claims(saved, times)
    for line in data["claims"].values():
        console.print(line)
    data["sweep"] = [{"tile": side, **to_dict(samples)} for side, samples in sweep.items()]
    write_plot(plot, "lab compare", data)
    write_json(json, "lab compare", data)
    if wrong := [name for name, verdict in verdicts.items() if verdict.complaints]:
        for name in wrong:
            stderr.print(f"{name}: " + "\n".join(verdicts[name].complaints), style="bold red", markup=False)
        fail(f"{', '.join(wrong)} disagree with the reference", FAILED)


def _bound(system: lab.System, mask: Causal | None) -> Attend:
    return lambda q, k, v: system(q, k, v, mask)


def _bytes(
    attends: Mapping[str, Attend], tensors: Sequence[torch.Tensor], problem: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that each system keeps for the backward pass, and its peak."""
    saved, peaks = {}, {}
    for name, attend in attends.items():
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        with SavedForBackward() as kept:
            attend(q, k, v)
        saved[name] = kept.bytes
        with stderr.status(f"Measuring memory of {name}"):
            peaks[name] = memory.measure({**problem, "who": name, "threads": 1})["peak"]
    return saved, peaks


def _sweep(
    sides: Sequence[int],
    mask: Causal | None,
    tensors: Sequence[torch.Tensor],
    rounds: int,
    on_round: Callable[[], None],
) -> dict[int, dict[str, Samples]]:
    """recompute-tiles with square tiles of each side."""
    tiled = lab.find(TILED, tensors[0].device.type)
    assert isinstance(tiled, lab.RecomputeAttention)
    systems = {str(side): _bound(replace(tiled, block_m=side, block_n=side), mask) for side in sides}
    return {int(side): samples for side, samples in time_passes(systems, tensors, rounds, on_round).items()}


def _claims(saved: dict[str, int], times: dict[str, dict[str, Samples]]) -> dict[str, str]:
    """What the table says about recomputation, if both sides of the comparison are in it."""
    if not {BASELINE, TILED} <= times.keys():
        return {}
    lines = {
        "saved": f"{TILED} keeps {saved[TILED] / 1e6:.2f} MB for the backward pass where {BASELINE} keeps "
        f"{saved[BASELINE] / 1e6:.2f} MB: {saved[BASELINE] / saved[TILED]:.1f} times less."
    }
    for which in PASSES:
        ratio = times[TILED][which].ratio_to(times[BASELINE][which])
        again = ", though it computes P again" if which == "backward" else ""
        lines[which] = f"Its {which} pass takes {1 / ratio:.2f} of {BASELINE}'s time{again}: {ratio:.2f}x as fast."
    return lines


def _result(
    system: lab.System,
    verdict: Verdict,
    saved: dict[str, int],
    peaks: dict[str, int],
    times: dict[str, dict[str, Samples]],
) -> dict[str, Any]:
    head = {"system": system.name, "title": system.title, "source": system.source, "exact": not verdict.complaints}
    head["errors"] = verdict.errors  # of the first head of the first sequence
    if system.name in saved:
        head |= {"saved_bytes": saved[system.name], "peak_bytes": peaks[system.name]}
    return head | (to_dict(times[system.name]) if system.name in times else {})


def _show(systems, verdicts, saved, peaks, times, problem) -> None:
    exact = "exact" if problem["B"] * problem["H"] == 1 else "exact (1st head)"
    columns = ["system", exact, "error of o", "of dq, dk, dv", "kept", "peak", *(f"{which} ms" for which in PASSES)]
    rows = []
    for s in systems:
        verdict = verdicts[s.name]
        errors = verdict.errors
        cells = [s.name, "NO" if verdict.complaints else "yes", f"{errors['o']:.1e}"]
        cells.append(f"{max(errors['dq'], errors['dk'], errors['dv']):.1e}")
        if s.name in times:
            cells += [f"{saved[s.name] / 1e6:,.2f} MB", human(peaks[s.name], "B")]
            cells += [milliseconds(times[s.name][which]) for which in PASSES]
        rows.append(cells)
    shape = f"B{problem['B']} H{problem['H']} N{problem['N']:,} D{problem['D']} {problem['dtype']}"
    title = f"{shape} {'causal' if problem['causal'] else 'full'}; {clock(problem['device'])}"
    console.print(table(title, columns, rows))


def _show_sweep(sweep: dict[int, dict[str, Samples]], dtype: torch.dtype) -> None:
    if not sweep:
        return
    best = {which: min(samples[which].median for samples in sweep.values()) for which in PASSES}
    rows = []
    for side, samples in sweep.items():
        cells = [f"{side:,} x {side:,}", human(side * side * max(dtype.itemsize, 4), "B")]
        for which in PASSES:
            over = samples[which].median / best[which]
            cells += [milliseconds(samples[which]), "best" if over == 1.0 else f"{over:.2f}x"]
        rows.append(cells)
    columns = ["tile", "S of it", "forward ms", "over best", "backward ms", "over best"]
    console.print(table(f"{TILED} by tile size", columns, rows, left=0))
