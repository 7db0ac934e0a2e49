"""`tilewise lab errors`: how far each system is from float64, on ordinary inputs and on those made to hurt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from tilewise import Causal
from tilewise.cli import gpu
from tilewise.cli.lab_common import (
    Attend,
    Batch,
    Device,
    Dim,
    Dtype,
    Heads,
    Rounds,
    System,
    chosen,
    clock,
    draw,
    dtype_for,
    time_passes,
)
from tilewise.cli.measure import Samples
from tilewise.cli.output import JsonFile, console, short, stderr, table, write_json
from tilewise.cli.problems import Shape, sdpa
from tilewise.dense import dense
from tilewise.testing import Inputs

TENSORS = ("o", "dq", "dk", "dv")
OUTLIERS, OUTLIER_STD = 1e-3, 10.0  # FlashAttention-3, section 4.3: N(0, 1) + N(0, 100) Bernoulli(0.001)
RISE = 6.0 / 128  # of a score from key to key: more than 2^8 over a tile of 128, so that no rescaling can be put off


def _normal(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _outliers(tensors: list[Tensor]) -> list[Tensor]:
    """q, k and v with rare large values."""
    g = torch.Generator(tensors[0].device).manual_seed(1)

    def spoiled(t: Tensor) -> Tensor:
        large = OUTLIER_STD * torch.randn(t.shape, generator=g, device=t.device)
        rare = torch.rand(t.shape, generator=g, device=t.device) < OUTLIERS
        return (t.float() + large * rare).to(t.dtype)

    return [*map(spoiled, tensors[:3]), tensors[3]]


def _rising(tensors: list[Tensor]) -> list[Tensor]:
    """Every key's score is larger than those before it: each tile raises every row's maximum."""
    q, k, v, do = (t.clone() for t in tensors)
    q[..., 0] = q.shape[-1] ** 0.5
    k[..., 0] = (RISE * torch.arange(k.shape[1], device=k.device))[None, :, None]
    return [q, k, v, do]


INPUTS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "normal": _normal,
    "outliers": _outliers,
    "rising": _rising,
}


def errors(
    length: Annotated[int, typer.Option("--length", "-n", min=1, help="Rows and keys.")] = 1024,
    dim: Dim = 64,
    heads: Heads = 4,
    batch: Batch = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")] = False,
    dtype: Dtype = None,
    device: Device = "cpu",
    system: System = None,
    rounds: Rounds = 3,
    json: JsonFile = None,
) -> None:
    """Measure errors against float64, and whether hard inputs cost time.

    Three kinds of inputs: normal ones; "outliers", N(0, 1) + N(0, 100) * Bernoulli(0.001) as in FlashAttention-3, section
    4.3; and "rising", where each key scores higher than the last, so that every tile raises every row's maximum and all
    sums so far are rescaled. The error is the root of the mean square over all elements, of o and of each gradient.
    PyTorch's own attention (on a GPU its flash and cudnn kernels) stands beside the systems.

    Example: `tilewise lab errors --length 2048 --dim 128 --causal --json errors.json`
    """
    kind = dtype_for(dtype, device)
    mask = Causal() if causal else None
    attends: dict[str, Attend] = {
        s.name: lambda q, k, v, s=s: s(q, k, v, mask) for s in chosen(system, device)
    } | _pytorch(Shape(batch, heads, heads, length, dim, causal), device)
    results = []
    for inputs, change in INPUTS.items():
        tensors = change(draw(batch, length, heads, dim, kind, device))
        with stderr.status(f"Computing the float64 reference of {inputs} inputs"):
            found, missing = _errors(attends, tensors, causal)
        able = {name: attends[name] for name in found}
        with stderr.status(f"Measuring time on {inputs} inputs"):
            times = time_passes(able, tensors, rounds) if able else {}
        results += [_result(inputs, name, found[name], times[name]) for name in found]
        results += [{"inputs": inputs, "system": name, "missing": why} for name, why in missing.items()]
    problem = {"B": batch, "H": heads, "N": length, "D": dim, "dtype": short(kind), "causal": causal, "device": device}
    _show(results, problem)
    write_json(json, "lab errors", {"problem": problem, "time": clock(device), "rounds": rounds, "results": results})


def _pytorch(shape: Shape, device: str) -> dict[str, Attend]:
    """PyTorch's kernels as functions of tensors (B, S, H, D)."""
    if device == "cpu":
        return {"sdpa": gpu.swapped(sdpa(shape))}
    return {name: gpu.swapped(gpu.PEERS[name](shape)) for name in ("flash", "cudnn")}


def _errors(
    attends: Mapping[str, Attend], tensors: Sequence[Tensor], causal: bool
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The root mean square error of o and the gradients by system; why a kernel of PyTorch does not take the problem."""
    q, k, v, do = tensors
    wide = [t.cpu().double() for t in tensors]
    no_dlse = wide[3].new_zeros(q.shape[0], q.shape[2], q.shape[1])
    exact = dense(Inputs(wide[0], wide[1], wide[2], {"causal": causal}, do=wide[3], dlse=no_dlse))
    found, missing = {}, {}
    for name, attend in attends.items():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        try:
            o = attend(leaves[0], leaves[1], leaves[2])
            results = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        except RuntimeError as error:
            missing[name] = str(error).splitlines()[0]
            continue
        roots = [
            float((t.cpu().double() - exact[kind]).square().mean().sqrt())
            for kind, t in zip(TENSORS, results, strict=True)
        ]
        found[name] = dict(zip(TENSORS, roots, strict=True))
    return found, missing


def _result(inputs: str, name: str, errors: dict[str, float], times: dict[str, Samples]) -> dict[str, Any]:
    seconds = {which: samples.median for which, samples in times.items()}
    return {"inputs": inputs, "system": name, "errors": errors, "seconds": seconds}


def _show(results: Sequence[dict[str, Any]], problem: dict[str, Any]) -> None:
    timed = {(r["inputs"], r["system"]): r["seconds"] for r in results if "seconds" in r}
    rows = []
    for r in results:
        if "missing" in r:
            rows.append([r["inputs"], r["system"], r["missing"]])
            continue
        cells = [f"{r['errors'][kind]:.2e}" for kind in TENSORS]
        for which, seconds in r["seconds"].items():
            cells.append(f"{seconds / timed['normal', r['system']][which]:.2f}x" if r["inputs"] != "normal" else "")
        rows.append([r["inputs"], r["system"], *cells])
    columns = ["inputs", "system", *(f"error of {kind}" for kind in TENSORS), "forward time", "backward time"]
    shape = f"B{problem['B']} H{problem['H']} N{problem['N']:,} D{problem['D']} {problem['dtype']}"
    title = (
        f"{shape} {'causal' if problem['causal'] else 'full'}: root mean square error, time over that of normal inputs"
    )
    console.print(table(title, columns, rows, left=2))
