"""`tilewise io` and `tilewise fit` as users call them."""

import json

import pytest
import torch
from test_cli import error, run

from tilewise.cli import io_measure, io_simulate
from tilewise.io_model import counters
from tilewise.io_model.gpus import gpu_of


def test_io_of_the_papers_shape(tmp_path):
    output = run("io", "--json", tmp_path / "io.json", "--plot", tmp_path / "io.png", "--tensors")
    assert "bound by" in output and "exponentials" in output and "N^2 d^2 / M" in output
    data = json.loads((tmp_path / "io.json").read_text())
    assert (tmp_path / "io.png").stat().st_size > 10_000
    standard, flash = (data["systems"][name] for name in ("standard", "flash2"))
    passes = [s[which] for s in (standard,) for which in ("forward", "backward")]
    matrices = 11 * 64 * 16 * 1024**2 * 2
    assert sum(p["bytes_read"] + p["bytes_written"] for p in passes) == matrices + 12 * 64 * 16 * 1024 * 64 * 2
    assert flash["forward"]["predicted"]["seconds"] < standard["forward"]["predicted"]["seconds"] / 5
    assert flash["forward"]["tensors"]["q"] == {"loads": 64 * 16 * 1024 * 64, "stores": 0}
    assert {law["system"] for law in data["laws"]["exponents"]} == {"standard", "flash1", "flash2", "triton"}


def test_io_of_other_problems():
    args = ("io", "--no-laws", "-B", 1, "-H", 4, "--sq", 512, "-D", 64, "--systems", "standard,flash2")
    output = run(*args, "--kv-heads", 2, "--sk", 256, "--causal", "--window", "100,-1", "--gpu", "a100-40gb")
    assert "H4/2 Sq512 Sk256" in output and "causal" in output and "flash1" not in output
    assert "64x32" in run(*args, "--block-m", 64, "--block-n", 32)
    assert "16x16" in run(*args, "--blocks", "butterfly", "--block-m", 16, "--block-n", 16)
    assert "document" in run(*args, "--documents", "100,412", "--sram", 16)
    assert "mi300x" not in run(*args, "--gpu", "mi300x", "--value-dim", 32)


def test_io_executes_small_problems(tmp_path, monkeypatch):
    args = ("io", "--no-laws", "--simulate", "--json", tmp_path / "io.json")
    assert "executed with a counted memory" in run(*args)
    rows = json.loads((tmp_path / "io.json").read_text())["simulated"]
    assert {row["system"] for row in rows} == {"standard", "flash1", "flash2", "flash3", "triton"}
    assert all(row["formula"] == row["executed"] > 0 for row in rows) and len(rows) == 80
    monkeypatch.setattr(io_simulate, "_counts", lambda *_: {"forward": (1, 2)})
    assert "counts differ from their formulas" in error(*args, code=1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpu", "tpu"), "--gpu must be one of"),
        (("--systems", "flash9"), "--systems must be of"),
        (("--block-m", 64), "both --block-m and --block-n"),
        (("--sram", 0), ">= 1"),
        (("--dtype", "fp64"), "no peak for torch.float64"),
        (("--dtype", "int"), "dtype must be one of"),
        (("--blocks", "stripes"), "--blocks must be one of"),
        (("-H", 3, "--kv-heads", 2), "multiple of kv heads"),
    ],
)
def test_io_errors(args, words):
    assert words in error("io", "--no-laws", *args)


def test_measuring_needs_a_gpu_and_ncu(monkeypatch):
    small = ("io", "--no-laws", "-B", 1, "-H", 1, "--sq", 64, "--measure")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--measure needs a GPU" in error(*small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters, "find_ncu", lambda: "ncu")
    assert "--measure takes no mask or --causal" in error(*small, "--window", "8,8")
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert "not on PATH" in error(*small, code=1)


def test_measuring_prints_counters_beside_the_prediction(monkeypatch, tmp_path):
    def measured(system, shape, which, dtype, dropout):
        if system == "flash1":
            raise counters.CounterError("flash1 is not installed")
        values = dict.fromkeys(counters.METRICS, 2.0e6) | {"seconds": 1e-3}
        return [counters.Kernel(f"{system} {shape} {which} {dtype} {dropout}", values)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(io_measure, "device_facts", lambda: {"title": "a GPU", "sms": 7, "l2": 1})
    monkeypatch.setattr(counters, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(counters, "measure", measured)
    small = (
        "io",
        "--no-laws",
        "-B",
        2,
        "-H",
        4,
        "--sq",
        64,
        "--measure",
        "--dropout",
        0.1,
        "--systems",
        "flash1,flash2",
    )
    output = run(*small, "--causal", "--json", tmp_path / "io.json")
    assert (
        "Hardware counters" in output
        and "not measured" in output
        and "L2 of 60.0 MiB holds" in " ".join(output.split())
    )
    rows = json.loads((tmp_path / "io.json").read_text())["measured"]
    assert rows[0]["error"] == "flash1 is not installed"
    assert rows[2]["by_kernel"][0]["name"] == "flash2 2x4x64x64:causal forward fp16 0.1"
    assert rows[2]["counted"]["dram_bytes"] == 4e6
    monkeypatch.undo()
    again = [arg for arg in small if arg != "--measure"]
    earlier = (*again, "--causal", "--counted", tmp_path / "io.json")
    assert "Hardware counters" in run(*earlier, "--json", tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["measured"] == rows
    assert "no counters of flash1 forward 2x4x64x64 dropout 0.1" in error(*again, "--counted", tmp_path / "io.json")
    assert "counters are of fp16, not bf16" in error(*earlier, "--dtype", "bf16")
    assert "--measure or --counted, not both" in error(*earlier, "--measure")
    assert "no result of tilewise io --measure" in error(*again, "--counted", _written(tmp_path, "{}"))
    assert "--counted" in error(*again, "--counted", _written(tmp_path, "not JSON"))


def _written(folder, text):
    (folder / "other.json").write_text(text)
    return folder / "other.json"


def test_counters_that_are_missing_are_shown_as_such(capsys):
    nothing = counters.total([counters.Kernel("k", {})])
    predicted = {"tile_bytes": 1, "dram_bytes": 1}
    io_measure.show([{"system": "x", "pass": "forward", "counted": nothing, "predicted": predicted}], gpu_of("h200"))
    assert capsys.readouterr().out.count(" - ") >= 6


def test_fit(tmp_path):
    args = ("fit", "--model", "gpt2-small", "--gpu", "a100-40gb", "--contexts", "1024,8192,65536")
    output = run(*args, "--json", tmp_path / "fit.json", "--plot", tmp_path / "fit.png")
    assert "124M parameters" in output and "Longest context" in output and "none" in output
    point = json.loads((tmp_path / "fit.json").read_text())["points"][0]
    assert point["largest_context"]["tilewise"] > 5 * point["largest_context"]["standard"]
    assert point["largest_batch"]["65536"]["standard"] == 0
    assert (tmp_path / "fit.png").stat().st_size > 10_000


def test_fit_all_and_errors():
    output = run("fit", "--model", "all", "--gpu", "t4", "--contexts", "1024", "--no-dropout")
    assert "BERT large" in output and "nothing fits" in output
    assert "--model must be one of" in error("fit", "--model", "gpt5")
    assert "--contexts must be >= 1" in error("fit", "--contexts", "0")
    assert "integers" in error("fit", "--contexts", "1k")
