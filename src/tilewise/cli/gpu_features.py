"""`tilewise bench --features`: what each feature costs on a GPU, over the plain causal kernel's time and beside rivals."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import tilewise
from tilewise import testing
from tilewise.cli import gpu_rivals, measure
from tilewise.cli.gpu import OURS, PASSES, burst
from tilewise.cli.output import console, short, stderr, table

DEVICE = "cuda"
HEADS, KV_HEADS, D = 16, 4, 128
LENGTH = 8192
SHARES = (4, 2, 1, 3, 2, 1, 2, 1)  # sixteenths of the tokens in each document
WINDOW, WINDOWED = 1024, 16384
CHECKED = 384  # tokens of the problem on which a feature is compared with the reference: the same kernels run
PLAIN = "causal"

Options = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Args:
        name: its first column.
        make: keyword arguments of the call for S tokens and H heads.
        kv_heads: key/value heads; None is as many as heads.
        trained: arguments that get gradients, too.
        over: the feature that it is compared with.
        rivals: who else computes it, of `gpu_rivals.RIVALS`.
    """

    name: str
    make: Callable[[int, int], Options]
    kv_heads: int | None = None
    trained: tuple[str, ...] = ()
    over: str = PLAIN
    rivals: tuple[str, ...] = ("flex",)

    def call(self, S: int, heads: int, dtype: torch.dtype) -> testing.Inputs:
        """The tensors of one call, packed where the feature is."""
        g = torch.Generator(DEVICE).manual_seed(0)
        options = self.make(S, heads)
        kv = min(self.kv_heads or heads, heads)
        batch = () if "cu_seqlens_q" in options else (1,)
        q, k, v, do = (
            torch.randn(*batch, S, h, D, generator=g, device=DEVICE).to(dtype) for h in (heads, kv, kv, heads)
        )
        return testing.Inputs(q, k, v, options, do=do, needs=("q", "k", "v", *self.trained))


def _causal(_S: int, _H: int) -> Options:
    return {"causal": True}


def _bias(S: int, H: int) -> Options:
    return {"causal": True, "bias": torch.randn(1, H, S, S, device=DEVICE, dtype=torch.bfloat16)}


def _alibi(_S: int, H: int) -> Options:
    return {"causal": True, "alibi_slopes": torch.linspace(0.5, 0.01, H, device=DEVICE)}


def _ends(S: int) -> Tensor:
    return torch.tensor(
        [0, *itertools.accumulate(share * S // 16 for share in SHARES)], device=DEVICE, dtype=torch.int32
    )


def _documents(S: int, _H: int) -> Options:
    return {"causal": True, "mask": tilewise.Document.from_cu_seqlens(_ends(S))}


def _packed(S: int, _H: int) -> Options:
    longest = max(SHARES) * S // 16
    return {"causal": True, "cu_seqlens_q": _ends(S), "max_seqlen_q": longest, "max_seqlen_k": longest}


def _blocks(S: int, _H: int) -> Options:
    pattern = tilewise.Blocks.butterfly(S, S)
    return {"causal": True, "mask": tilewise.Blocks(pattern.pattern.to(DEVICE), pattern.block_m, pattern.block_n)}


FEATURES = (
    Feature(PLAIN, _causal, rivals=("flash", "cudnn", "flex")),
    Feature("GQA 4 to 1", _causal, kv_heads=KV_HEADS, rivals=("flash", "cudnn", "flex")),
    Feature("dropout", lambda S, H: {"causal": True, "dropout_p": 0.1}, rivals=("flash", "cudnn")),
    Feature("softcap", lambda S, H: {"causal": True, "softcap": 30.0}),
    Feature("ALiBi", _alibi),
    Feature("ALiBi, slopes trained", _alibi, trained=("alibi_slopes",), rivals=()),
    Feature(
        "sinks", lambda S, H: {"causal": True, "sinks": torch.zeros(H, device=DEVICE)}, trained=("sinks",), rivals=()
    ),
    Feature("bias", _bias),
    Feature("bias, its gradient", _bias, trained=("bias",), rivals=()),
    Feature("documents", _documents),
    Feature("packed (varlen)", _packed, rivals=("varlen",)),
    Feature("block-sparse", _blocks),
)
WINDOWS = (
    Feature(PLAIN, _causal, rivals=("flash", "cudnn", "flex")),
    Feature(f"window ({WINDOW}, 0)", lambda S, H: {"window_size": (WINDOW, 0)}, rivals=("varlen", "flex")),
    Feature("full", lambda S, H: {}, over="full", rivals=()),
    Feature(
        f"window ({WINDOW // 2}, {WINDOW // 2})",
        lambda S, H: {"window_size": (WINDOW // 2,) * 2},
        over="full",
        rivals=("varlen", "flex"),
    ),
)
SETS = ((FEATURES, LENGTH), (WINDOWS, WINDOWED))


def bench(
    dtypes: Sequence[torch.dtype],
    rounds: int,
    backend: str | None,
    workers: int,
    on_part: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Check and time every feature; prints tables, returns what the JSON holds.

    Args:
        dtypes: of q, k and v.
        rounds: timings of each pass of each feature.
        backend: by name; None is what dispatch chooses for each.
        workers: processes that compile and check, before any timing.
        on_part: given as much as there is after each table.
    """
    data: dict[str, Any] = {"heads": HEADS, "D": D, "rounds": rounds, "refused": [], "results": []}
    names = list(dict.fromkeys(feature.name for features, _ in SETS for feature in features))
    with tilewise.use_backend(backend) if backend else nullcontext():
        for dtype in dtypes:
            with stderr.status("Compiling and checking"):
                wrong = _check_all(names, dtype, backend, workers)
            data["refused"] += [f"{name} {short(dtype)}: {complaint}" for name, complaint in wrong.items()]
            for features, S in SETS:
                rows = _measure([feature for feature in features if feature.name not in wrong], S, dtype, rounds)
                data["results"] += rows
                on_part(data)
                _show(rows, f"{HEADS} heads of {D}, {S:,} tokens, {short(dtype)}")
    for refused in data["refused"]:
        stderr.print(f"refused: {refused}", style="bold red", markup=False)
    return data


def _check_all(names: Sequence[str], dtype: torch.dtype, backend: str | None, workers: int) -> dict[str, str]:
    """What is wrong with which features."""
    complaints = measure.in_processes(_complaint, [(name, dtype, backend) for name in names], workers)
    return {name: complaint for name, complaint in zip(names, complaints, strict=True) if complaint}


def _complaint(name: str, dtype: torch.dtype, backend: str | None) -> str:
    """What is wrong with one feature's outputs or gradients, by the rule of `tilewise.testing`; "" if nothing.

    What its rivals compile lies in a cache on disk after this, too.
    """
    torch.set_num_threads(1)
    feature = next(feature for features, _ in SETS for feature in features if feature.name == name)
    try:
        for features, S in SETS:
            for one in features:
                if one.name == name:
                    for call in _contestants(one, S, dtype)[0].values():
                        call["backward"]()
        testing.assert_matches_reference(feature.call(CHECKED, HEADS, dtype), backend=backend)
    except AssertionError as error:
        return str(error)
    except Exception as error:  # whatever a kernel's compiler throws: the other features are still timed
        return measure.first_line(error)
    return ""


def _measure(features: Sequence[Feature], S: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Seconds of every feature and its rivals, in turns; one row of data each."""
    calls: dict[tuple[str, str], dict[str, Callable[[], Any]]] = {}
    missing = {}
    for feature in features:
        found, missing[feature.name] = _contestants(feature, S, dtype)
        calls |= {(feature.name, who): passes for who, passes in found.items()}
    seconds: dict[tuple[str, str, str], list[float]] = {}
    order = [(*key, which) for which in PASSES for key in calls]
    for i in track(range(rounds), f"{S} tokens", console=stderr, transient=True, disable=not stderr.is_terminal):
        for name, who, which in order[:: 1 if i % 2 == 0 else -1]:
            seconds.setdefault((name, who, which), []).append(burst(calls[name, who][which]))
    rows = []
    for feature in features:
        row: dict[str, Any] = {"feature": feature.name, "S": S, "dtype": short(dtype), "over": feature.over}
        row |= {"flops": HEADS * _flops_of_a_head(feature, S, dtype), "missing": missing[feature.name]}
        for which in PASSES:
            found = {who: seconds[feature.name, who, which] for name, who in calls if name == feature.name}
            row[which] = {
                "seconds": statistics.median(found[OURS]),
                "rounds": found.pop(OURS),
                "rivals": {who: statistics.median(times) for who, times in found.items()},
            }
        rows.append(row)
    named = {row["feature"]: row for row in rows}
    for row in rows:
        base = named.get(row["over"], row)
        row["flops_share"] = row["flops"] / base["flops"]
        for which in PASSES:
            row[which]["times"] = row[which]["seconds"] / base[which]["seconds"]
            row[which]["times_per_flop"] = row[which]["times"] / row["flops_share"]
    return rows


def _contestants(feature: Feature, S: int, dtype: torch.dtype) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Both passes of ours and of each rival that can, on the same tensors; what is the matter with the other rivals."""
    inputs = feature.call(S, HEADS, dtype)
    leaves = [t.requires_grad_() for name, t in inputs.tensors().items() if name in (inputs.needs or ())]
    attend = tilewise.attention_varlen if inputs.varlen else tilewise.attention
    with torch.no_grad():
        o = attend(inputs.q, inputs.k, inputs.v, **inputs.options)
    attends, missing = gpu_rivals.able(feature.rivals, inputs, o)
    found = {OURS: _passes(lambda q, k, v: attend(q, k, v, **inputs.options), inputs, leaves)}
    return found | {who: _passes(rival, inputs, leaves[:3]) for who, rival in attends.items()}, missing


def _passes(attend: gpu_rivals.Attend, inputs: testing.Inputs, leaves: list[Tensor]) -> dict[str, Callable[[], Any]]:
    do, _ = inputs.upstream()
    o = attend(inputs.q, inputs.k, inputs.v)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(inputs.q, inputs.k, inputs.v)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)}


def _flops_of_a_head(feature: Feature, S: int, dtype: torch.dtype) -> int:
    """Forward, of visible pairs: what the masks of the call leave to compute."""
    inputs = feature.call(S, 1, dtype)
    masks = ("causal", "window_size", "mask", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")
    options = {name: value for name, value in inputs.options.items() if name in masks}
    return tilewise.explain(inputs.q, inputs.k, inputs.v, **options).cost.forward.flops


def _show(rows: Sequence[dict[str, Any]], title: str) -> None:
    columns = ["feature", "FLOPs"]
    columns += [f"{which}\n{what}" for which in PASSES for what in ("ms", "times", "per FLOP", "over the best rival")]
    lines = []
    for row in rows:
        cells = [row["feature"], f"{100 * row['flops_share']:.1f}%"]
        for which in PASSES:
            cells.append(f"{row[which]['seconds'] * 1e3:.3f}")
            cells += [f"{row[which][what]:.2f}x" for what in ("times", "times_per_flop")]
            cells.append(over_best(row[which]))
        lines.append(cells)
    console.print(
        table(f"Time over the plain causal kernel's (windows: over the same without). {title}", columns, lines)
    )


def over_best(times: dict[str, Any]) -> str:
    """How many times faster than the fastest rival, and which that is; "" without one."""
    if not times["rivals"]:
        return ""
    best = min(times["rivals"], key=times["rivals"].get)
    return f"{best} {times['rivals'][best] / times['seconds']:.2f}x"
