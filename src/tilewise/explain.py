"""`explain`: what `attention` would do with a call, without running it."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tilewise import api, dispatch
from tilewise.backends.base import FEATURES
from tilewise.call import Call, dense_call, packed_call, problem_of
from tilewise.cost import BLOCK, FULL, MASKED, SKIPPED, Cost, TilePlan, cost, tile_plan
from tilewise.problem import Problem

PICTURE = {SKIPPED: "·", MASKED: "▒", FULL: "█"}
LEGEND = "█ every row sees every key   ▒ needs the mask   · skipped"


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a call is, who takes it and what it costs. Prints as a page; `to_json` gives the same as data."""

    problem: Problem
    backend: str | None  # None: no backend takes the call
    refusals: dict[str, list[str]]  # every reason of each backend asked that cannot
    plan: TilePlan | None  # of one sequence and head; None for an empty batch
    cost: Cost

    @property
    def features(self) -> tuple[str, ...]:
        return self.problem.features

    def to_dict(self) -> dict[str, Any]:
        """Plain values: sizes, backend, reasons, tiles (a picture of at most 256 x 256 characters), FLOPs and bytes."""
        p = self.problem
        sizes = {name: getattr(p, name) for name in ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv", "total_q", "total_k")}
        plan = self.plan
        return {
            "problem": sizes | {"dtype": str(p.dtype).removeprefix("torch."), "device": p.device},
            "backend": self.backend,
            "refusals": self.refusals,
            "features": list(self.features),
            "tile_plan": plan and {"block_m": plan.block_m, "block_n": plan.block_n, "rows": picture(plan, 256)},
            "cost": _plain(asdict(self.cost)),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __rich__(self) -> RenderableType:
        return Group(self._summary(), *self._picture(), _account(self.cost))

    def __str__(self) -> str:
        page = io.StringIO()
        Console(file=page, width=100, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in page.getvalue().splitlines())

    def _summary(self) -> Table:
        p = self.problem
        grid = Table.grid(padding=(0, 2))
        heads = f"{p.H} heads" if p.G == 1 else f"{p.H} query heads on {p.Hkv} kv heads"
        dims = f"head dim {p.D}" if p.D == p.Dv else f"head dims {p.D} (q, k) and {p.Dv} (v)"
        batch = f"{p.B} packed sequences of at most" if p.spec.varlen else f"batch {p.B},"
        dtype = str(p.dtype).removeprefix("torch.")
        grid.add_row("call", f"{batch} {p.Sq} queries x {p.Sk} keys, {heads}, {dims}, {dtype} on {p.device}")
        grid.add_row("features", ", ".join(FEATURES[f] for f in self.features) or "none beyond plain attention")
        grid.add_row("backend", self.backend or Text("none can take this call", style="bold red"))
        for name, reasons in self.refusals.items():
            grid.add_row(f"  not {name}", "; ".join(reasons))
        tiles = self.cost.tiles
        blocks = f"{self.plan.block_m} rows x {self.plan.block_n} keys" if self.plan else "none"
        counts = f"{tiles.full:,} full, {tiles.masked:,} masked, {tiles.skipped:,} skipped over all heads and sequences"
        grid.add_row("tiles", f"{blocks}: {counts}")
        return grid

    def _picture(self) -> list[RenderableType]:
        if self.plan is None:
            return []
        return [Text(line) for line in ("", *picture(self.plan), LEGEND, "")]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_m: int = BLOCK,
    block_n: int = BLOCK,
    b: int = 0,
    h: int = 0,
    **options: Any,
) -> Explanation:
    """Say which backend would take a call and why the others would not, which tiles it visits and what it costs.

    Args:
        q, k, v: as in `attention`; only shapes, dtypes and devices are read, nothing is computed.
        block_m, block_n: tile size of the account; `Blocks` and `Dense` masks bring their own.
        b, h: the sequence and head whose tiles are shown.
        options: the keyword arguments of `attention`, or with ``cu_seqlens_q`` those of `attention_varlen`.

    Raises:
        TypeError, ValueError: as in `attention`. A call that no backend takes is explained, not raised.

    Example:
        >>> import torch, tilewise
        >>> q = k = v = torch.randn(1, 256, 4, 64)
        >>> e = tilewise.explain(q, k, v, causal=True)
        >>> e.backend, e.cost.tiles
        ('cpu', Tiles(full=4, masked=8, skipped=4))
    """
    call, backend = _call(q, k, v, options)
    problem = problem_of(call.signatures, call.spec, call.max_q, call.max_k)
    if not 0 <= b < max(problem.B, 1) or not 0 <= h < problem.H:
        raise ValueError(f"b and h must be in 0..{problem.B - 1} and 0..{problem.H - 1}, got {b} and {h}")
    aux = [t.cpu() for t in call.aux]
    bound = call.spec.bind(aux, call.scale)
    plan = None
    if problem.B:
        sizes = {"max_q": call.max_q, "max_k": call.max_k}
        plan = tile_plan(bound, call.q.shape, call.k.shape, block_m, block_n, **sizes, b=b, h=h)
    chosen, refusals = _choose(problem, backend)
    return Explanation(problem, chosen, refusals, plan, cost(problem, bound, aux, block_m, block_n))


def picture(plan: TilePlan, width: int = 64) -> list[str]:
    """The tiles as lines of text, several per character where there are more than `width`."""
    step = max(-(-max(plan.grid.shape) // width), 1)
    lowest, highest = (_pool(plan.grid, step, pick) for pick in (torch.amin, torch.amax))
    cells = torch.where(lowest == highest, lowest, MASKED)
    return ["".join(PICTURE[cell] for cell in row) for row in cells.tolist()]


def _pool(grid: Tensor, step: int, pick: Callable[..., Tensor]) -> Tensor:
    """The least or greatest kind in each `step` x `step` square."""
    rows = [pick(part, dim=0) for part in grid.split(step)]
    columns = torch.stack(rows) if rows else grid
    return torch.stack([pick(part, dim=1) for part in columns.split(step, dim=1)], dim=1) if grid.numel() else grid


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


def _call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Call, str | None]:
    packed = "cu_seqlens_q" in options
    given = inspect.signature(api.attention_varlen if packed else api.attention).bind(q, k, v, **options)
    given.apply_defaults()
    arguments = dict(given.arguments)
    backend = arguments.pop("backend")
    del arguments["return_lse"], arguments["return_max_logit"]
    # A generator of its own: explaining a call with dropout must not change what the call will draw.
    arguments["generator"] = torch.Generator()
    return (packed_call if packed else dense_call)(**arguments), backend or dispatch.preferred()


def _choose(problem: Problem, backend: str | None) -> tuple[str | None, dict[str, list[str]]]:
    rows = dispatch.BACKENDS if backend is None else (dispatch.capabilities(backend),)
    refusals = {row.name: list(row.why_not(problem)) for row in rows}
    try:
        chosen = dispatch.select(problem, backend)
    except dispatch.NoBackendError:
        chosen = None
    return chosen, {name: reasons for name, reasons in refusals.items() if reasons and name != chosen}


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


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
