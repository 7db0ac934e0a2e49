"""`tilewise lab sparsity`: time and bytes of block-sparse attention against the share of tiles that it keeps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.progress import Progress

import tilewise
from tilewise import lab
from tilewise.cli.lab_common import (
    PASSES,
    Batch,
    Device,
    Dim,
    Dtype,
    Heads,
    Rounds,
    chosen,
    clock,
    draw,
    dtype_for,
    time_passes,
    to_dict,
)
from tilewise.cli.output import FAILED, JsonFile, PlotFile, console, fail, short, stderr, table, write_json, write_plot
from tilewise.masks import Blocks
from tilewise.page import human
from tilewise.testing import Inputs, judge

#: Shares of tiles of random patterns, and (local, global) tiles of the others.
RANDOM = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
LOCAL_GLOBAL = ((0, 1), (1, 1), (2, 2), (4, 2), (6, 4))
CHECKED = 4  # tiles along a side of the small problem that is compared with the reference


class Pattern(NamedTuple):
    """A pattern of tiles and its share of all."""

    family: str
    mask: Blocks
    density: float


def sparsity(
    length: Annotated[int, typer.Option("--length", "-n", min=1, help="Rows and keys.")] = 4096,
    dim: Dim = 64,
    heads: Heads = 1,
    batch: Batch = 1,
    block: Annotated[int, typer.Option(min=16, help="Rows and keys of a tile.")] = 128,
    dtype: Dtype = None,
    device: Device = "cpu",
    system: Annotated[
        list[str] | None, typer.Option("--system", help="Those that tile. Repeatable.", show_default="flash1, flash2")
    ] = None,
    rounds: Rounds = 5,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Time block-sparse attention by butterfly, local + global and random patterns of growing density.

    FlashAttention (section 3.3) promises work and memory traffic in proportion to the share of tiles that is kept: a
    straight line is fitted to time and bytes of each system and pass, with its r^2. Bytes are counted for that schedule
    (rows outside, tiles of this size), not measured. A small problem with each family is compared with the reference first.

    Example: `tilewise lab sparsity --length 2048 --json sparsity.json`
    """
    systems = chosen(system or ["flash1", "flash2"], device)
    kind = dtype_for(dtype, device)
    problem = {"B": batch, "H": heads, "N": length, "D": dim, "dtype": short(kind), "block": block, "device": device}
    tensors = draw(batch, length, heads, dim, kind, device)
    patterns = make_patterns(length, block, device)
    if wrong := _complaints(systems, dim, block, kind, device):
        for line in wrong:
            stderr.print(line, style="bold red", markup=False)
        fail("wrong results: nothing was timed", FAILED)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("measuring", total=rounds)
        # All patterns take turns in every round: what disturbs one disturbs all, and bends no line.
        attends = {f"{s.name} {i}": _bound(s, p.mask) for i, p in enumerate(patterns) for s in systems}
        times = time_passes(attends, tensors, rounds, lambda: progress.advance(task))
    rows = [
        {
            "family": pattern.family,
            "density": pattern.density,
            "bytes": _bytes(tensors, pattern.mask, block),
            "systems": {s.name: to_dict(times[f"{s.name} {i}"]) for s in systems},
        }
        for i, pattern in enumerate(patterns)
    ]
    names = [s.name for s in systems]
    fits = {f"bytes {which}": fit(rows, lambda row, w=which: row["bytes"][w]) for which in PASSES}
    for name in names:
        for which in PASSES:
            fits[f"{name} {which}"] = fit(rows, lambda row, n=name, w=which: row["systems"][n][w]["seconds"])
    _show(rows, names, problem)
    _show_fits(fits)
    data = {"problem": problem, "time": clock(device), "rounds": rounds, "fits": fits, "points": rows}
    write_plot(plot, "lab sparsity", data)
    write_json(json, "lab sparsity", data)


def make_patterns(N: int, block: int, device: str) -> list[Pattern]:
    """Butterfly, local + global and random patterns, and all tiles."""
    found = [("butterfly", Blocks.butterfly(N, N, block, block))]
    found += [("local+global", Blocks.local_global(N, N, a, b, block, block)) for a, b in LOCAL_GLOBAL]
    g = torch.Generator().manual_seed(0)
    side = -(-N // block)
    order = torch.rand(side, side, generator=g)
    for share in RANDOM:
        kept = order <= order.flatten().kthvalue(max(1, round(share * side * side))).values
        found.append(("random", Blocks(kept, block, block)))
    return [
        Pattern(family, Blocks(mask.pattern.to(device), block, block), float(mask.pattern.float().mean()))
        for family, mask in found
    ]


def fit(rows: Sequence[dict[str, Any]], value: Any) -> dict[str, float]:
    """The straight line through values against density, by least squares, and how much of their variance it explains."""
    x, y = [row["density"] for row in rows], [value(row) for row in rows]
    slope, intercept = statistics.linear_regression(x, y)
    return {"slope": slope, "intercept": intercept, "r2": statistics.correlation(x, y) ** 2}


def _bound(system: lab.System, mask: Blocks):
    return lambda q, k, v: system(q, k, v, mask)


def _complaints(systems: Sequence[lab.System], D: int, block: int, dtype: torch.dtype, device: str) -> list[str]:
    """What the rule of `tilewise.testing` says about a few tiles of each family."""
    q, k, v, do = draw(1, CHECKED * block, 1, D, dtype, device)
    lines = []
    for pattern in {p.family: p for p in make_patterns(CHECKED * block, block, device)}.values():
        inputs = Inputs(q, k, v, {"mask": pattern.mask}, do=do)
        for name, verdict in judge(inputs, {s.name: _bound(s, pattern.mask) for s in systems}).items():
            lines += [f"{name}, {pattern.family}: {complaint}" for complaint in verdict.complaints]
    return lines


def _bytes(tensors: Sequence[torch.Tensor], mask: Blocks, block: int) -> dict[str, int]:
    account = tilewise.explain(*tensors[:3], mask=mask, block_m=block, block_n=block).cost
    return {which: getattr(account, which).bytes_read + getattr(account, which).bytes_written for which in PASSES}


def _show(rows: Sequence[dict[str, Any]], names: Sequence[str], problem: dict[str, Any]) -> None:
    columns = ["pattern", "tiles kept", *(f"bytes\n{which}" for which in PASSES)]
    columns += [f"{name}\n{which} ms" for name in names for which in PASSES]
    lines = []
    for row in sorted(rows, key=lambda row: row["density"]):
        cells = [row["family"], f"{row['density']:.1%}", *(human(row["bytes"][which], "B") for which in PASSES)]
        cells += [f"{row['systems'][name][which]['seconds'] * 1e3:.2f}" for name in names for which in PASSES]
        lines.append(cells)
    shape = f"B{problem['B']} H{problem['H']} N{problem['N']:,} D{problem['D']} {problem['dtype']}"
    console.print(table(f"{shape}, tiles of {problem['block']}; {clock(problem['device'])}", columns, lines))


def _show_fits(fits: dict[str, dict[str, float]]) -> None:
    lines = []
    for name, line in fits.items():
        unit = "B" if name.startswith("bytes") else "s"
        cells = [
            human(line[part], unit) if unit == "B" else f"{line[part] * 1e3:.2f} ms" for part in ("intercept", "slope")
        ]
        lines.append([name, *cells, f"{line['r2']:.4f}"])
    console.print(table("Straight lines: at density 0, and what density 1 adds", ["", "at 0", "to 1", "r^2"], lines))
