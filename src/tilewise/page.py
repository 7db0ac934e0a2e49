"""How an explanation looks: a page of text, drawn with rich."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewise.backends.base import FEATURES
from tilewise.cost import Cost
from tilewise.explain import LEGEND, Explanation, picture


def render(explained: Explanation) -> RenderableType:
    """The call, its backend, its tiles and its cost, for a rich console."""
    return Group(_summary(explained), *_picture(explained), _account(explained.cost))


def text(explained: Explanation) -> str:
    """The same as plain text, 100 characters wide."""
    page = io.StringIO()
    Console(file=page, width=100, color_system=None).print(render(explained))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def human(value: float, unit: str) -> str:
    """A number with its unit and a decimal prefix, for bytes a binary one: ``human(2048, "B") == "2.0 KiB"``."""
    base, prefixes = (
        (1024.0, ("", "Ki", "Mi", "Gi", "Ti", "Pi")) if unit == "B" else (1e3, ("", "k", "M", "G", "T", "P"))
    )
    power = 0
    while abs(value) >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    digits = 1 if power and abs(value) < 100 else 0
    return f"{value:,.{digits}f} {prefixes[power]}{unit}"


def _summary(explained: Explanation) -> Table:
    p = explained.problem
    grid = Table.grid(padding=(0, 2))
    heads = f"{p.H} heads" if p.G == 1 else f"{p.H} query heads on {p.Hkv} kv heads"
    dims = f"head dim {p.D}" if p.D == p.Dv else f"head dims {p.D} (q, k) and {p.Dv} (v)"
    batch = f"{p.B} packed sequences of at most" if p.spec.varlen else f"batch {p.B},"
    dtype = str(p.dtype).removeprefix("torch.")
    grid.add_row("call", f"{batch} {p.Sq} queries x {p.Sk} keys, {heads}, {dims}, {dtype} on {p.device}")
    grid.add_row("features", ", ".join(FEATURES[f] for f in explained.features) or "none beyond plain attention")
    grid.add_row("backend", explained.backend or Text("none can take this call", style="bold red"))
    for name, reasons in explained.refusals.items():
        grid.add_row(f"  not {name}", "; ".join(reasons))
    tiles = explained.cost.tiles
    blocks = f"{explained.plan.block_m} rows x {explained.plan.block_n} keys" if explained.plan else "none"
    counts = f"{tiles.full:,} full, {tiles.masked:,} masked, {tiles.skipped:,} skipped over all heads and sequences"
    grid.add_row("tiles", f"{blocks}: {counts}")
    return grid


def _picture(explained: Explanation) -> list[RenderableType]:
    if explained.plan is None:
        return []
    return [Text(line) for line in ("", *picture(explained.plan), LEGEND, "")]


def _account(found: Cost) -> Table:
    table = Table(title="what it costs", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("tilewise", justify="right")
    table.add_column("standard attention", justify="right")
    for name in ("forward", "backward"):
        ours, theirs = getattr(found, name), getattr(found, f"standard_{name}")
        table.add_row(f"{name} FLOPs (of visible pairs)", human(ours.flops, "FLOP"), human(theirs.flops, "FLOP"))
        table.add_row("  computed", human(ours.visited_flops, "FLOP"), human(theirs.visited_flops, "FLOP"))
        for what in ("read", "written"):
            key = f"bytes_{what}"
            table.add_row(f"  {what}", human(getattr(ours, key), "B"), human(getattr(theirs, key), "B"))
        table.add_row("  FLOPs per byte", f"{ours.intensity:.1f}", f"{theirs.intensity:.1f}")
    for label, key in (
        ("saved for backward", "saved"),
        ("peak beyond outputs, forward", "peak_forward"),
        ("peak beyond outputs and gradients, backward", "peak_backward"),
    ):
        ours, theirs = getattr(found.memory, key), getattr(found.standard_memory, key)
        table.add_row(label, human(ours, "B"), human(theirs, "B"))
    return table
