"""The IO model: `tilewise io`, with `--measure` its hardware counters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tilewise.page import human
from tilewise.report import picture
from tilewise.report.pieces import Panel, Section, Table, digits, fold, listed, ms, sentence

PASSES = ("forward", "backward")
LEVELS = {"tile_bytes": "L2 to SM and back", "dram_bytes": "DRAM"}
Systems = dict[str, dict[str, Any]]


def io(data: dict[str, Any]) -> Section:
    """Counts, lower bounds and laws; counters beside predictions where there are any."""
    p, gpu, systems = data["problem"], data["gpu"], data["systems"]
    masks = ", ".join(p["masks"]) or "no mask"
    sizes = f"B {p['B']}, H {p['H']}, N {p['Sq']:,}, D {p['D']}, {p['dtype']}, {masks}"
    measured = data.get("measured", [])
    panels = [_roofline(systems, measured, gpu, p["dtype"], which) for which in PASSES]
    panels += [_moved(systems)]
    panels += [_chips(data["chips"], data["sram"])] if data.get("chips") else []
    panels += [_executed(data["simulated"])] if data.get("simulated") else []
    panels += [_identity(measured)] if any(row["counted"] for row in measured) else []
    tables = [_counts(systems), _bounds(systems, gpu["title"]), _memory(systems)]
    tables += [_laws(data["laws"])] if data.get("laws") else []
    tables += [_counters(measured)] if measured else []
    return Section(
        f"What attention moves and computes: {gpu['title']}, N = {p['Sq']:,}",
        f"{sizes}; counted, in tiles for {human(data['sram'], 'B')}; rates of {gpu['title']}: {gpu['source']}",
        [*_says(systems), *([_law_words(data["laws"])] if data.get("laws") else [])],
        panels,
        tables,
        [f"{row['system']} {row['pass']} was not measured: {row['error']}" for row in measured if row.get("error")],
    )


def total_bytes(one_pass: dict[str, Any]) -> int:
    """Loaded and stored between memory and the chip."""
    return one_pass["bytes_read"] + one_pass["bytes_written"]


def _both(system: dict[str, Any]) -> int:
    return sum(total_bytes(system[which]) for which in PASSES)


def _different(systems: Systems, passes: Sequence[str]) -> Systems:
    """The systems without those that move and compute what one before them does."""
    found: Systems = {}
    for name, system in systems.items():
        if all(any(system[p]["predicted"] != other[p]["predicted"] for p in passes) for other in found.values()):
            found[name] = system
    return found


def _says(systems: Systems) -> list[str]:
    if "standard" not in systems:
        return []
    base = systems["standard"]
    found = []
    for name, system in _different(systems, PASSES).items():
        if name != "standard":
            behind = [sum(s[which]["predicted"]["memory_bytes"] for which in PASSES) for s in (base, system)]
            found.append(
                f"{name} loads and stores {human(_both(system), 'B')}, {fold(_both(base) / _both(system))} fewer than "
                f"standard's {human(_both(base), 'B')}, and behind L2 {fold(behind[0] / behind[1])} fewer"
            )
    return [f"Forward and backward: {'; '.join(found)}."] if found else []


# ---- pictures ----


def _peak(gpu: dict[str, Any], dtype: str) -> float:
    return gpu["matrix32"] if dtype in ("fp32", "fp64") else gpu["matrix16"]


def _roofline(
    systems: Systems, measured: Sequence[dict[str, Any]], gpu: dict[str, Any], dtype: str, which: str
) -> Panel:
    shown = {name: s[which] for name, s in _different(systems, [which]).items()}
    says = "At least: " + "; ".join(
        f"{name} {ms(one['predicted']['seconds'])}, bound by {one['predicted']['bound']} at "
        f"{digits(one['predicted']['intensity'])} FLOPs a byte"
        for name, one in shown.items()
    )
    counted = [row for row in measured if row["pass"] == which and (row["counted"] or {}).get("seconds")]
    works = {name: s[which]["flops"]["matmul"] for name, s in systems.items()}
    for row in counted:
        rate = works[row["system"]] / row["counted"]["seconds"] / 1e12
        says += f"; measured, {row['system']} reaches {digits(rate)} TFLOP/s"
    alt = (
        f"Roofline of {gpu['title']}, {which} pass: attainable FLOP/s against FLOPs per byte. Dots: every system if L2 holds "
        "what is read again; rings: if every load came from memory; crosses: measured."
    )
    draw = partial(_draw_roofline, shown=shown, counted=counted, works=works, gpu=gpu, dtype=dtype)
    return Panel(f"roofline-{which}", f"roofline, {which}", alt, sentence(says), draw, plot=5)


def _draw_roofline(
    axes: Any,
    shown: Systems,
    counted: Sequence[dict[str, Any]],
    works: dict[str, int],
    gpu: dict[str, Any],
    dtype: str,
) -> None:
    peak, width = _peak(gpu, dtype), gpu["bandwidth"]
    knee, highest = peak / width, max(10 * peak / width, *(4 * s["predicted"]["intensity"] for s in shown.values()))
    lowest = min(knee / 30, *(0.5 * one["flops"]["matmul"] / max(total_bytes(one), 1) for one in shown.values()))
    axes.plot([lowest, knee, highest], [lowest * width, peak, peak], color="black", lw=1.2)
    axes.annotate(f"{peak / 1e12:,.0f} TFLOP/s", (highest, 1.06 * peak), ha="right", va="bottom", fontsize=8)
    axes.annotate(f"{width / 1e12:.2f} TB/s", (knee / 2, knee * width / 2), ha="right", va="bottom", fontsize=8)
    axes.plot([], [], "o", color=picture.GREY, fillstyle="none", label="if every load came from memory")
    for at, (name, one) in enumerate(shown.items()):
        guess, look = one["predicted"], {"color": picture.colour(name, at)}
        useful = guess["flops"] / guess["seconds"]
        axes.plot([guess["intensity"]], [useful], picture.marker(name), markersize=8, label=name, **look)
        ring = guess["flops"] / max(guess["bytes"], 1)
        axes.plot([ring], [min(peak, ring * width)], "o", markersize=11, fillstyle="none", **look)
    for row in counted:
        values, work = row["counted"], works[row["system"]]
        if values["dram_bytes"]:
            spot = [work / values["dram_bytes"]], [work / values["seconds"]]
            label = f"{row['system']}, measured"
            axes.plot(*spot, "x", color=picture.colour(row["system"]), markersize=9, mew=2, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs of products per byte", ylabel="FLOP/s")
    axes.set_ylim(top=2.5 * peak)
    axes.legend(loc="lower right")


def _moved(systems: Systems) -> Panel:
    names = list(_different(systems, PASSES))
    inner = [_both(systems[name]) / 1e9 for name in names]
    outer = [sum(systems[name][which]["predicted"]["memory_bytes"] for which in PASSES) / 1e9 for name in names]
    says = listed(f"{name} {digits(b)} GB" for name, b in zip(names, inner))

    def draw(axes: Any) -> None:
        picture.bars(axes, names, {"between chip and L2": inner, "behind L2": outer}, "GB, forward and backward")

    alt = f"Bars: GB of {listed(names)} between chip and L2, and behind L2."
    return Panel("moved", "bytes loaded and stored", alt, f"Between chip and L2: {says}.", draw)


def _chips(chips: dict[str, Any], sram: int) -> Panel:
    kib, curves = chips["kib"], {}
    for name, sizes in chips["bytes"].items():  # systems that move the same are one curve
        curves.setdefault(tuple(sizes), []).append(name)
    shown = {listed(names): sizes for sizes, names in curves.items()}
    factor = kib[-1] / kib[0]
    says = "; ".join(f"{_fewer(sizes[0] / sizes[-1])}: {names}" for names, sizes in shown.items())

    def draw(axes: Any) -> None:
        for at, (sizes, names) in enumerate(curves.items()):
            look = {"color": picture.colour(names[0], at), "marker": picture.marker(names[0])}
            axes.plot(kib, sizes, label=listed(names), **look)
        axes.axvline(sram / 1024, color=picture.GREY, lw=0.9)
        axes.annotate(f" {sram / 1024:,.0f} KiB", (sram / 1024, max(map(max, shown.values()))), va="top", fontsize=8)
        axes.set(xscale="log", yscale="log", ylabel="bytes, forward")
        picture.lengths(axes, kib)
        axes.set_xlabel("chip, KiB")
        axes.legend()

    alt = f"Lines on two logarithmic axes: bytes of {'; '.join(shown)} against the size of the chip."
    return Panel(
        "chips",
        "bytes against the size of the chip",
        alt,
        f"On a chip {factor:.0f} times as large, bytes are {says}.",
        draw,
    )


def _fewer(ratio: float) -> str:
    return "as many" if ratio < 1.005 else f"{fold(ratio)} fewer"


def _identity(measured: Sequence[dict[str, Any]]) -> Panel:
    spots = [
        (row["system"], row["pass"], level, row["predicted"][level], row["counted"][level])
        for row in measured
        for level in LEVELS
        if row["counted"] and row["counted"][level]
    ]
    parts = []
    for level, words in LEVELS.items():
        ratios = [counted / predicted for _, _, at, predicted, counted in spots if at == level]
        if ratios:
            parts.append(f"{words}: counted {min(ratios):.2f} to {max(ratios):.2f} of the predicted bytes")

    def draw(axes: Any) -> None:
        ends = [f(value for *_, p, c in spots for value in (p, c)) for f in (min, max)]
        axes.plot(ends, ends, color=picture.GREY, lw=1, label="counted = predicted")
        for name, which, level, predicted, counted in spots:
            filled = "full" if level == "tile_bytes" else "none"
            mark = "o" if which == "forward" else "s"
            axes.plot([predicted], [counted], mark, color=picture.colour(name), fillstyle=filled, markersize=7)
        for name in dict.fromkeys(spot[0] for spot in spots):
            axes.plot([], [], "o", color=picture.colour(name), label=name)
        axes.plot([], [], "o", color=picture.GREY, label="round: forward, square: backward")
        axes.plot([], [], "o", color=picture.GREY, fillstyle="none", label="hollow: DRAM, full: L2 to SM")
        for axis, words in ((axes.xaxis, "bytes predicted"), (axes.yaxis, "bytes counted")):
            picture.sizes(axis, *ends)
            axis.set_label_text(words)
        axes.legend()

    alt = "Dots beside the line of equality: bytes that hardware counted against bytes predicted, for every system and pass."
    return Panel("identity", "predicted and counted bytes", alt, f"{'; '.join(parts)}.", draw, plot=6)


def _executed(simulated: Sequence[dict[str, Any]]) -> Panel:
    counts = [row["executed"] for row in simulated]
    same = sum(row["executed"] == row["formula"] for row in simulated)
    says = (
        f"{same} of {len(simulated)} executions on a counted memory loaded and stored exactly what the formulas say, "
        f"{min(counts):,} to {max(counts):,} elements."
    )

    def draw(axes: Any) -> None:
        ends = [min(counts), max(counts)]
        axes.plot(ends, ends, color=picture.GREY, lw=1, label="executed = formula")
        for name in dict.fromkeys(row["system"] for row in simulated):
            some = [(row["formula"], row["executed"]) for row in simulated if row["system"] == name]
            look = {"color": picture.colour(name), "marker": picture.marker(name), "alpha": 0.75}
            axes.plot([x for x, _ in some], [y for _, y in some], linestyle="", label=name, **look)
        axes.set(xscale="log", yscale="log", xlabel="elements by formula", ylabel="elements executed")
        axes.legend()

    alt = "Dots on the line of equality: elements that executed algorithms loaded and stored against their formulas."
    return Panel("executed", "counts, by formula and executed", alt, says, draw, plot=6)


# ---- tables ----


def _counts(systems: Systems) -> Table:
    rows = []
    for name, system in systems.items():
        for which in PASSES:
            one = system[which]
            flops = [
                human(one["flops"][x], "FLOP") if one["flops"][x] else "-" for x in ("matmul", "recomputed", "other")
            ]
            tile = "-" if name == "standard" else "x".join(map(str, one["block"]))
            rows.append((name, which, tile, *(human(one[f"bytes_{x}"], "B") for x in ("read", "written")), *flops))
    columns = ("system", "pass", "tile", "loaded", "stored", "products", "recomputed", "all else")
    return Table("Between memory and the chip, and on it: exact counts", columns, rows, left=2)


def _bounds(systems: Systems, title: str) -> Table:
    rows = []
    for name, system in systems.items():
        for which in PASSES:
            guess = system[which]["predicted"]
            times_by = [ms(seconds) for seconds in guess["seconds_by"].values()]
            rows.append(
                (name, which, human(guess["memory_bytes"], "B"), *times_by, ms(guess["seconds"]), guess["bound"])
            )
    resources = next(iter(systems.values()))["forward"]["predicted"]["seconds_by"]
    columns = ("system", "pass", "bytes behind L2", *resources, "at least", "bound by")
    return Table(f"Lower bounds on one {title}", columns, rows, left=2)


def _memory(systems: Systems) -> Table:
    keys = {"saved": "saved for backward", "peak_forward": "peak forward", "peak_backward": "peak backward"}
    rows = [(name, *(human(system["memory"][key], "B") for key in keys)) for name, system in systems.items()]
    return Table("Memory; peaks beyond inputs, outputs and gradients", ("system", *keys.values()), rows)


def _laws(laws: dict[str, Any]) -> Table:
    rows = []
    for law in laws["exponents"]:
        fits = (law["exponents"][x] for x in "NdM")
        cells = ["-" if fit is None else f"{fit[0]:+.3f} (residual {fit[2]:.1%})" for fit in fits]
        rows.append((law["system"], "backward" if law["backward"] else "forward", *cells))
    return Table("Exponents fitted to exact counts", ("system", "pass", "N", "d", "M"), rows, left=2)


def _law_words(laws: dict[str, Any]) -> str:
    found = {(law["system"], law["backward"]): law["exponents"] for law in laws["exponents"]}
    flash = found.get(("flash2", False))
    standard = found.get(("standard", False))
    if flash is None or standard is None:
        return "No law was fitted to standard attention and FlashAttention-2."
    n, d, m = (flash[x][0] for x in "NdM")
    return (
        f"Fitted laws, forward: standard moves N^{standard['N'][0]:.2f}, FlashAttention-2 N^{n:.2f} d^{d:.2f} M^{m:.2f} "
        "(theorem 2 of the paper: N^2, and N^2 d^2 / M)."
    )


def _counters(measured: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for row in measured:
        counted, predicted = row["counted"], row["predicted"]
        if counted is None:
            rows.append((row["system"], row["pass"], *["-"] * 7))
            continue
        bytes_of = [
            "-" if counted[x] is None else f"{human(counted[x], 'B')} ({counted[x] / max(predicted[x], 1):.2f}x)"
            for x in LEVELS
        ]
        shares = ["-" if counted[x] is None else f"{counted[x]:.0f}%" for x in ("tensor_pipe", "occupancy")]
        other = "-" if counted["other_instructions"] is None else human(counted["other_instructions"], "")
        seconds = "-" if counted["seconds"] is None else ms(counted["seconds"])
        rows.append((row["system"], row["pass"], *bytes_of, *shares, other, seconds, str(counted["kernels"])))
    columns = ("system", "pass", *LEVELS.values(), "tensor pipe", "occupancy", "other instructions", "time", "kernels")
    return Table("Hardware counters (in brackets: over the predicted)", columns, rows, left=2)
