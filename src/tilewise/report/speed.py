"""Speed: `tilewise bench` on CPUs and GPUs, `bench --features`, `lab generations`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tilewise.cli.gpu_features import over_best
from tilewise.cli.problems import Shape
from tilewise.report import picture
from tilewise.report.pieces import Panel, Section, Table, digits, geometric_mean, listed, ms, sentence, times

PASSES = ("forward", "backward")
LONGEST_REASON = 160  # characters
Rows = Sequence[dict[str, Any]]

# ---- bench on a CPU ----


def bench(data: dict[str, Any]) -> Section:
    """GFLOP/s of tilewise and of SDPA, problem by problem."""
    results = data["results"]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["dtype"], r["pass"], r["threads"]), []).append(r)
    clock = "CPU time of one thread" if data["time"] == "cpu" else "wall time"
    rows = [
        (r["shape"], r["dtype"], r["pass"], str(r["threads"]), *_cells(r), times(r["ratio"])) for r in results
    ]  # fmt: skip
    columns = ("B x H x N x D", "dtype", "pass", "threads", "tilewise", "GFLOP/s", "SDPA", "GFLOP/s", "faster")
    return Section(
        "Speed on a CPU, beside PyTorch's attention",
        f"{clock}, medians of {data['rounds']} rounds in which both take turns, each problem after a check against float64",
        [_means(groups)] if groups else ["Nothing was timed."],
        [_bars(group, *key) for key, group in groups.items()],
        [Table("Every problem", columns, rows, left=3)],
        [f"refused, its results are wrong: {one}" for one in data["refused"]],
    )


def _cells(r: dict[str, Any]) -> list[str]:
    return [cell for who in ("tilewise", "sdpa") for cell in (ms(r[who]["seconds"]), digits(r[who]["gflops"]))]


def _means(groups: dict[tuple[str, str, int], list[dict[str, Any]]]) -> str:
    means = [
        f"{times(geometric_mean(r['ratio'] for r in group))} as fast {name} in {dtype}{_on(threads)}"
        for (dtype, name, threads), group in groups.items()
    ]
    return f"In the geometric mean tilewise is {listed(means)}, compared with PyTorch's scaled_dot_product_attention."


def _on(threads: int) -> str:
    return f" on {threads} threads" if threads > 1 else ""


def _bars(group: Rows, dtype: str, name: str, threads: int) -> Panel:
    rates = {who: [r[who]["gflops"] for r in group] for who in ("tilewise", "sdpa")}
    ratios = [r["ratio"] for r in group]
    says = f"tilewise is {_range(ratios)} as fast as SDPA and reaches {digits(max(rates['tilewise']))} GFLOP/s"

    def draw(axes: Any) -> None:
        picture.bars(axes, [r["shape"].replace(":", "\n") for r in group], rates, "GFLOP/s")

    alt = f"Bars: GFLOP/s of tilewise and of SDPA for {len(group)} problems, {dtype}, {name} pass."
    return Panel(f"{dtype}-{name}-{threads}", f"{name}, {dtype}{_on(threads)}", alt, says + ".", draw)


def _range(ratios: Sequence[float]) -> str:
    low, high = min(ratios), max(ratios)
    return times(low) if times(low) == times(high) else f"{times(low)} to {times(high)}"


# ---- on GPUs ----


def bench_gpu(data: dict[str, Any]) -> Section:
    """TFLOP/s on a grid of problems, beside PyTorch's kernels."""
    results = data["results"]
    who = list(dict.fromkeys(name for r in results for name in (*r["tflops"], *r["missing"])))
    rows = []
    for r in results:
        ours, rivals = r["tflops"].get("tilewise"), _rivals(r["tflops"])
        best = times(ours / max(rivals)) if ours and rivals else "-"
        rates = (digits(r["tflops"][name]) if name in r["tflops"] else "-" for name in who)
        rows.append((r["shape"], r["dtype"], r["pass"], *rates, best))
    means = [f"{name} {times(mean)}" for name, mean in data["geometric_means"].items()]
    return Section(
        "Speed on a GPU, beside PyTorch's kernels",
        f"TFLOP/s, {data['rounds']} round(s) in turns, bursts of {data['burst_s'] * 1e3:.0f} ms after a rest of "
        f"{data['idle_s'] * 1e3:.0f} ms, each problem after a check against float64",
        ([f"Geometric means of tilewise's speed: {listed(means)}."] if means else ["Nothing was timed."]),
        _curves(results, who),
        [Table("Every problem", ("B x H x N x D", "dtype", "pass", *who, "over the best"), rows, left=3)],
        [f"refused: {one}" for one in data["refused"]] + _missing(results),
    )


def _rivals(rates: dict[str, float]) -> list[float]:
    return [rate for name, rate in rates.items() if name not in ("tilewise", "triton")]


def _missing(results: Rows) -> list[str]:
    """Which peers did not run what, and why the first time."""
    found: dict[str, list[tuple[str, str]]] = {}
    for r in results:
        for peer, why in r["missing"].items():
            found.setdefault(peer, []).append((r["shape"], why))
    return [
        f"{peer} did not run {len(dict(some))} of the problems; first {some[0][0]}: {some[0][1][:LONGEST_REASON]}"
        for peer, some in found.items()
    ]


def generations(data: dict[str, Any]) -> Section:
    """FlashAttention-1, -2 and -3 on one device."""
    results = [r | {"missing": {}, "dtype": data["dtype"]} for r in data["results"]]
    who = list(dict.fromkeys(name for r in results for name in r["tflops"]))
    rows = [
        (r["shape"], r["pass"], *(digits(r["tflops"][name]) if name in r["tflops"] else "-" for name in who))
        for r in results
    ]
    means = [_faster(name, mean) for name, mean in data["geometric_means"].items()]
    papers = [f"{name} {claim}" for name, claim in data["papers"].items()]
    says = [f"In geometric means over the grid {listed(means)}. The papers say, on their GPUs: {listed(papers)}."]
    return Section(
        "The three generations of FlashAttention",
        f"{data['dtype']} on {data['device']}, {data['time']} of {data['rounds']} rounds in turns",
        says if means else ["No generation was timed beside another."],
        [*_curves(results, who), *_mean_bars(data)],
        [Table("TFLOP/s", ("B x H x N x D", "pass", *who), rows, left=2)],
        [f"refused: {one}" for one in data["refused"]],
    )


def _mean_bars(data: dict[str, Any]) -> list[Panel]:
    means = data["geometric_means"]
    if not means:
        return []
    steps = list(dict.fromkeys(name.rpartition(" ")[0] for name in means))
    series = {which: [means.get(f"{step} {which}", math.nan) for step in steps] for which in PASSES}
    says = f"in geometric means {listed(_faster(name, mean) for name, mean in means.items())}"

    def draw(axes: Any) -> None:
        picture.bars(axes, [step.replace(" over ", "\nover ") for step in steps], series, "times as fast")
        axes.axvline(1, color=picture.GREY, linestyle=":")

    alt = "Bars: geometric means of each generation's speed over the one before, forward and backward."
    return [Panel("means", "each generation over the last", alt, sentence(says), draw)]


def _faster(name: str, mean: float) -> str:
    """flash2 is 1.70x as fast as flash1 forward, from "flash2 over flash1 forward"."""
    new, _, rest = name.partition(" over ")
    return f"{new} is {times(mean)} as fast as {rest}"


def _curves(results: Rows, who: Sequence[str]) -> list[Panel]:
    """A panel for each pass, dtype, head dim and mask: speed against sequence length."""
    groups: dict[tuple[str, str, int, bool], list[tuple[Shape, dict[str, Any]]]] = {}
    for r in results:
        shape = Shape.parse(r["shape"])
        if not r["tflops"]:
            continue  # nobody could run it: the table and the warnings say so
        groups.setdefault((r["pass"], r["dtype"], shape.D, shape.causal), []).append((shape, r))
    order = sorted(groups, key=lambda key: (key[1], key[2], not key[3], key[0] != "forward"))
    return [_curve(key, sorted(groups[key], key=lambda pair: pair[0].S), who) for key in order]


def _curve(
    key: tuple[str, str, int, bool], points: Sequence[tuple[Shape, dict[str, Any]]], who: Sequence[str]
) -> Panel:
    name, dtype, D, causal = key
    mask = "causal" if causal else "full"
    longest, at_end = points[-1][0].S, points[-1][1]["tflops"]
    fast = sorted(at_end.items(), key=lambda item: -item[1])
    unit, scale = _unit(points)
    says = f"At N = {longest:,}: {listed(f'{one} {digits(rate * scale)}' for one, rate in fast)} {unit}"
    if len(fast) > 1:
        says += f"; {fast[0][0]} is {times(fast[0][1] / fast[1][1])} as fast as {fast[1][0]}"
    alt = f"Lines: {unit} of {listed(who)} against sequence length, {name} pass, head dim {D}, {mask}."
    draw = partial(_draw_curve, points=points, who=who)
    return Panel(f"{name}-{dtype}-d{D}-{mask}", f"{name}, {dtype}, D {D}, {mask}", alt, says + ".", draw, plot=1)


def _unit(points: Sequence[tuple[Shape, dict[str, Any]]]) -> tuple[str, float]:
    """The unit of rates, and how many of it are one TFLOP/s."""
    highest = max((rate for _, r in points for rate in r["tflops"].values()), default=1.0)
    return ("TFLOP/s", 1.0) if highest >= 1 else ("GFLOP/s", 1e3)


def _draw_curve(axes: Any, points: Sequence[tuple[Shape, dict[str, Any]]], who: Sequence[str]) -> None:
    unit, scale = _unit(points)
    for at, name in enumerate(who):
        line = [(shape.S, scale * r["tflops"][name]) for shape, r in points if name in r["tflops"]]
        look = {"color": picture.colour(name, at)}
        if line:
            axes.plot([n for n, _ in line], [rate for _, rate in line], marker=picture.marker(name), label=name, **look)
        out = [shape.S for shape, r in points if name in r["missing"]]
        if out:
            label = None if line else f"{name}: did not run"
            axes.plot(out, [0.0] * len(out), "x", markersize=8, clip_on=False, label=label, **look)
    picture.lengths(axes, [shape.S for shape, _ in points])
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.legend()


# ---- features ----


def features(data: dict[str, Any]) -> Section:
    """What each feature costs over the plain causal kernel."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in data["results"]:
        groups.setdefault((row["S"], row["dtype"]), []).append(row)
    columns = (
        "feature",
        "N",
        "dtype",
        "over",
        "FLOPs",
        *(f"{w} {x}" for w in PASSES for x in ("ms", "times", "per FLOP", "over the best rival")),
    )
    rows = []
    for row in data["results"]:
        cells = [row["feature"], f"{row['S']:,}", row["dtype"], row["over"], f"{row['flops_share']:.1%}"]
        for which in PASSES:
            cells += [digits(row[which]["seconds"] * 1e3), *(times(row[which][x]) for x in ("times", "times_per_flop"))]
            cells.append(over_best(row[which]))
        rows.append(cells)
    return Section(
        "What features cost on a GPU",
        f"{data['heads']} heads of {data['D']}, {data['rounds']} rounds in turns; time over the kernel without the feature, "
        "for each FLOP that masks leave",
        [],
        [_costs(*key, [row for row in group if row["feature"] != row["over"]]) for key, group in groups.items()],
        [Table("Every feature", columns, rows)],
        [f"refused: {one}" for one in data["refused"]],
    )


def _costs(S: int, dtype: str, rows: Rows) -> Panel:
    series = {which: [row[which]["times_per_flop"] for row in rows] for which in PASSES}
    dearest = {which: max(rows, key=lambda row, w=which: row[w]["times_per_flop"]) for which in PASSES if rows}
    says = listed(
        f"{row['feature']} costs most {which}, {times(row[which]['times_per_flop'])}" for which, row in dearest.items()
    ) if dearest else "nothing was timed"  # fmt: skip

    def draw(axes: Any) -> None:
        picture.bars(axes, [row["feature"] for row in rows], series, "times the plain kernel, per FLOP")
        axes.axvline(1, color=picture.GREY, linestyle=":")
        axes.tick_params(axis="y", labelsize=7.5)

    alt = f"Bars: time per FLOP of each feature over the plain kernel's, forward and backward, N = {S:,}, {dtype}."
    height = 1.6 + 0.34 * len(rows)
    return Panel(f"features-{S}-{dtype}", f"N {S:,}, {dtype}", alt, sentence(says), draw, height=height)
