"""Panels as pictures: one colour and marker for each name everywhere, and PNG files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.page import human
from tilewise.report.pieces import Panel, digits

#: Colours and markers by who is drawn: systems of the lab, peers, passes.
LOOKS = {
    "tilewise": ("#2a6f97", "o"),
    "standard": ("#d1495b", "s"),
    "flash1": ("#e08e1b", "^"),
    "flash2": ("#2a6f97", "o"),
    "flash3": ("#3b8f5a", "D"),
    "checkpointed": ("#c47f93", "v"),
    "recompute": ("#8d6a9f", "P"),
    "recompute-rows": ("#9a6324", "X"),
    "recompute-tiles": ("#4aa3a2", "D"),
    "triton": ("#8d6a9f", "P"),
    "sdpa": ("#6c757d", "v"),
    "flash": ("#e08e1b", "^"),
    "cudnn": ("#3b8f5a", "D"),
    "flex": ("#9a6324", "X"),
    "eager": ("#d1495b", "s"),
    "forward": ("#2a6f97", "o"),
    "backward": ("#d1495b", "s"),
}
SPARE = ("#30323d", "#c08497", "#5c7c2f", "#1d9bb2", "#7a4419", "#a23e48")
GREY = "#8a8f98"
WIDTH, DPI = 5.2, 160  # inches: letters are legible where 360 pixels are all there is
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "legend.fontsize": 8,
    "legend.framealpha": 0.85,
    "lines.markersize": 5,
}


def colour(name: str, at: int = 0) -> str:
    """The colour of a name; of one that has none, a spare one by position."""
    return LOOKS[name][0] if name in LOOKS else SPARE[at % len(SPARE)]


def marker(name: str) -> str:
    return LOOKS[name][1] if name in LOOKS else "o"


def png(panel: Panel) -> bytes:
    """One panel as a PNG file of at most 256 colours."""
    from matplotlib.figure import Figure  # noqa: PLC0415  half a second that only pictures pay

    figure = Figure(figsize=(WIDTH, panel.height), layout="constrained")
    with _style():
        _draw(figure.subplots(), panel)
        return _encode(figure)


def save(panels: Sequence[Panel], path: Path, heading: str) -> None:
    """All panels side by side in one file, in rows of three; its suffix is its format."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    height = max(panel.height for panel in panels)
    figure = Figure(figsize=(WIDTH * columns, height * rows + 0.4), layout="constrained")
    with _style():
        spots = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in spots:
            axes.set_axis_off()
        for axes, panel in zip(spots, panels):
            axes.set_axis_on()
            _draw(axes, panel)
        figure.suptitle(textwrap.fill(heading, 62 * columns), fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _style() -> Any:
    import matplotlib as mpl  # noqa: PLC0415

    return mpl.rc_context(STYLE)


def _draw(axes: Any, panel: Panel) -> None:
    panel.draw(axes)
    axes.set_title(panel.title, loc="left")


def _encode(figure: Any) -> bytes:
    from PIL import Image  # noqa: PLC0415  matplotlib brings it

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format="png")
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


# ---- what several sections draw ----


def bars(axes: Any, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Groups of horizontal bars, the first on top, each with its number; NaN is a bar that is not there."""
    height = 0.8 / len(series)
    for at, (name, values) in enumerate(series.items()):
        places = [i + height * (at - (len(series) - 1) / 2) for i in range(len(labels))]
        drawn = axes.barh(places, [value if value == value else 0 for value in values], height * 0.92)
        for bar in drawn:
            bar.set_color(colour(name, at))
        drawn.set_label(name)
        texts = [digits(value) if value == value else "none" for value in values]
        axes.bar_label(drawn, texts, padding=2, fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.14)
    axes.set_xlabel(unit)
    if len(series) > 1:  # below, where it hides no bar
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.58 / axes.figure.get_figheight()),
            ncols=len(series),
            frameon=False,
        )


def lengths(axes: Any, ns: Sequence[int]) -> None:
    """A logarithmic axis of sequence lengths, marked at (some of) these."""
    axes.set_xscale("log", base=2)
    shown = list(ns)[:: -(-len(ns) // 7)] if ns else []
    axes.set_xticks(shown, [_short(n) for n in shown])
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")


def sizes(axis: Any, lowest: float, highest: float) -> None:
    """A logarithmic axis of bytes (`axes.xaxis` or `axes.yaxis`), marked in binary units."""
    scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    scale("log", base=2)
    step = 5 if highest > 2**12 * lowest else 2
    ticks = [2**power for power in range(0, 80, step) if lowest <= 2**power <= highest]
    axis.set_ticks(ticks, [human(size, "B").replace(".0", "") for size in ticks])
    axis.set_ticks([], minor=True)
    axis.set_label_text("bytes")


def _short(n: int) -> str:
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return f"{n:,}"
