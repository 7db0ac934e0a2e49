"""The page: one HTML file that needs nothing else, and its pictures."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.report import picture
from tilewise.report.kinds import PLOTS
from tilewise.report.pieces import Panel
from tilewise.report.results import Result, Unused

TEMPLATE = Path(__file__).with_name("page.html")
LONG = 12  # rows; longer tables are folded
Draw = Callable[[Panel], bytes]


@dataclass(frozen=True)
class Page:
    """The page and its pictures, by file name."""

    text: str
    pictures: dict[str, bytes]


def build(results: Sequence[Result], unused: Sequence[Unused], draw: Draw = picture.png) -> Page:
    """Draw every panel and write the page around them.

    Args:
        results, unused: as `results.read` found them.
        draw: makes a PNG of a panel; a test that needs words alone gives another.
    """
    pictures = {file_of(r, panel): draw(panel) for r in results for panel in r.section.panels}
    return Page(_text(results, unused, pictures), pictures)


def file_of(result: Result, panel: Panel) -> str:
    """The file name of a picture."""
    return f"{slug(result.name)}-{slug(panel.name)}.png"


def slug(text: str) -> str:
    """Letters, digits and hyphens: for names of files and anchors."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def plots(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The list of plots: for each, the results that have it, or the command that makes its data."""
    found = []
    for plot in PLOTS:
        having = [r for r in results if any(panel.plot == plot.number for panel in r.section.panels)]
        found.append({"number": plot.number, "title": plot.title, "command": plot.command, "results": having})
    return found


def _text(results: Sequence[Result], unused: Sequence[Unused], pictures: dict[str, bytes]) -> str:
    import jinja2  # noqa: PLC0415  only the report pays

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"slug": slug, "data_uri": lambda name: _data_uri(pictures[name])}
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(
        results=results,
        unused=unused,
        plots=plots(results),
        machines=_machines(results),
        file_of=file_of,
        long=LONG,
        numbered={plot.number: plot.title for plot in PLOTS},
    )


def _machines(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by processor, versions and day."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(f"{result.where}: {result.versions}", []).append(result)
    return found


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
