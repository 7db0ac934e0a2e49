"""`tilewise io`: what attention moves and computes, on which GPU that takes how long, and the laws behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilewise
from tilewise import masks
from tilewise.call import problem_of
from tilewise.cli import io_measure, io_simulate
from tilewise.cli.options import (
    Batch,
    Blocks,
    CausalMask,
    Chunk,
    Dim,
    Documents,
    Dtype,
    Heads,
    Keys,
    KvHeads,
    Prefix,
    Queries,
    TopLeft,
    ValueDim,
    Window,
    masks_of,
    or_else,
    tensors,
)  # fmt: skip
from tilewise.cli.output import JsonFile, PlotFile, console, short, table, write_json, write_plot
from tilewise.explain import call_of
from tilewise.io_model import laws
from tilewise.io_model.gpus import GPUS, KIB, Gpu, gpu_of
from tilewise.io_model.roofline import Prediction, predict
from tilewise.io_model.systems import SYSTEMS, PassReport, Report, Tiles, report, tiles_for
from tilewise.page import human
from tilewise.problem import Problem
from tilewise.spec import BoundSpec

PASSES = ("forward", "backward")
CHIPS = tuple(KIB << i for i in range(3, 10))  # 8 KiB to 512 KiB


@dataclass(frozen=True)
class Asked:
    """One problem on one GPU, with the tiles to count by."""

    problem: Problem
    bound: BoundSpec
    aux: list[torch.Tensor]
    gpu: Gpu
    sram: int  # bytes that tiles are made for
    fixed: tuple[int, int] | None  # tiles of this size instead

    @property
    def tiles(self) -> Tiles:
        return self.tiles_of(self.sram)

    def tiles_of(self, sram: int) -> Tiles:
        """The tiles for a chip of so many bytes."""
        if (fixed := self.fixed) is not None:
            return lambda _: fixed
        return tiles_for(max(sram // self.problem.dtype.itemsize, 1), self.problem.D)


def io(
    batch: Batch = 64,
    sq: Queries = 1024,
    sk: Keys = None,
    heads: Heads = 16,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    value_dim: ValueDim = None,
    dtype: Dtype = "fp16",
    causal: CausalMask = False,
    top_left: TopLeft = False,
    window: Window = None,
    prefix: Prefix = None,
    chunk: Chunk = None,
    documents: Documents = None,
    blocks: Blocks = None,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    systems: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(SYSTEMS),
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}.")] = "h200",
    sram: Annotated[
        int | None, typer.Option(help="KiB on the chip for one tile.", show_default="the GPU's per SM")
    ] = None,
    block_m: Annotated[int | None, typer.Option(help="Rows of a tile.", show_default="by the SRAM")] = None,
    block_n: Annotated[int | None, typer.Option(help="Keys of a tile.", show_default="by the SRAM")] = None,
    tensors_too: Annotated[bool, typer.Option("--tensors", help="Also loads and stores of each tensor.")] = False,
    fits: Annotated[bool, typer.Option("--laws/--no-laws", help="Fit exponents in N, d and M (5 seconds).")] = True,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Also execute small problems with a counted memory: counts must be equal."),
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Also read hardware counters, with ncu on a GPU.")] = False,
    counted: Annotated[
        Path | None, typer.Option(help="Instead: take the counters from this result of --measure.", show_default=False)
    ] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Count what standard attention and FlashAttention-1, -2, -3 load, store and compute, and predict what that costs.

    **Counts** are exact, from the schedule of tiles: bytes between memory and the chip, FLOPs of products and of all else,
    and what is recomputed. **Tiles** follow the papers' rule for a chip of M elements, ceil(M / 4d) by min(that, d), or are
    what you say; kernels use smaller ones. **Times** are lower bounds: everything overlaps, at the peak rates of the GPU's
    datasheet. A large L2 cache hides from DRAM what tiles read again: "memory" counts bytes behind it. **Laws** are fitted to
    counts: standard ~ N^2, flash ~ N^2 d^2 / M. More: docs/io-model.md.

    Example: `tilewise io --batch 16 --sq 4096 --heads 16 --dim 128 --causal --gpu a100 --plot roofline.png`
    """
    if (block_m is None) != (block_n is None):
        raise ValueError("give both --block-m and --block-n, or neither")
    fixed = None if block_m is None or block_n is None else (block_m, block_n)
    if (fixed is not None and min(fixed) < 1) or (sram is not None and sram < 1):
        raise ValueError("--block-m, --block-n and --sram must be >= 1")
    if measure and counted is not None:
        raise ValueError("give --measure or --counted, not both: counters are read here, or taken from a file")
    earlier = None if counted is None else io_measure.stored(counted)
    if measure:
        io_measure.check()
    keys, tile = or_else(sk, sq), fixed or (128, 128)
    found: list[masks.Mask] = [tilewise.Causal("top_left" if top_left else None)] if causal or top_left else []
    found += masks_of(sq, keys, window, prefix, chunk, documents, blocks, tile)
    with_counters = measure or earlier is not None
    measured_causal = with_counters and plain_or_causal(found)
    call, _ = call_of(
        *tensors(batch, sq, keys, heads, kv_heads, dim, value_dim, dtype),
        {"mask": masks.And(tuple(found)) if found else None, "dropout_p": dropout},
    )
    problem = replace(
        problem_of(call.signatures, call.spec, 0, 0), device="cuda"
    )  # the bounds of rows are computed there
    one = gpu_of(gpu)
    one.peak(problem.dtype)
    bound = call.spec.bind(call.aux, call.scale)
    asked = Asked(problem, bound, call.aux, one, one.sram if sram is None else sram * KIB, fixed)
    chosen = [_system(name) for name in systems.split(",")]
    reports = {system.name: report(system, problem, bound, asked.tiles, call.aux) for system in chosen}
    data = {"problem": _sizes(problem), "gpu": asdict(one), "sram": asked.sram, "systems": _data(reports, asked)}
    _show(reports, asked, tensors_too)
    if fits:
        data["laws"] = show_laws()
    if simulate:
        data["simulated"] = io_simulate.run(chosen)
    if with_counters:
        data["measured"] = io_measure.run(reports, problem, one, measured_causal, earlier)
        data |= {} if earlier is None else {"counted_on": earlier.get("counted_on", earlier["machine"])}
    if fixed is None:
        data["chips"] = by_chip(reports, asked)
    write_plot(plot, "io", data)
    write_json(json, "io", data)


def by_chip(reports: dict[str, Report], asked: Asked) -> dict[str, Any]:
    """Bytes that the forward pass loads and stores, for chips of several sizes."""
    sizes = {
        name: [
            report(found.system, asked.problem, asked.bound, asked.tiles_of(size), asked.aux).forward.account.bytes
            for size in CHIPS
        ]
        for name, found in reports.items()
    }
    return {"kib": [size // KIB for size in CHIPS], "bytes": sizes}


def plain_or_causal(found: list[masks.Mask]) -> bool:
    """Whether the call is causal; other masks are not measured."""
    if [type(mask) for mask in found] not in ([], [masks.Causal]):
        raise ValueError("--measure takes no mask or --causal")
    return bool(found)


def _system(name: str):
    if name not in SYSTEMS:
        raise ValueError(f"--systems must be of {', '.join(SYSTEMS)}, got {name!r}")
    return SYSTEMS[name]


def _sizes(problem: Problem) -> dict[str, Any]:
    names = ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv")
    return {name: getattr(problem, name) for name in names} | {
        "dtype": short(problem.dtype),
        "masks": list(problem.features),
    }


def passes(found: Report) -> dict[str, PassReport]:
    """Both passes by name."""
    return {"forward": found.forward, "backward": found.backward}


def _data(reports: dict[str, Report], asked: Asked) -> dict[str, Any]:
    return {
        name: {"memory": found.memory._asdict(), "title": found.system.title, "source": found.system.source}
        | {which: _pass_data(one, predict(one, asked.problem, asked.gpu)) for which, one in passes(found).items()}
        for name, found in reports.items()
    }


def _pass_data(one: PassReport, guess: Prediction) -> dict[str, Any]:
    account = one.account
    return {
        "block": list(one.block),
        "on_chip_bytes": one.on_chip,
        "tensors": {name: {"loads": ld, "stores": st} for name, (ld, st) in account.by_tensor().items()},
        "elements": account.elements,
        "bytes_read": account.bytes_read,
        "bytes_written": account.bytes_written,
        "compulsory_bytes": account.compulsory_bytes,
        "flops": {
            n: getattr(account, n) for n in ("matmul", "recomputed", "other", "other_recomputed", "exponentials")
        },
        "predicted": asdict(guess) | {"bound": guess.bound, "seconds": guess.seconds, "intensity": guess.intensity},
    }


# ---- tables ----


def _show(reports: dict[str, Report], asked: Asked, tensors_too: bool) -> None:
    p, gpu = asked.problem, asked.gpu
    mask = ", ".join(p.features) or "no mask"
    console.print(
        f"B{p.B} H{p.H}{'' if p.G == 1 else f'/{p.Hkv}'} Sq{p.Sq} Sk{p.Sk} D{p.D}{'' if p.D == p.Dv else f'/{p.Dv}'} "
        f"{short(p.dtype)}, {mask}; {gpu.title}: {gpu.sms} SMs, {human(asked.sram, 'B')} for a tile, "
        f"L2 {human(gpu.l2, 'B')}, {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.peak(p.dtype) / 1e12:,.0f} TFLOP/s"
    )
    console.print(_counts(reports))
    console.print(_times(reports, asked))
    console.print(_memory(reports))
    if tensors_too:
        for name, found in reports.items():
            console.print(_tensors(name, found))


def _counts(reports: dict[str, Report]):
    base = reports.get("standard")
    rows = []
    for name, found in reports.items():
        for which, one in passes(found).items():
            account = one.account
            ratio = passes(base)[which].account.bytes / max(account.bytes, 1) if base else None
            rows.append((
                name, which, "x".join(map(str, one.block)) if found.system.tiled else "-",
                human(account.bytes_read, "B"), human(account.bytes_written, "B"),
                "-" if ratio is None else f"{ratio:.1f}x", human(account.matmul, "FLOP"),
                human(account.recomputed, "FLOP") if account.recomputed else "-", human(account.other, "FLOP"),
            ))  # fmt: skip
    columns = ["system", "pass", "tile", "loaded", "stored", "fewer", "products", "recomputed", "all else"]
    return table("Between memory and the chip, and on it: exact counts", columns, rows, left=2)


def _times(reports: dict[str, Report], asked: Asked):
    rows = []
    for name, found in reports.items():
        for which, one in passes(found).items():
            guess = predict(one, asked.problem, asked.gpu)
            rows.append((
                name, which, human(guess.memory_bytes, "B"), f"{guess.intensity:,.0f}",
                *(_ms(guess.seconds_by.get(what)) for what in RESOURCES), _ms(guess.seconds), guess.bound,
            ))  # fmt: skip
    columns = ["system", "pass", "bytes behind L2", "FLOP/B", *RESOURCES.values(), "at least", "bound by"]
    return table(f"Lower bounds on one {asked.gpu.title}, in ms", columns, rows, left=2)


RESOURCES = {"memory": "memory", "matrix units": "matrix", "exponentials": "exp", "other arithmetic": "other"}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3f}"


def _memory(reports: dict[str, Report]):
    rows = [(name, *(human(n, "B") for n in found.memory)) for name, found in reports.items()]
    columns = ["system", "saved for backward", "peak forward", "peak backward"]
    return table("Memory; peaks beyond inputs, outputs and gradients", columns, rows)


def _tensors(name: str, found: Report):
    sides = {which: one.account.by_tensor() for which, one in passes(found).items()}
    names = dict.fromkeys([*sides["forward"], *sides["backward"]])
    rows = [(t, *(f"{n:,}" if n else "-" for which in PASSES for n in sides[which].get(t, (0, 0)))) for t in names]
    columns = ["tensor", *(f"{which} {what}" for which in PASSES for what in ("loads", "stores"))]
    return table(f"{name}: elements", columns, rows)


def show_laws() -> dict[str, Any]:
    """Print the fitted laws and return them as data."""
    found = laws.all_laws()
    rows = []
    for law in found:
        cells = [
            "-" if fit is None else f"{fit.slope:+.3f} ({fit.residual:.1%})"
            for fit in (law.exponents[x] for x in "NdM")
        ]
        rows.append((law.system, "backward" if law.backward else "forward", *cells))
    title = f"Exponents of elements moved (rms residual); N {laws.N:,}, d {laws.D}, M {laws.M:,}"
    console.print(table(title, ["system", "pass", "N", "d", "M"], rows, left=2))
    console.print("Theory: standard N^2; flash N^2 d^2 / M (Dao et al. 2022, theorem 2).")
    sparse = {name: laws.sparsity(SYSTEMS[name]) for name in ("flash1", "flash2")}
    for name, fit in sparse.items():
        share = fit.offset / (fit.offset + fit.slope)
        console.print(
            f"Block-sparse {name}: proportional to kept tiles (r2 {fit.r2:.6f}), beside {share:.1%} that stays."
        )
    return {"exponents": [asdict(law) for law in found], "sparsity": {n: fit._asdict() for n, fit in sparse.items()}}
