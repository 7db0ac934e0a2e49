"""Memory: `tilewise memory`, `lab memory` and `fit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tilewise.page import human
from tilewise.report import picture
from tilewise.report.pieces import Panel, Section, Table, fold, listed, shape_of

WHAT = {"saved": "kept for the backward pass", "peak": "peak beyond inputs, outputs and gradients"}
BASELINE = "standard"
#: MB in all of a training step of FlashAttention in its paper (Dao et al. 2022, table 21): 16 sequences, 8 heads of 64, fp16.
PAPER_PROBLEM = (16, 8, 64)
PAPER = {1024 << i: 209 << i for i in range(7)}
Points = Sequence[dict[str, Any]]


def needed(point: dict[str, Any], who: str) -> int:
    """Bytes of a training step in all, computed."""
    return point["tensors"] + point["computed"][who]["peak"]


def is_papers(problem: dict[str, Any]) -> bool:
    """Whether the paper's table is of this problem."""
    sizes = tuple(problem[name] for name in ("B", "H", "D"))
    return sizes == PAPER_PROBLEM and problem["dtype"] in ("fp16", "bf16", "float16", "bfloat16")


def memory(data: dict[str, Any]) -> Section:
    """Bytes against sequence length, of `memory` and of `lab memory`."""
    points, problem, total = data["points"], data["problem"], data["memory_bytes"]
    who = list(points[0]["computed"])
    device = problem.get("device", "cpu")
    limits = {name: n for name, n in data["out_of_memory_at"].items() if name in who}
    ends = listed(f"N = {n:,} ({name})" for name, n in sorted(limits.items(), key=lambda item: item[1]))
    panels = [_panel(points, who, what, total, device) for what in WHAT]
    in_all = {p["N"]: p["measured"].get("tilewise", {}).get("in_all") for p in points}
    in_all = {n: size for n, size in in_all.items() if size}
    if is_papers(problem) and in_all.keys() & PAPER.keys():
        panels.append(_beside_the_paper(in_all))
    return Section(
        f"Memory against sequence length: {'tilewise and standard' if len(who) == 2 else f'{len(who)} systems'}",
        f"{shape_of(problem)}, a training step on {device}; lines computed, dots measured",
        [f"In {human(total, 'B')} a training step fits up to {ends}.", *data.get("growth", {}).values()],
        panels,
        [_table(points, who, what, total) for what in WHAT],
    )


def _panel(points: Points, who: Sequence[str], what: str, total: int, device: str) -> Panel:
    last = points[-1]
    names = list(dict.fromkeys([BASELINE if BASELINE in who else who[0], *who]))
    at_end = {name: last["computed"][name][what] for name in names}
    base, least = names[0], min(names, key=lambda name: at_end[name])
    says = f"At N = {last['N']:,} {base} needs {human(at_end[base], 'B')}"
    if least != base:
        says += f" and {least} {human(at_end[least], 'B')}, {fold(at_end[base] / max(at_end[least], 1))} less"
    if len(points) > 1:
        powers = listed(f"N^{_power(points, name, what):.2f} ({name})" for name in names)
        says += f"; from N = {points[-2]['N']:,} on it grows like {powers}"
    alt = (
        f"Lines on two logarithmic axes: bytes {WHAT[what]} of {listed(who)} against sequence length, with guides for linear "
        "and quadratic growth; dots are measured, crosses do not fit in memory."
    )
    draw = partial(_draw, points=points, who=who, what=what, total=total, device=device)
    return Panel(what, WHAT[what], alt, says + ".", draw, plot=2)


def _power(points: Points, name: str, what: str) -> float:
    """The exponent over the last step of lengths."""
    one, two = points[-2:]
    before, after = one["computed"][name][what], two["computed"][name][what]
    return math.log(max(after, 1) / max(before, 1)) / math.log(two["N"] / one["N"])


def _draw(axes: Any, points: Points, who: Sequence[str], what: str, total: int, device: str) -> None:
    ns = [p["N"] for p in points]
    for at, name in enumerate(who):
        look = {"color": picture.colour(name, at)}
        sizes = [p["computed"][name][what] for p in points]
        axes.plot(ns, sizes, lw=1.3, label=name, **look)
        dots = [(p["N"], p["measured"][name][what]) for p in points if name in p["measured"]]
        axes.plot([n for n, _ in dots], [b for _, b in dots], picture.marker(name), **look)
        out = [(p["N"], p["computed"][name][what]) for p in points if needed(p, name) > total]
        axes.plot([n for n, _ in out], [b for _, b in out], "x", markersize=8, **look)
    axes.axhline(total, color="black", linestyle=":", lw=1)
    whose = "this GPU" if device == "cuda" else "this machine"
    axes.annotate(f"memory of {whose}", (ns[0], total), va="bottom", fontsize=7.5)
    every = [p["computed"][name][what] for p in points for name in who]
    lowest = min(every)
    picture.sizes(axes.yaxis, lowest / 8, max(*every, total))
    picture.lengths(axes, ns)
    for power, word in ((1, "~ N"), (2, "~ N²")):  # guides below the lines
        guide = [0.5 * lowest * (n / ns[0]) ** power for n in ns]
        axes.plot(ns, guide, color=picture.GREY, linestyle="--", lw=0.9)
        axes.annotate(word, (ns[-1], guide[-1]), fontsize=7.5, color=picture.GREY, ha="right", va="top")
    axes.legend(ncols=2 if len(who) > 3 else 1)


def _beside_the_paper(ours: dict[int, int]) -> Panel:
    last = max(n for n in ours if n in PAPER)
    mb = ours[last] / 1e6
    says = (
        f"At N = {last:,} a training step of tilewise takes {mb:,.0f} MB in all, the paper's {PAPER[last]:,} MB: "
        f"{mb / PAPER[last]:.0%}."
    )

    def draw(axes: Any) -> None:
        axes.plot(
            list(PAPER), list(PAPER.values()), "s--", color=picture.GREY, label="FlashAttention's paper, table 21"
        )
        axes.plot(
            list(ours), [b / 1e6 for b in ours.values()], "o-", color=picture.colour("tilewise"), label="tilewise"
        )
        axes.set(yscale="log", ylabel="MB in all")
        picture.lengths(axes, sorted({*PAPER, *ours}))
        axes.legend()

    alt = "Lines on two logarithmic axes: MB of a training step of tilewise and of the paper's table against sequence length."
    return Panel("paper", "a training step in all, measured, beside the paper", alt, says, draw, plot=2)


def _table(points: Points, who: Sequence[str], what: str, total: int) -> Table:
    rows = []
    for point in points:
        cells = [f"{point['N']:,}"]
        for name in who:
            measured = point["measured"].get(name)
            size = human((measured or point["computed"][name])[what], "B")
            out = " (does not fit)" if needed(point, name) > total else ""
            cells.append((size if measured else f"~ {size}") + out)
        rows.append(cells)
    return Table(f"{WHAT[what][0].upper()}{WHAT[what][1:]}; with ~: computed", ("N", *who), rows, left=0)


# ---- what fits ----


def fit(data: dict[str, Any]) -> Section:
    """The largest batch and context of a model on a GPU."""
    points = data["points"]
    who = list(points[0]["largest_context"])
    rows = []
    for p in points:
        for n, batches in p["largest_batch"].items():
            rows.append((p["model"], p["gpu"], f"{int(n):,}", *(f"{batches[name]:,}" for name in who)))
    dropout = "with" if data["dropout"] else "without"
    shown = [p for at, p in enumerate(points) if at in (0, len(points) - 1) and any(_fits(p))]
    return Section(
        "What fits on a GPU",
        f"Training steps in 16-bit mixed precision with Adam, {dropout} dropout, by formulas; "
        f"{human(data['reserve_bytes'], 'B')} left to the driver",
        [],
        [_contexts(points, who), *(_batches(p, who) for p in shown)],
        [Table("Largest batch", ("model", "GPU", "context", *who), rows, left=2)],
    )


def _fits(point: dict[str, Any]) -> list[int]:
    return list(point["largest_context"].values())


def _contexts(points: Points, who: Sequence[str]) -> Panel:
    series = {name: [p["largest_context"][name] or math.nan for p in points] for name in who}
    gains = [(_name(p), p["largest_context"]) for p in points if all(_fits(p))]
    says = (
        listed(f"{name} reaches {c['tilewise']:,} tokens instead of {c['standard']:,}" for name, c in gains[:2])
        if gains
        else "Nothing fits with standard attention"
    )

    def draw(axes: Any) -> None:
        picture.bars(axes, [_name(p) for p in points], series, "tokens at batch 1")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        for at, p in enumerate(points):
            if not any(_fits(p)):
                axes.annotate(" none", (axes.get_xlim()[0], at), va="center", fontsize=8)
        axes.tick_params(axis="y", labelsize=7.5)

    alt = f"Bars on a logarithmic axis: the longest context that fits, of {listed(who)}, by model and GPU."
    return Panel(
        "context", "longest context at batch 1", alt, f"{says}.", draw, plot=10, height=1.6 + 0.34 * len(points)
    )


def _batches(point: dict[str, Any], who: Sequence[str]) -> Panel:
    sizes = {name: [(int(n), b[name]) for n, b in point["largest_batch"].items() if b[name]] for name in who}
    common = [n for n, _ in sizes["standard"]]
    says = "With standard attention nothing of these lengths fits."
    if common:
        ours, theirs = dict(sizes["tilewise"])[common[-1]], dict(sizes["standard"])[common[-1]]
        says = f"At {common[-1]:,} tokens {ours:,} sequences fit instead of {theirs:,}, and none of longer ones."

    def draw(axes: Any) -> None:
        for name in who:
            line = sizes[name]
            look = {"color": picture.colour(name), "marker": picture.marker(name)}
            axes.plot([n for n, _ in line], [b for _, b in line], label=name, **look)
        axes.set_yscale("log", base=2)
        axes.set_ylabel("largest batch")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        picture.lengths(axes, [int(n) for n in point["largest_batch"]])
        axes.legend()

    alt = f"Lines on two logarithmic axes: the largest batch that fits against context, of {listed(who)}."
    name = _name(point)
    return Panel(f"batch-{point['model']}-{point['gpu']}", f"largest batch: {name}", alt, says, draw, plot=10)


def _name(point: dict[str, Any]) -> str:
    return f"{point['model']}, {point['gpu']}"
