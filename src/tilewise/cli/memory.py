"""`tilewise memory`: memory against sequence length, computed for every length and measured where it fits."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from tilewise import cost
from tilewise.cli import memory_point
from tilewise.cli.options import integers
from tilewise.cli.output import (
    FAILED,
    JsonFile,
    PlotFile,
    console,
    dtype_of,
    fail,
    memory_bytes,
    stderr,
    table,
    write_json,
    write_plot,
)
from tilewise.page import human
from tilewise.problem import Problem
from tilewise.report.memory import PAPER, is_papers, needed
from tilewise.spec import AttentionSpec, MaskTerm

SHARE = 0.6  # of the memory that is free: a measured point may not push other programs out
WHO = ("tilewise", "standard")
LENGTHS = ",".join(str(1024 << i) for i in range(11))


def memory(
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths, separated by commas.", show_default="1024 to 1048576")
    ] = LENGTHS,
    batch: Annotated[int, typer.Option("--batch", "-B", min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option("--heads", "-H", min=1, help="Heads.")] = 4,
    dim: Annotated[int, typer.Option("--dim", "-D", min=1, help="Head dim.")] = 64,
    dtype: Annotated[str, typer.Option(help="fp32, fp64, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")] = True,
    measure_up_to: Annotated[
        int | None,
        typer.Option(help="The longest that is also measured; 0 for none.", show_default="8192; on a GPU all"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where to measure.")] = "cpu",
    gib: Annotated[float | None, typer.Option(help="Memory to fill, in GiB.", show_default="this machine's")] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Show bytes saved for backward, and the peak of a training step, of tilewise and of standard attention.

    Standard attention keeps S and P, N x N each, in memory. The peak counts what comes on top of inputs, outputs and
    gradients. Lengths that fit are also measured: on the CPU each in a process of its own, on a GPU by what PyTorch's
    allocator handed out. For the problem of the FlashAttention paper (`-B 16 -H 8 -D 64 --dtype fp16`) its figures stand
    beside ours.

    Example: `tilewise memory --lengths 1024,2048,4096 --heads 8`
    """
    check_device(device)
    limit = measure_up_to if measure_up_to is not None else 8192 if device == "cpu" else sys.maxsize
    ns = sorted(integers(lengths, "--lengths"))
    if not ns or ns[0] < 1:
        raise ValueError(f"--lengths must be >= 1, got {lengths!r}")
    problems = {n: problem_of(batch, heads, n, dim, dtype_of(dtype), causal, device) for n in ns}
    points = [_model(n, problems[n]) for n in ns]
    jobs = [(point, who) for point in points for who in WHO if point["N"] <= limit and fits(point, who, device)]
    shared = {"B": batch, "H": heads, "D": dim, "dtype": dtype, "causal": causal, "threads": torch.get_num_threads()}
    shared["device"] = device
    for point, who in track(jobs, "measuring", console=stderr, transient=True, disable=not stderr.is_terminal):
        point["measured"][who] = measure({**shared, "who": who, "N": point["N"]})
    total = memory_of(device) if gib is None else round(gib * 2**30)
    limits = {who: cost.out_of_memory_point(problems[ns[0]], total, who == "standard") for who in WHO}
    _show(points, limits, total)
    if is_papers(shared):
        _show_paper(points)
    slopes = _slopes(points)
    for line in slopes.values():
        console.print(line)
    data = {"problem": shared, "memory_bytes": total, "out_of_memory_at": limits, "points": points, "growth": slopes}
    write_plot(plot, "memory", data)
    write_json(json, "memory", data)


def check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        fail("PyTorch finds no GPU here; run without --device cuda for the CPU")


def memory_of(device: str) -> int:
    return memory_bytes() if device == "cpu" else torch.cuda.mem_get_info()[1]


def problem_of(B: int, H: int, n: int, D: int, dtype: torch.dtype, causal: bool, device: str) -> Problem:
    spec = AttentionSpec((MaskTerm("causal", (None,), 0),) if causal else ())
    return Problem(spec, B, H, H, n, n, D, D, dtype, device, B * n, B * n)


def _model(n: int, problem: Problem) -> dict[str, Any]:
    found = {"tilewise": cost.memory(problem, 0, cost.workers_of(problem)), "standard": cost.standard_memory(problem)}
    computed = {who: {"saved": m.saved, "peak": max(m.peak_forward, m.peak_backward)} for who, m in found.items()}
    return {"N": n, "tensors": 2 * cost.tensor_bytes(problem), "computed": computed, "measured": {}}


def fits(point: dict[str, Any], who: str, device: str) -> bool:
    """Whether it can be measured here."""
    return needed(point, who) < SHARE * _available_bytes(device)


def _available_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    info = Path("/proc/meminfo")
    if info.exists():
        line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
        return min(int(line.split()[1]) * 1024, memory_bytes())
    return memory_bytes()


def measure(point: dict[str, Any]) -> dict[str, int]:
    if point["device"] == "cuda":
        return memory_point.measure(**point)
    command = [sys.executable, "-m", "tilewise.cli.memory_point", json_module.dumps(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}, perhaps out of memory"]
        fail(f"measuring {point['who']} at N = {point['N']} failed: {last[0]}", FAILED)
    return json_module.loads(done.stdout)


def _show(points: Sequence[dict[str, Any]], limits: dict[str, int], total: int) -> None:
    columns = ["N", *(f"{who}\n{what}" for who in WHO for what in ("saved", "measured", "peak", "measured")), "fits"]
    rows = []
    for point in points:
        cells = [f"{point['N']:,}"]
        for who in WHO:
            for what in ("saved", "peak"):
                cells.append(human(point["computed"][who][what], "B"))
                cells.append(human(point["measured"][who][what], "B") if who in point["measured"] else "-")
        fitting = [who for who in WHO if point["N"] <= limits[who]]
        rows.append([*cells, {0: "no", 1: "".join(fitting), 2: "both"}[len(fitting)]])
    title = "Bytes saved for backward, and peak beyond inputs, outputs and gradients"
    console.print(table(title, columns, rows, left=0))
    console.print(
        f"A training step fits in {human(total, 'B')} up to N = {limits['standard']:,} with standard attention, "
        f"N = {limits['tilewise']:,} with tilewise."
    )


def _show_paper(points: Sequence[dict[str, Any]]) -> None:
    """Memory of a training step in all, next to the paper's table."""
    rows = []
    for point in points:
        if point["N"] in PAPER:
            point["paper_mb"] = PAPER[point["N"]]
            ours = point["measured"].get("tilewise")
            share = f"{ours['in_all'] / 1e4 / PAPER[point['N']]:.0f}%" if ours else "-"
            rows.append(
                (f"{point['N']:,}", f"{PAPER[point['N']]:,} MB", human(ours["in_all"], "B") if ours else "-", share)
            )
    console.print(
        table("A training step in all, measured", ["N", "FlashAttention's paper", "tilewise", "share"], rows, left=0)
    )


def _slopes(points: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What measured bytes gain from N to 2N and from 2N to 4N: twice as much if linear, four times if quadratic."""
    lines = {}
    for who in WHO:
        measured = {point["N"]: point["measured"][who] for point in points if who in point["measured"]}
        longest = max((n for n in measured if 2 * n in measured and 4 * n in measured), default=None)
        if longest is None:
            continue
        parts = []
        for what in ("saved", "peak"):
            one, two, four = (measured[longest << i][what] for i in range(3))
            times = f"x{(four - two) / (two - one):.2f}" if two > one else "not at all"
            parts.append(f"{what} +{human(two - one, 'B')} then +{human(four - two, 'B')} ({times})")
        lengths = ", ".join(f"{longest << i:,}" for i in range(3))
        lines[who] = f"{who} grows over N = {lengths}: {'; '.join(parts)}; linear is x2, quadratic x4"
    return lines
