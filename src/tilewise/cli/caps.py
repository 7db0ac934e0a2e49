"""`tilewise caps`: the capability table that dispatch itself reads."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilewise.backends.base import FEATURES, Capabilities
from tilewise.cli.output import JsonFile, console, table, write_json
from tilewise.dispatch import BACKENDS


def caps(
    json: JsonFile = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the Markdown table of README.md and docs/capabilities.md.")
    ] = False,
) -> None:
    """Show which backend can do what, and whether it can run here.

    Example: `tilewise caps`, or `tilewise caps --markdown > table.md`
    """
    if markdown:
        typer.echo(markdown_table())
    else:
        shown = table("What each backend can do", ["", *(c.name for c in BACKENDS)], _rows(), left=1 + len(BACKENDS))
        console.print(shown)
        for row in BACKENDS:
            reason = row.requires()
            console.print(f"{row.name} runs here: {'yes' if reason is None else f'no: {reason}'}")
    write_json(json, "caps", {"backends": [_plain(row) for row in BACKENDS]})


def markdown_table() -> str:
    """The table as Markdown: only what holds on every machine, so that documents can embed it."""
    lines = ["| | " + " | ".join(c.name for c in BACKENDS) + " |", "|---|" + "---|" * len(BACKENDS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows()]
    return "\n".join(lines)


def _rows() -> list[list[str]]:
    rows = [
        ["hardware", *(c.title for c in BACKENDS)],
        ["tensors on", *(c.device for c in BACKENDS)],
        ["dtypes", *(", ".join(_dtypes(c)) for c in BACKENDS)],
        ["head dims", *(f"1 to {c.max_head_dim}" for c in BACKENDS)],
    ]
    return rows + [[words, *("yes" if f in c.features else "no" for c in BACKENDS)] for f, words in FEATURES.items()]


def _dtypes(row: Capabilities) -> list[str]:
    return [str(d).removeprefix("torch.") for d in row.dtypes]


def _plain(row: Capabilities) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "device": row.device,
        "dtypes": _dtypes(row),
        "max_head_dim": row.max_head_dim,
        "features": {f: f in row.features for f in FEATURES},
        "why_not_here": row.requires(),
    }
