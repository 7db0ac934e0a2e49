"""Hardware counters through ncu (Nsight Compute): what a GPU says that it moved, beside what the model says.

Two levels are read. L2 to SM is what the model counts: every load of a tile crosses there. DRAM sees less: an L2 of tens of MB
(60 MB on an H200) holds the keys and values of the heads at work, so that what tiles read again never reaches DRAM: there the
Theta(N^2 d^2 / M) term is hidden, and only compulsory bytes show. Standard attention's matrices do not fit and show in both.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

#: What is asked of ncu: our name, its metric.
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_to_sm": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "sm_to_l2": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "l2_written_sectors": "lts__t_sectors_op_write.sum",
    "l2_added_sectors": "lts__t_sectors_op_red.sum",
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "sm__inst_executed.sum",
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
}
#: Percentages: of several kernels the mean, weighted by their time. All else is summed.
SHARES = ("tensor_pipe", "occupancy")
#: ncu's units in ours: bytes, seconds, percent, instructions, sectors (of 32 bytes).
UNITS = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "nsecond": 1e-9, "usecond": 1e-6,
    "msecond": 1e-3, "second": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 1.0, "inst": 1.0, "sector": 1.0,
    "": 1.0,
}  # fmt: skip
MISSING = ("", "n/a", "(!) n/a", "nan")  # ncu's words for a metric that a GPU does not have


class CounterError(RuntimeError):
    """ncu is missing, may not read the counters, or failed; the message says which and what helps."""


@dataclass(frozen=True)
class Kernel:
    """One kernel's counters, by the names of METRICS, in bytes, seconds, percent and instructions."""

    name: str
    values: dict[str, float]


@lru_cache(maxsize=8)
def available(ncu: str) -> tuple[str, ...]:
    """The names of METRICS that this ncu knows for the GPU here: one that it does not know would stop it altogether."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise CounterError(f"ncu does not list its metrics: {_last_lines(done.stdout + done.stderr)}")
    known = set(done.stdout.split())
    return tuple(name for name, metric in METRICS.items() if metric.split(".")[0] in known)


def command(ncu: str, program: Sequence[str], names: Sequence[str] = tuple(METRICS)) -> list[str]:
    """The ncu command that counts what a program runs between its profiler marks, by these names of METRICS.

    Caches are left as kernels leave them and clocks as they are: the workload warms up before its marks, and a flush before
    every kernel would hide what L2 keeps from one kernel of a pass to the next.
    """
    metrics = ",".join(METRICS[name] for name in names)
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off", "--clock-control", "none",
        "--cache-control", "none", "--target-processes", "all", "--metrics", metrics, *program,
    ]  # fmt: skip


def workload(system: str, shape: str, which: str, dtype: str, dropout: float) -> list[str]:
    """The command of `io_model.workload`: one pass of one system, warmed up, between profiler marks."""
    return [
        sys.executable, "-m", "tilewise.io_model.workload", "--system", system, "--shape", shape, "--pass", which,
        "--dtype", dtype, "--dropout", str(dropout),
    ]  # fmt: skip


def find_ncu() -> str:
    """The path of ncu.

    Raises:
        CounterError: it is not on PATH.
    """
    found = shutil.which("ncu")
    if found is None:
        raise CounterError(
            "ncu (NVIDIA Nsight Compute) is not on PATH; it comes with CUDA, or alone as the package nsight-compute"
        )
    return found


def measure(system: str, shape: str, which: str, dtype: str, dropout: float, timeout: float = 600) -> list[Kernel]:
    """Run one pass under ncu and return the counters of its kernels.

    Raises:
        CounterError: there is no ncu, it has no permission, or the workload failed.
    """
    ncu = find_ncu()
    names = available(ncu)
    whole = command(ncu, workload(system, shape, which, dtype, dropout), names)
    done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=timeout)
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise CounterError(
            "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as root, or load the nvidia "
            "driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode != 0:
        raise CounterError(f"ncu failed on {system} {shape} {which}: {_last_lines(said)}")
    return parse(done.stdout, names)


def parse(text: str, asked: Sequence[str] = tuple(METRICS)) -> list[Kernel]:
    """The kernels in ncu's CSV output (`--csv --page raw`): a row of names, a row of units, then a row per kernel.

    Lines before the table, by ncu ("==PROF== ...") and by the program, are passed over.

    Raises:
        CounterError: there is no table, a metric is missing from it, or a unit is unknown.
    """
    lines = text.splitlines()
    start = next((at for at, text in enumerate(lines) if text.startswith('"ID"')), None)
    if start is None:
        raise CounterError(f"ncu printed no table of kernels: {_last_lines(text)}")
    names, units, *rows = [row for row in csv.reader(io.StringIO("\n".join(lines[start:]))) if len(row) > 2]
    absent = [METRICS[ours] for ours in asked if METRICS[ours] not in names]
    if absent:
        raise CounterError(f"ncu's table lacks {', '.join(absent)}")
    columns = {ours: names.index(METRICS[ours]) for ours in asked}
    kernel = names.index("Kernel Name")
    return [
        Kernel(
            row[kernel], {ours: _number(row[at], units[at]) for ours, at in columns.items() if row[at] not in MISSING}
        )
        for row in rows
    ]


def total(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """All kernels of a pass as one: sums; shares as means over time; and instructions that are no matrix products.

    A counter that some kernel lacks is None.
    """
    found: dict[str, Any] = {"kernels": len(kernels)}
    for name in METRICS:
        values = [k.values[name] for k in kernels if name in k.values]
        if not kernels or len(values) < len(kernels):
            found[name] = None
        elif name in SHARES:
            seconds = [k.values.get("seconds", 0.0) for k in kernels]
            found[name] = sum(v * s for v, s in zip(values, seconds, strict=True)) / max(sum(seconds), 1e-30)
        else:
            found[name] = sum(values)

    def together(one: str, other: str, sign: int = 1) -> float | None:
        return None if found[one] is None or found[other] is None else found[one] + sign * found[other]

    found["dram_bytes"] = together("dram_read", "dram_written")
    found["tile_bytes"] = together("l2_to_sm", "sm_to_l2")
    found["other_instructions"] = together("instructions", "tensor_instructions", -1)
    return found


def _number(cell: str, unit: str) -> float:
    if unit not in UNITS:
        raise CounterError(f"ncu reports in {unit!r}, a unit that is not known here")
    return float(cell.replace(",", "")) * UNITS[unit]


def _last_lines(text: str, count: int = 5) -> str:
    return " | ".join(text.strip().splitlines()[-count:]) or "it printed nothing"
