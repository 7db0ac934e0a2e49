"""`explain`: what `attention` would do with a call, without running it."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import api, dispatch
from tilewise.call import Call, dense_call, packed_call, problem_of
from tilewise.cost import Cost, cost
from tilewise.plan import BLOCK, FULL, MASKED, SKIPPED, TilePlan, tile_plan
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

    def __rich__(self):
        return _page().render(self)

    def __str__(self) -> str:
        return _page().text(self)


def _page() -> Any:
    """The module that draws explanations, with rich, which `import tilewise` does not need."""
    return importlib.import_module("tilewise.page")


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
    call, backend = call_of(q, k, v, options)
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


def call_of(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Call, str | None]:
    """A call described but not run, and the backend that it or the program asks for; `options` as in `explain`."""
    packed = "cu_seqlens_q" in options
    given = inspect.signature(api.attention_varlen if packed else api.attention).bind(q, k, v, **options)
    given.apply_defaults()
    arguments = dict(given.arguments)
    backend = arguments.pop("backend")
    del arguments["return_lse"]
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


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
