"""Small results of every kind, written by the commands themselves; of a GPU's, by as much of them as runs without one."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch
from pytest import MonkeyPatch
from typer.testing import CliRunner

from tilewise import lab
from tilewise.cli import gpu, gpu_features, io_measure, lab_generations, memory, memory_point
from tilewise.cli.main import app
from tilewise.cli.output import write_json
from tilewise.cli.problems import Shape
from tilewise.io_model import counters
from tilewise.training.config import PRESETS

GPU = "NVIDIA H200"
TINY_MODEL = {"layers": 1, "heads": 2, "width": 32, "threads": 1, "eval_rows": 2, "warmup": 2, "lr": 3e-3}


def write_all(folder: Path) -> None:
    """One file of each kind."""
    with MonkeyPatch.context() as patch:
        patch.setattr(memory, "measure", lambda point: memory_point.measure(**point))
        patch.setitem(PRESETS, "small", TINY_MODEL)
        _of_a_cpu(folder)
        patch.setattr(memory, "measure", lambda point: {"saved": 90 << 20, "peak": 9 << 20, "in_all": 140 * 10**6})
        paper = ("-B", 16, "-H", 8, "-D", 64, "--dtype", "fp16")
        _run(folder, "memory-paper", "memory", "--lengths", "1024,65536", "--measure-up-to", 1024, *paper)
    for write in (_bench_gpu, _features, _generations, _measured, _tests):
        with MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
            write(folder, patch)


def _run(folder: Path, name: str, *args: object) -> None:
    result = CliRunner().invoke(app, [*map(str, args), "--json", str(folder / f"{name}.json")])
    assert result.exit_code == 0, result.output


def _of_a_cpu(folder: Path) -> None:
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i in range(8):
        (texts / f"{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n\n" * (5 + 3 * i))
    _run(
        folder,
        "bench",
        "bench",
        "--shape",
        "1x1x64x16",
        "--shape",
        "1x1x96x16:causal",
        "--dtype",
        "fp32",
        "--rounds",
        2,
    )
    _run(folder, "memory", "memory", "--lengths", "256,512,1048576", "--measure-up-to", 512, "--gib", 4)
    sizes = ("-n", 96, "-D", 16, "--rounds", 1)
    _run(folder, "lab-compare", "lab", "compare", *sizes, "--tiles", "32,64")
    _run(folder, "lab-errors", "lab", "errors", "-n", 64, "-D", 16, "--rounds", 1)
    _run(folder, "lab-sparsity", "lab", "sparsity", "-n", 256, "-D", 16, "--block", 32, "--rounds", 1)
    _run(folder, "lab-memory", "lab", "memory", "--lengths", "256,65536", "--measure-up-to", 256, "--gib", 4, "-D", 16)
    _run(folder, "io", "io", "-B", 1, "-H", 2, "--sq", 256, "--simulate")
    _run(folder, "fit", "fit", "--gpu", "t4", "--model", "all", "--contexts", "1024,8192")
    _run(folder, "compare", "compare", "--context", 32, "--batch", 2, "--steps", 5, "--data", texts, "--seeds", 2)


def _bench_gpu(folder: Path, patch: MonkeyPatch) -> None:
    """The grid, timed on the CPU: cuDNN is missing there, as eager is on a GPU where memory ends."""
    patch.setattr(gpu, "burst", lambda function: [function(), 1e-6][1])
    results = []
    for shape in map(Shape.parse, ("1x2x64x16", "1x2x128x16", "1x2x64x16:causal")):
        tensors = tuple(torch.randn(shape.B, shape.S, shape.H, shape.D) for _ in "qkvo")
        results += gpu._measure(shape, torch.float32, tensors, ("eager", "cudnn"), 2)
    assert "cudnn" in results[0]["missing"]
    data = gpu._data(results, ["1x1x32x16 bf16: o is off by 1, more than 0.1"], ("eager", "cudnn"), 2)
    _write(folder / "bench-gpu.json", "bench", data, patch)


def _features(folder: Path, patch: MonkeyPatch) -> None:
    sets = ((gpu_features.FEATURES, 64), (gpu_features.WINDOWS, 64))
    sizes = {"DEVICE": "cpu", "CHECKED": 32, "SETS": sets, "WINDOW": 8, "D": 16, "HEADS": 4}
    for name, value in sizes.items():
        patch.setattr(gpu_features, name, value)
    patch.setattr(torch, "compile", lambda function, **_: function)
    patch.setattr(gpu_features, "burst", lambda function: [function(), 1e-6][1])
    data = gpu_features.bench([torch.float32], 1, None, 1, lambda _: None)
    _write(folder / "bench-features.json", "bench", data, patch)


def _generations(folder: Path, patch: MonkeyPatch) -> None:
    """All three, the second in the place of the third."""
    three = [lab.find("flash1"), lab.find("flash2"), replace(lab.find("flash2"), name="flash3")]
    patch.setattr(lab_generations, "chosen", lambda *_: three)
    shapes = ("--shape", "1x2x64x16:causal", "--shape", "1x1x96x16")
    _run(folder, "lab-generations", "lab", "generations", "--device", "cpu", *shapes, "--rounds", 1)


def _measured(folder: Path, patch: MonkeyPatch) -> None:
    """Counters made up in ncu's place; of one system none."""

    def measured(system, shape, which, dtype, dropout):
        if system == "flash3":
            raise counters.CounterError("no kernel of flash3 here")
        return [counters.Kernel("k", dict.fromkeys(counters.METRICS, 2.0e6) | {"seconds": 1e-4})]

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(io_measure, "device_facts", lambda: {"title": GPU, "sms": 132, "l2": 60 << 20})
    patch.setattr(counters, "find_ncu", lambda: "ncu")
    patch.setattr(counters, "measure", measured)
    _run(folder, "io-measured", "io", "--no-laws", "-B", 1, "-H", 2, "--sq", 256, "--measure", "--gpu", "h200-measured")


def _tests(folder: Path, patch: MonkeyPatch) -> None:
    report = load_gpu_report()
    found = report.empty("abc")
    report.add_test(found, "tests/test_conformance.py::test_a[plain-bfloat16-triton]", "passed", "")
    report.add_test(found, "tests/gpu/test_sizes.py::test_b", "failed", "E   AssertionError: o is off")
    report.add_test(found, "tests/gpu/test_sizes.py::test_c", "skipped", "needs two GPUs")
    found["sanitizers"]["memcheck"] = {"cases": ["plain"], "errors": 0, "unfinished": []}
    report.write(folder / "tests-gpu.json", found)


def load_gpu_report():
    """tests/gpu/report.py, which is no package."""
    path = Path(__file__).parent / "gpu" / "report.py"
    spec = importlib.util.spec_from_file_location("report", path)
    sys.modules["report"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write(path: Path, command: str, data: dict, patch: MonkeyPatch) -> None:
    """The file of a command that ran on a GPU."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    write_json(path, command, data, say=False)
    patch.setattr(torch.cuda, "is_available", lambda: False)
