"""`tilewise report`: one page of pictures, tables and sentences from the JSON files of the other commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.output import FAILED, JsonFile, console, fail, require, stderr, table, write_json
from tilewise.report import html
from tilewise.report.results import Result, Unused, files, read

RESULTS = Path("benchmarks/results")
PAGE = "index.html"


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON files, or folders of them.", show_default=str(RESULTS)),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")] = Path("report"),
    json: JsonFile = None,
) -> None:
    """Make one page of what commands stored with `--json`: pictures, tables, and a sentence with numbers under each.

    Knows the files of `bench` (CPU, GPU, `--features`), `memory`, `lab compare | errors | generations | sparsity | memory`,
    `io` (and `--measure`), `fit`, `compare` and of `make test-gpu`. The page, index.html, holds its pictures, so it can be
    sent alone and opened without a network, on a phone too; the PNG files lie beside it. Files that are not drawn are named
    with the reason, on the page and here; one that is broken makes this command fail after it has written the rest. Plots
    that the papers' claims ask for and that have no data are named with the command that makes it.

    Example: `tilewise report benchmarks/results/lab-compare-cpu-zen3.json benchmarks/results/memory-cpu.json -o report`
    """
    require("matplotlib", "report", "plot")
    require("jinja2", "report", "plot")
    found, unused = read(files(results or [RESULTS]))
    for name, count in Counter(html.slug(r.name) for r in found).items():
        if count > 1:
            raise ValueError(f"{count} files are called {name}: give them names of their own")
    with stderr.status("Drawing"):
        page = html.build(found, unused)
    output.mkdir(parents=True, exist_ok=True)
    (output / PAGE).write_text(page.text)
    for name, png in page.pictures.items():
        (output / name).write_bytes(png)
    _show(found, unused, page)
    console.print(f"wrote {output / PAGE} and {len(page.pictures)} pictures")
    write_json(json, "report", _data(found, unused, output))
    if broken := [one for one in unused if one.broken]:
        fail(f"broken: {', '.join(str(one.path) for one in broken)}", FAILED)


def _show(found: Sequence[Result], unused: Sequence[Unused], page: html.Page) -> None:
    rows = []
    for r in found:
        numbers = sorted({panel.plot for panel in r.section.panels if panel.plot})
        rows.append((r.path.name, r.kind.title, len(r.section.panels), ", ".join(map(str, numbers)) or "-"))
    if rows:
        title = f"{len(found)} results, {len(page.pictures)} pictures, {len(page.text) / 1e6:.1f} MB"
        console.print(table(title, ["file", "what", "pictures", "plots"], rows, left=2))
    for plot in html.plots(found):
        if not plot["results"]:
            makes = plot["command"] or "no command makes it yet"
            console.print(f"plot {plot['number']}, {plot['title']}: no data; {makes}")
    for one in unused:
        stderr.print(f"not drawn: {one.path}: {one.reason}", markup=False)


def _data(found: Sequence[Result], unused: Sequence[Unused], output: Path) -> dict[str, Any]:
    return {
        "page": str(output / PAGE),
        "results": [
            {
                "file": str(r.path),
                "what": r.kind.title,
                "of": f"{r.where}; {r.versions}",
                "pictures": {html.file_of(r, panel): panel.says for panel in r.section.panels},
            }
            for r in found
        ],
        "plots": {
            plot["number"]: {
                "title": plot["title"],
                "files": [str(r.path) for r in plot["results"]],
                "command": plot["command"],
            }
            for plot in html.plots(found)
        },
        "not_drawn": [{"file": str(one.path), "reason": one.reason, "broken": one.broken} for one in unused],
    }
