"""The lab: `tilewise lab compare`, `lab errors` and `lab sparsity`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tilewise.page import human
from tilewise.report import picture
from tilewise.report.pieces import Panel, Section, Table, digits, listed, ms, sentence, shape_of, times

PASSES = ("forward", "backward")
BASELINE, TILED = "standard", "recompute-tiles"
Rows = Sequence[dict[str, Any]]


def compare(data: dict[str, Any]) -> Section:
    """Exactness, bytes, time of every system, and time against the side of a tile."""
    results, problem = data["results"], data["problem"]
    timed = [r for r in results if "forward" in r]
    rows = []
    for r in results:
        errors = [f"{error:.1e}" for error in (r["errors"]["o"], max(r["errors"][x] for x in ("dq", "dk", "dv")))]
        cells = [r["system"], "yes" if r["exact"] else "NO", *errors]
        if "forward" in r:
            cells += [f"{r['saved_bytes'] / 1e6:,.2f} MB", human(r["peak_bytes"], "B")]
            cells += [ms(r[which]["seconds"]) for which in PASSES]
        rows.append([*cells, *["-"] * (8 - len(cells))])
    columns = ("system", "exact", "error of o", "of dq, dk, dv", "kept", "peak", *PASSES)
    about = [(r["system"], r["title"], r["source"]) for r in results]
    sweep = [_sweep(data["sweep"], results)] if data["sweep"] else []
    return Section(
        "Systems of the papers on one problem",
        f"{shape_of(problem)}, on {problem['device']}; {data['time']} of {data['rounds']}",
        list(data["claims"].values()),
        [*([_kept(timed), _time(timed)] if timed else []), *sweep],
        [
            Table("Exactness, memory, time", columns, rows),
            Table("What they are", ("system", "how", "source"), about, left=3),
            *([_sweep_table(data["sweep"])] if sweep else []),
        ],
        [f"{r['system']} disagrees with the float64 reference" for r in results if not r["exact"]],
    )


def errors(data: dict[str, Any]) -> Section:
    """Root mean square errors on ordinary and on hard inputs."""
    results = [r for r in data["results"] if "errors" in r]
    normal = {r["system"]: r["seconds"] for r in results if r["inputs"] == "normal"}
    rows = []
    for r in results:
        ratios = [times(seconds / normal[r["system"]][which]) for which, seconds in r["seconds"].items()]
        rows.append([r["inputs"], r["system"], *(f"{error:.2e}" for error in r["errors"].values()), *ratios])
    kinds = ("o", "dq", "dk", "dv")
    columns = ("inputs", "system", *kinds, *(f"{which}, over normal" for which in PASSES))
    inputs = list(dict.fromkeys(r["inputs"] for r in results))
    return Section(
        "Errors against float64",
        f"{shape_of(data['problem'])}, on {data['problem']['device']}; root of the mean square over all elements",
        panels=[_errors_of(name, [r for r in results if r["inputs"] == name]) for name in inputs],
        tables=[Table("Errors, and time over that of normal inputs", columns, rows, left=2)],
        warnings=[f"{r['system']} on {r['inputs']} inputs: {r['missing']}" for r in data["results"] if "missing" in r],
    )


def _errors_of(inputs: str, rows: Rows) -> Panel:
    found = {r["system"]: r["errors"]["o"] for r in rows}
    least, most = (f(found, key=lambda name: found[name]) for f in (min, max))
    says = f"of o: from {found[least]:.2e} ({least}) to {found[most]:.2e} ({most})"

    def draw(axes: Any) -> None:
        picture.bars(axes, list(found), {"o": list(found.values())}, "root mean square error of o")

    return Panel(f"errors-{inputs}", f"{inputs} inputs", "Bars: error of o of each system.", sentence(says), draw)


def _kept(timed: Rows) -> Panel:
    kept = {r["system"]: r["saved_bytes"] for r in timed}
    most = max(kept, key=lambda name: kept[name])
    least = min((name for name in kept), key=lambda name: kept[name])
    named = dict.fromkeys([most, least, *({TILED} & kept.keys())])
    says = f"kept: {listed(f'{kept[name] / 1e6:,.2f} MB by {name}' for name in named)}"

    def draw(axes: Any) -> None:
        picture.bars(axes, list(kept), {"kept": [size / 1e6 for size in kept.values()]}, "MB")
        for name, bar in zip(kept, axes.patches):
            bar.set_color(picture.colour(name))

    return Panel("kept", "kept for the backward pass", "Bars: MB that each system keeps.", sentence(says), draw)


def _time(timed: Rows) -> Panel:
    series = {which: [r[which]["seconds"] * 1e3 for r in timed] for which in PASSES}
    quickest = {which: min(timed, key=lambda r, w=which: r[w]["seconds"]) for which in PASSES}
    base = next((r for r in timed if r["system"] == BASELINE), None)
    parts = []
    for which, r in quickest.items():
        part = f"{which} {r['system']} is fastest, {ms(r[which]['seconds'])}"
        if base is not None and r is not base:
            part += f", {times(base[which]['seconds'] / r[which]['seconds'])} as fast as {BASELINE}"
        parts.append(part)
    says = "; ".join(parts)

    def draw(axes: Any) -> None:
        picture.bars(axes, [r["system"] for r in timed], series, "ms")

    alt = "Bars: milliseconds of each system, forward and backward."
    return Panel("time", "time", alt, sentence(says), draw)


def _sweep(sweep: Rows, results: Rows) -> Panel:
    base = next((r for r in results if r["system"] == BASELINE and "forward" in r), None)
    best = {which: min(sweep, key=lambda s, w=which: s[w]["seconds"]) for which in PASSES}
    worst = {which: max(s[which]["seconds"] for s in sweep) / best[which][which]["seconds"] for which in PASSES}
    says = "; ".join(
        f"{which} tiles of {one['tile']:,} x {one['tile']:,} are best, {ms(one[which]['seconds'])}, and the worst take "
        f"{times(worst[which])} as long"
        for which, one in best.items()
    )
    alt = f"Lines: milliseconds of {TILED} against the side of its tiles, a U; dotted: standard attention."
    draw = partial(_draw_sweep, sweep=sweep, base=base)
    return Panel("tiles", f"{TILED} by the side of a tile", alt, sentence(says), draw, plot=7)


def _draw_sweep(axes: Any, sweep: Rows, base: dict[str, Any] | None) -> None:
    sides = [s["tile"] for s in sweep]
    for which in PASSES:
        look = {"color": picture.colour(which)}
        axes.plot(sides, [s[which]["seconds"] * 1e3 for s in sweep], marker=picture.marker(which), label=which, **look)
        if base is not None:
            axes.axhline(base[which]["seconds"] * 1e3, linestyle=":", label=f"{BASELINE}, {which}", **look)
    picture.lengths(axes, sides)
    axes.set(xlabel="rows and keys of a tile", ylabel="ms", ylim=(0, None))
    axes.legend()


def _sweep_table(sweep: Rows) -> Table:
    rows = [(f"{s['tile']:,} x {s['tile']:,}", *(ms(s[which]["seconds"]) for which in PASSES)) for s in sweep]
    return Table(f"{TILED} by tile", ("tile", *PASSES), rows, left=0)


# ---- block-sparse ----


def sparsity(data: dict[str, Any]) -> Section:
    """Time and bytes against the share of tiles that is kept."""
    points, problem, fits = data["points"], data["problem"], data["fits"]
    names = list(points[0]["systems"])
    rows = []
    for p in sorted(points, key=lambda p: p["density"]):
        cells = [p["family"], f"{p['density']:.1%}", *(human(p["bytes"][which], "B") for which in PASSES)]
        rows.append(cells + [ms(p["systems"][name][which]["seconds"]) for name in names for which in PASSES])
    columns = ("pattern", "tiles kept", *(f"bytes {w}" for w in PASSES), *(f"{n} {w}" for n in names for w in PASSES))
    lines = [(name, *_line(name, fit), f"{fit['r2']:.5f}") for name, fit in fits.items()]
    timed = [fit["r2"] for name, fit in fits.items() if not name.startswith("bytes")]
    return Section(
        "Block-sparse attention",
        f"{shape_of(problem)}, tiles of {problem['block']}, on {problem['device']}; {data['time']} of {data['rounds']}",
        [f"Straight lines through time against the share of kept tiles have r² of {min(timed):.4f} or more."],
        [*(_density(points, names, fits, which) for which in PASSES), _bytes(points, fits)],
        [
            Table("Every pattern", columns, rows),
            Table("Straight lines", ("", "at 0", "to 1", "r²"), lines),
        ],
    )


def _line(name: str, fit: dict[str, float]) -> list[str]:
    parts = (fit["intercept"], fit["slope"])
    return [human(part, "B") if name.startswith("bytes") else ms(part) for part in parts]


def _density(points: Rows, names: Sequence[str], fits: dict[str, Any], which: str) -> Panel:
    parts = []
    for name in names:
        fit = fits[f"{name} {which}"]
        whole = fit["intercept"] + fit["slope"]
        r2 = digits(fit["r2"], 5)
        parts.append(
            f"{name} takes {ms(whole)} for all tiles and {fit['intercept'] / whole:.1%} of it for none (r² {r2})"
        )
    says = f"By the straight lines {'; '.join(parts)}."
    alt = f"Dots with straight lines: milliseconds of {listed(names)} {which} against the share of tiles kept."
    draw = partial(_draw_density, points=points, names=names, fits=fits, which=which)
    return Panel(which, f"{which}: time against density", alt, says, draw, plot=13)


def _draw_density(axes: Any, points: Rows, names: Sequence[str], fits: dict[str, Any], which: str) -> None:
    marks = dict(zip(dict.fromkeys(p["family"] for p in points), "os^Dv", strict=False))
    for at, name in enumerate(names):
        shade, fit = picture.colour(name, at), fits[f"{name} {which}"]
        for family, mark in marks.items():
            some = [p for p in points if p["family"] == family]
            heights = [p["systems"][name][which]["seconds"] * 1e3 for p in some]
            axes.scatter(
                [p["density"] for p in some], heights, color=shade, marker=mark, s=20, label=f"{name}, {family}"
            )
        axes.plot((0, 1), [1e3 * (fit["intercept"] + fit["slope"] * x) for x in (0, 1)], color=shade, lw=1)
    axes.set(xlabel="share of tiles that is kept", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=7)


def _bytes(points: Rows, fits: dict[str, Any]) -> Panel:
    says = listed(
        f"{which} {human(fits[f'bytes {which}']['slope'], 'B')} for all tiles beside "
        f"{human(fits[f'bytes {which}']['intercept'], 'B')} that no pattern saves"
        for which in PASSES
    )

    def draw(axes: Any) -> None:
        for which in PASSES:
            at = sorted((p["density"], p["bytes"][which] / 1e6) for p in points)
            look = {"color": picture.colour(which), "marker": picture.marker(which)}
            axes.plot([x for x, _ in at], [y for _, y in at], lw=1, label=which, **look)
        axes.set(xlabel="share of tiles that is kept", ylabel="MB loaded and stored", xlim=(0, None), ylim=(0, None))
        axes.legend()

    alt = "Straight lines: counted MB, forward and backward, against the share of tiles kept."
    return Panel("bytes", "counted bytes against density", alt, sentence(says), draw, plot=13)
