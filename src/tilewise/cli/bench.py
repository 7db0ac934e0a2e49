"""`tilewise bench`: speed against PyTorch's own attention, in one run, for results that were checked first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID

import tilewise
from tilewise.cli import gpu, gpu_features, measure
from tilewise.cli.output import (
    FAILED,
    JsonFile,
    PlotFile,
    console,
    dtype_of,
    fail,
    short,
    stderr,
    table,
    write_json,
    write_plot,
)
from tilewise.cli.problems import LONG, PROBLEMS, Shape, check, draw, ours, sdpa

PASSES = ("forward", "backward")
RIVALS = ("tilewise", "sdpa")


@dataclass(frozen=True)
class Result:
    """One pass of one problem: seconds of both, and what they come to."""

    shape: Shape
    dtype: torch.dtype
    name: str  # forward or backward
    threads: int
    flops: int
    samples: dict[str, measure.Samples]  # by rival

    @property
    def ratio(self) -> float:
        """How many times faster than SDPA."""
        return self.samples["tilewise"].ratio_to(self.samples["sdpa"])

    def gflops(self, rival: str) -> float:
        return self.flops / self.samples[rival].median / 1e9

    def to_dict(self) -> dict[str, Any]:
        rivals = {
            rival: {
                "seconds": samples.median,
                "spread": samples.spread,
                "gflops": self.gflops(rival),
                "cpu_seconds": [t.cpu for t in samples.timings],
                "wall_seconds": [t.wall for t in samples.timings],
            }
            for rival, samples in self.samples.items()
        }
        head = {"shape": str(self.shape), "dtype": short(self.dtype), "pass": self.name, "threads": self.threads}
        return head | {"flops": self.flops, "ratio": self.ratio, **rivals}


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="BxHxSxD or BxH/HkvxSxD, with :causal behind it or not. Repeatable."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="Repeatable.", show_default="fp32, bf16")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each pass of each contestant.")] = 11,
    threads: Annotated[int, typer.Option(min=1, help="Threads. One counts CPU time, more count wall time.")] = 1,
    two_threads: Annotated[
        bool, typer.Option("--two-threads", help="Scaling: wall time on 1 and on 2 threads.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help=f"On a GPU, of {', '.join(gpu.PEERS)}. Repeatable.", show_default="all"),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="On a GPU: what each feature costs over the plain causal kernel.")
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="On a GPU: run this backend (see tilewise caps).", show_default="dispatch's choice"),
    ] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare speed with torch.nn.functional.scaled_dot_product_attention, forward and backward.

    Both run in the same process, taking turns in every round. On one thread CPU time is counted, so that other programs
    disturb little. A problem is timed only after its outputs and gradients agreed with a float64 reference. The default
    problems take a quarter of an hour, most of it SDPA's bf16 backward at 8192 tokens.

    With `--device cuda`: TFLOP/s on a grid of 36 problems in bf16, next to our portable kernels
    (triton), FlashAttention-2 (flash) and cuDNN, both through SDPA, FlexAttention and plain eager attention, in bursts after
    a rest. With `--features` as well: the time of dropout, softcap,
    ALiBi, bias, documents, packed sequences, windows and others over that of the plain causal kernel (16 heads of 128), also
    per FLOP that their masks leave.

    Example: `tilewise bench --shape 1x8x1024x64:causal --dtype fp32 --rounds 5`
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            fail("PyTorch finds no GPU here; run without --device cuda for the CPU")
        if features:
            _bench_features(shape, dtype, peer, rounds, backend, json, plot)
        else:
            with tilewise.use_backend(backend) if backend else nullcontext():
                _bench_gpu(shape, dtype, peer, rounds, json, plot)
        return
    if device != "cpu" or peer or features or backend:
        raise ValueError(
            f"device must be cpu or cuda, and --peer, --features and --backend are for cuda only; got device {device!r}"
        )
    dtypes = [dtype_of(name) for name in dtype or ("fp32", "bf16")]
    shapes = [Shape.parse(text) for text in shape] if shape else [LONG] if two_threads else [*PROBLEMS, LONG]
    cases = [(s, d) for d in dtypes for s in shapes]
    checked, refused = _check_all(cases)
    cases = [case for case in cases if case not in refused]
    counts = (1, 2) if two_threads else (threads,)
    by = "wall" if two_threads or threads > 1 else "cpu"
    results = _run(cases, counts, rounds, by)
    data: dict[str, Any] = {
        "time": by,
        "rounds": rounds,
        "checked": checked,
        "refused": [f"{s} {short(d)}" for s, d in refused],
    }
    if two_threads:
        _show_scaling(results)
    elif results:
        peaks = {d: _peak(d) * threads for d in dtypes}
        _show(results, peaks, by, threads)
        data |= {"fma_peak_gflops": {short(d): peak for d, peak in peaks.items()}, "geometric_means": _means(results)}
    data |= {"results": [r.to_dict() for r in results]}
    write_plot(plot, "bench", data)
    write_json(json, "bench", data)
    if refused:
        fail(f"{len(refused)} of {len(refused) + len(cases)} problems were refused: their results are wrong", FAILED)


def _bench_features(shape, dtype, peer, rounds, backend, json, plot) -> None:
    if shape or peer:
        raise ValueError("--features has problems of its own: leave out --shape and --peer")
    dtypes = [dtype_of(name) for name in dtype or ("bf16",)]
    data = gpu_features.bench(
        dtypes, rounds, backend, measure.WORKERS, lambda part: write_json(json, "bench", part, say=False)
    )
    write_plot(plot, "bench", data)
    write_json(json, "bench", data)
    if data["refused"]:
        fail(f"{len(data['refused'])} features were refused: their results are wrong", FAILED)


def _bench_gpu(shape, dtype, peer, rounds, json, plot) -> None:
    peers = list(peer or gpu.PEERS)
    if unknown := set(peers) - gpu.PEERS.keys():
        raise ValueError(f"peers are {', '.join(gpu.PEERS)}; got {', '.join(sorted(unknown))}")
    shapes = [Shape.parse(text) for text in shape] if shape else gpu.GRID
    dtypes = [dtype_of(name) for name in dtype or ("bf16",)]
    data = gpu.bench(shapes, dtypes, peers, rounds, lambda part: write_json(json, "bench", part, say=False))
    write_plot(plot, "bench", data)
    write_json(json, "bench", data)
    if data["refused"]:
        fail(f"{len(data['refused'])} problems were refused: their results are wrong", FAILED)


def _check_all(cases: Sequence[tuple[Shape, torch.dtype]]) -> tuple[list[str], list[tuple[Shape, torch.dtype]]]:
    checked, refused = [], []
    for case in cases:
        try:
            checked.append(check(*case))
        except AssertionError as error:
            refused.append(case)
            stderr.print(f"refused: {case[0]} {short(case[1])} disagrees with the reference", style="bold red")
            stderr.print(str(error), markup=False)
    if checked:
        console.print("checked against the float64 reference: " + "; ".join(checked))
    return checked, refused


def _run(cases: Sequence[tuple[Shape, torch.dtype]], counts: Sequence[int], rounds: int, by: str) -> list[Result]:
    found = []
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(cases) * len(counts) * rounds)
        for shape, dtype in cases:
            for threads in counts:
                progress.update(task, description=f"{shape} {short(dtype)}, {threads} thread{'s'[: threads > 1]}")
                found += _measure(shape, dtype, threads, rounds, by, _advance(progress, task))
    return found


def _advance(progress: Progress, task: TaskID) -> Callable[[], None]:
    return lambda: progress.advance(task)


def _measure(
    shape: Shape, dtype: torch.dtype, threads: int, rounds: int, by: str, on_round: Callable[[], None]
) -> list[Result]:
    q, k, v, do = draw(shape, dtype)
    account = tilewise.explain(q, k, v, causal=shape.causal).cost
    theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v, do)]
    with measure.threads(threads):
        passes = {
            "tilewise": measure.passes(ours(shape), q, k, v, do=do),
            "sdpa": measure.passes(sdpa(shape), *theirs[:3], do=theirs[3]),
        }
        contestants = {f"{rival} {name}": passes[rival][name] for name in PASSES for rival in RIVALS}
        samples = measure.interleave(contestants, rounds, by, on_round=on_round)
    return [
        Result(shape, dtype, name, threads, getattr(account, name).flops, {r: samples[f"{r} {name}"] for r in RIVALS})
        for name in PASSES
    ]


def _peak(dtype: torch.dtype) -> float:
    """GFLOP/s of one core's FMA units in the precision in which this dtype is computed."""
    from tilewise.backends.cpu.peak import fma_peak  # noqa: PLC0415  numba: only a run that needs it pays

    return fma_peak(64 if dtype == torch.float64 else 32)


def _means(results: Sequence[Result]) -> dict[str, float]:
    """Geometric means of the ratios, by dtype and pass."""
    groups: dict[str, list[float]] = {}
    for r in results:
        groups.setdefault(f"{short(r.dtype)} {r.name}", []).append(r.ratio)
    return {name: math.exp(sum(map(math.log, ratios)) / len(ratios)) for name, ratios in groups.items()}


def _show(results: Sequence[Result], peaks: dict[torch.dtype, float], by: str, threads: int) -> None:
    columns = ["shape", "dtype", "pass", "tilewise", "SDPA", "GFLOP/s", "SDPA", "% peak", "faster"]
    clock = "CPU time of one thread" if by == "cpu" else f"wall time of {threads} threads"
    title = f"BxHxSxD, {clock}; median ± half the quartile distance"
    rows = [
        (
            *(r.shape, short(r.dtype), r.name),
            *(_time(r.samples[rival]) for rival in RIVALS),
            *(f"{r.gflops(rival):.1f}" for rival in RIVALS),
            *(f"{100 * r.gflops('tilewise') / peaks[r.dtype]:.0f}", f"{r.ratio:.2f}x"),
        )
        for r in results
    ]
    console.print(table(title, columns, rows, left=3))
    lines = [f"{name} {mean:.2f}x" for name, mean in _means(results).items()]
    console.print("faster than SDPA, geometric means: " + ", ".join(lines))
    console.print("FMA peak: " + ", ".join(f"{short(d)} {peak:.0f} GFLOP/s" for d, peak in peaks.items()))


def _show_scaling(results: Sequence[Result]) -> None:
    pairs = [(a, b) for a in results for b in results if a.threads < b.threads and _same(a, b)]
    rows = [
        (
            *(one.shape, short(one.dtype), one.name, rival),
            *(_time(result.samples[rival]) for result in (one, two)),
            f"{one.samples[rival].median / two.samples[rival].median:.2f}x",
        )
        for one, two in pairs
        for rival in RIVALS
    ]
    columns = ["shape", "dtype", "pass", "who", "1 thread", "2 threads", "faster"]
    console.print(table("Wall time on one and on two threads", columns, rows, left=4))


def _same(a: Result, b: Result) -> bool:
    return (a.shape, a.dtype, a.name) == (b.shape, b.dtype, b.name)


def _time(samples: measure.Samples) -> str:
    ms = samples.median * 1e3
    return f"{ms:.{1 if ms >= 10 else 2}f} ms ±{100 * samples.spread:.0f}%"
