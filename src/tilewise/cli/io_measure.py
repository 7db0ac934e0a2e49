"""`tilewise io --measure`: hardware counters beside the prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise.cli.output import FAILED, console, fail, short, stderr, table
from tilewise.io_model import counters
from tilewise.io_model.gpus import Gpu
from tilewise.io_model.roofline import predict
from tilewise.io_model.systems import Report
from tilewise.page import human
from tilewise.problem import Problem

NOTE = (
    "L2 to SM is what the model counts. DRAM sees less: an L2 of {l2} holds what tiles read again, so the N^2 d^2 / M term "
    "is hidden there and compulsory bytes show."
)


def check() -> None:
    """Leave with an error where nothing can be measured."""
    if not torch.cuda.is_available():
        fail("--measure needs a GPU that PyTorch finds; there is none here")
    try:
        counters.find_ncu()
    except counters.CounterError as error:
        fail(str(error), FAILED)


def device_facts() -> dict[str, Any]:
    """What the GPU here says of itself, in the words of `gpus`."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"title": found.name, "sms": found.multi_processor_count, "l2": found.L2_cache_size}


Row = dict[str, Any]


def stored(path: Path) -> dict[str, Any]:
    """A result of `tilewise io --measure`.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--counted {path}: {error}") from None
    if not isinstance(data, dict) or not data.get("measured"):
        raise ValueError(f"--counted {path}: no result of tilewise io --measure")
    return data


def _measured(row: Row, dtype: str) -> Row:
    try:
        kernels = counters.measure(row["system"], row["shape"], row["pass"], dtype, row["dropout"])
    except counters.CounterError as error:
        stderr.print(f"{row['system']} {row['pass']}: {error}", markup=False)
        return {"error": str(error)}
    return {"counted": counters.total(kernels), "by_kernel": [{"name": k.name} | k.values for k in kernels]}


def _counted(row: Row, earlier: Sequence[Row]) -> Row:
    for other in earlier:
        if all(other[name] == row[name] for name in ("system", "pass", "shape", "dropout")):
            return {name: other[name] for name in ("device", "counted", "by_kernel", "error") if name in other}
    raise ValueError(f"--counted: no counters of {row['system']} {row['pass']} {row['shape']} dropout {row['dropout']}")


def run(
    reports: dict[str, Report], problem: Problem, gpu: Gpu, causal: bool, earlier: dict[str, Any] | None
) -> list[Row]:
    """Measure both passes of every system, print them beside the prediction, return them as data.

    Args:
        earlier: the result of an earlier run (`stored`), whose counters are taken instead of new ones.
    """
    if problem.Sq != problem.Sk or problem.D != problem.Dv:
        raise ValueError("--measure takes self-attention: as many keys as queries, one head dim")
    heads = str(problem.H) if problem.G == 1 else f"{problem.H}/{problem.Hkv}"
    shape = f"{problem.B}x{heads}x{problem.Sq}x{problem.D}" + (":causal" if causal else "")
    if earlier is not None and earlier["problem"]["dtype"] != short(problem.dtype):
        raise ValueError(f"--counted: its counters are of {earlier['problem']['dtype']}, not {short(problem.dtype)}")
    facts = device_facts() if earlier is None else earlier["measured"][0]["device"]
    if (facts["sms"], facts["l2"]) != (gpu.sms, gpu.l2):
        stderr.print(f"predicted for {gpu.title}, measured on {facts}: name the GPU here with --gpu", markup=False)
    dropout, found = problem.spec.dropout_p, []
    for name, one in reports.items():
        for which, part in (("forward", one.forward), ("backward", one.backward)):
            row = {"system": name, "pass": which, "shape": shape, "dropout": dropout, "device": facts, "counted": None}
            guess = predict(part, problem, gpu)
            row["predicted"] = {
                "l2_to_sm": part.account.bytes_read,
                "sm_to_l2": part.account.bytes_written,
                "tile_bytes": guess.bytes,
                "dram_bytes": guess.memory_bytes,
            }
            row |= _measured(row, short(problem.dtype)) if earlier is None else _counted(row, earlier["measured"])
            found.append(row)
    show(found, gpu)
    return found


def show(found: list[Row], gpu: Gpu) -> None:
    """The counters of each pass, bytes as counted and over the predicted."""
    rows = []
    for row in found:
        counted, predicted = row["counted"], row["predicted"]
        if counted is None:
            rows.append((row["system"], row["pass"], *["-"] * 6, "not measured"))
            continue
        seconds = counted["seconds"]
        rows.append((
            row["system"], row["pass"], *(_beside(counted[n], predicted[n]) for n in ("tile_bytes", "dram_bytes")),
            *("-" if counted[n] is None else f"{counted[n]:.0f}%" for n in ("tensor_pipe", "occupancy")),
            "-" if counted["other_instructions"] is None else human(counted["other_instructions"], ""),
            "-" if seconds is None else f"{seconds * 1e3:.3f} ms", str(counted["kernels"]),
        ))  # fmt: skip
    columns = ["system", "pass", "L2 <-> SM", "DRAM", "tensor pipe", "occupancy", "other inst.", "time", "kernels"]
    console.print(table("Hardware counters (in brackets: over the predicted)", columns, rows, left=2))
    console.print(NOTE.format(l2=human(gpu.l2, "B")))


def _beside(counted: float | None, predicted: int) -> str:
    return "-" if counted is None else f"{human(counted, 'B')} ({counted / max(predicted, 1):.2f}x)"
