"""`tilewise doctor`: what will run on this machine, how fast, and what is missing."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import tilewise
from tilewise.cli import measure
from tilewise.cli.output import FAILED, JsonFile, console, cpu_name, fail, installed, machine, short, write_json
from tilewise.cli.problems import Shape, draw, ours
from tilewise.dispatch import BACKENDS

MARKS = {"good": "[green]✓[/]", "missing": "[yellow]-[/]", "broken": "[bold red]✗[/]"}
OPTIONAL = {
    "matplotlib": "plots: pip install 'tilewise[plot]'",
    "tokenizers": "training on words instead of bytes: pip install 'tilewise[train]'",
    "triton": "GPU kernels; it comes with PyTorch for CUDA",
}
PROBE = Shape.parse("1x4x1024x64:causal")


class Finding(NamedTuple):
    """One line of the report."""

    state: str  # "good"; "missing", which is no fault; or "broken"
    topic: str
    text: str
    data: Any = None


def doctor(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure speed; 0 for not at all.")] = 2.0,
    json: JsonFile = None,
) -> None:
    """Say in plain words what runs here and how fast, what is missing, and whether results are right.

    The exit code is 1 when something that tilewise needs is broken.

    Example: `tilewise doctor`
    """
    found = []
    for finding in _examine(seconds):
        console.print(f"{MARKS[finding.state]} [bold]{finding.topic}[/] ", end="")
        console.print(finding.text, markup=False)
        found.append(finding)
    broken = [f.topic for f in found if f.state == "broken"]
    write_json(json, "doctor", {"healthy": not broken, "findings": [f._asdict() for f in found]})
    if broken:
        fail(f"broken: {', '.join(broken)}", FAILED)
    console.print("Everything that tilewise needs works.")


def _examine(seconds: float) -> Iterator[Finding]:
    yield _versions()
    runs_on_cpu = False
    for row in BACKENDS:
        reason = row.requires()
        runs_on_cpu |= row.name == "cpu" and reason is None
        state = "good" if reason is None else "broken" if row.name == "cpu" else "missing"
        yield Finding(state, f"backend {row.name}", f"runs here: {row.title}" if reason is None else reason)
    yield _gpu()
    if runs_on_cpu:
        yield _processor()
        yield from _self_test()
        yield _cache()
        if seconds > 0:
            yield from _speed(seconds)
    for package, use in OPTIONAL.items():
        version = installed(package)
        yield Finding(
            "good" if version else "missing", package, version or f"is not installed; needed for {use}", version
        )


def _versions() -> Finding:
    info = machine()
    text = (
        f"tilewise {info['tilewise']}, torch {info['torch']}, numba {info['numba']}, Python {platform.python_version()}"
    )
    return Finding("good", "versions", text, info)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("missing", "GPU", "none that PyTorch can use; tensors on the CPU run on the CPU backend")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    takers = [row.name for row in BACKENDS if row.device == "cuda" and row.requires() is None]
    text = f"{', '.join(names)}; " + (
        f"used by {', '.join(takers)}" if takers else "no backend of this version uses it"
    )
    return Finding("good" if takers else "missing", "GPU", text, names)


def _processor() -> Finding:
    from tilewise.backends.cpu import amx  # noqa: PLC0415  numba: other commands do without
    from tilewise.backends.cpu.host import vector_bytes  # noqa: PLC0415  the same

    data = {"vector_bits": 8 * vector_bytes(), "amx": amx.usable(), "threads": torch.get_num_threads()}
    units = f"{data['vector_bits']}-bit vectors{', AMX for bfloat16' if data['amx'] else ''}"
    threads = f"{data['threads']} thread{'s'[: data['threads'] > 1]} (torch.set_num_threads)"
    return Finding("good", "processor", f"{cpu_name()}, {units}, {threads}", data)


def _cache() -> Finding:
    from tilewise.backends.cpu.forward import forward_kernel  # noqa: PLC0415  numba: other commands do without
    from tilewise.backends.cpu.host import host_lanes  # noqa: PLC0415  the same

    folder = Path(forward_kernel(host_lanes(32)).stats.cache_path)  # pyright: ignore[reportAttributeAccessIssue]
    kernels = list(folder.glob("*.nbc"))
    size = sum(path.stat().st_size for path in kernels)
    text = f"{folder}: {len(kernels)} compiled kernels, {size / 1e6:.1f} MB (NUMBA_CACHE_DIR moves it)"
    return Finding("good", "kernel cache", text, {"folder": str(folder), "kernels": len(kernels), "bytes": size})


def _self_test() -> Iterator[Finding]:
    from tilewise.testing import Case, assert_matches_reference  # noqa: PLC0415  only the self test needs it

    case = Case("doctor", B=1, Sq=70, Sk=90, H=4, Hkv=2, D=24, mask=(("causal",),), sinks=True)
    for dtype in (torch.float32, torch.bfloat16):
        start = time.perf_counter()
        try:
            assert_matches_reference(case, dtype)
        except Exception as error:
            yield Finding("broken", f"self test {short(dtype)}", f"{type(error).__name__}: {error}")
            continue
        spent = time.perf_counter() - start
        text = f"forward and backward agree with float64 ({spent:.1f} s, compiling included where the cache was empty)"
        yield Finding("good", f"self test {short(dtype)}", text, {"seconds": spent})


def _speed(seconds: float) -> Iterator[Finding]:
    from tilewise.backends.cpu.peak import fma_peak  # noqa: PLC0415  numba: other commands do without

    peak = fma_peak(seconds=min(0.2, seconds / 4))
    yield Finding("good", "FMA peak", f"{peak:.0f} GFLOP/s per core in float32", peak)
    q, k, v, do = draw(PROBE, torch.float32)
    account = tilewise.explain(q, k, v, causal=PROBE.causal).cost
    with measure.threads(1):
        passes = measure.passes(ours(PROBE), q, k, v, do=do)
        samples = measure.interleave(passes, 5, "cpu", seconds / 10)
    for name, found in samples.items():
        rate = getattr(account, name).flops / found.median / 1e9
        text = f"{rate:.0f} GFLOP/s on one core, {100 * rate / peak:.0f}% of the peak (float32, {PROBE})"
        yield Finding("good", f"speed {name}", text, rate)
