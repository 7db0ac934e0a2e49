"""`tilewise lab`: its commands on small problems."""

import json
import math
from pathlib import Path

import pytest
import torch
from test_cli import error, run

from tilewise import lab
from tilewise.cli import lab_compare, memory, memory_point
from tilewise.cli.lab_common import draw
from tilewise.cli.lab_errors import INPUTS
from tilewise.cli.lab_sparsity import fit

COMMANDS = ("compare", "errors", "generations", "sparsity", "memory")
STORED = Path(__file__).parent.parent / "benchmarks" / "results" / "lab-compare-cpu-zen3.json"


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    """Memory is measured here, not in processes of their own: seconds less, and no figure is judged."""
    monkeypatch.setattr(memory, "measure", lambda point: memory_point.measure(**point))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_with_an_example(name):
    assert f"Example: tilewise lab {name}" in " ".join(run("lab", name, "--help").split())
    assert name in run("lab", "--help")


def test_compare(tmp_path):
    files = ("--json", tmp_path / "c.json", "--plot", tmp_path / "c.png")
    output = run("lab", "compare", "-n", 96, "-D", 16, "--causal", "--tiles", "32,64", "--rounds", 1, *files)
    assert "recompute-tiles by tile size" in output and "times less" in output
    data = json.loads((tmp_path / "c.json").read_text())
    assert [r["system"] for r in data["results"]] == lab.names()
    assert all(r["exact"] and r["forward"]["seconds"] > 0 and r["backward"]["seconds"] > 0 for r in data["results"])
    saved = {r["system"]: r["saved_bytes"] for r in data["results"]}
    assert saved["standard"] == 4 * (3 * 96 * 16 + 96 * 96) + 96 * 96
    assert saved["recompute-tiles"] == 4 * (4 * 96 * 16 + 2 * 96)
    assert [point["tile"] for point in data["sweep"]] == [32, 64]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_compare_refuses_wrong_results(monkeypatch):
    right = lab.StandardAttention.attend
    monkeypatch.setattr(lab.StandardAttention, "attend", lambda self, q, k, v, mask: 1.01 * right(self, q, k, v, mask))
    args = ("-n", 64, "-D", 16, "--system", "standard", "--system", "flash1", "--tiles", 0, "--rounds", 1)
    output = run("lab", "compare", *args, code=1)
    assert "standard disagree with the reference" in output and "NO" in output


def test_the_bars_of_the_stored_run():
    """n = 4096, d = 128, float32: what is kept, and a backward pass that recomputes and is faster."""
    data = json.loads(STORED.read_text())
    assert (data["problem"]["N"], data["problem"]["D"], data["problem"]["dtype"]) == (4096, 128, "fp32")
    found = {r["system"]: r for r in data["results"]}
    standard, tiled = found[lab_compare.BASELINE], found[lab_compare.TILED]
    assert (standard["saved_bytes"], tiled["saved_bytes"]) == (73_400_320, 8_421_376)
    assert tiled["backward"]["seconds"] < standard["backward"]["seconds"]


def test_errors(tmp_path, monkeypatch):
    """Rounding on every kind of inputs, and a system that is wrong stands out."""
    size = ("-n", 96, "-D", 16, "-H", 2, "--causal", "--rounds", 1, "--json", tmp_path / "e.json")
    run("lab", "errors", *size)
    results = json.loads((tmp_path / "e.json").read_text())["results"]
    assert {(r["inputs"], r["system"]) for r in results} == {(i, s) for i in INPUTS for s in (*lab.names(), "sdpa")}
    assert all(0 < error < 1e-6 for r in results for error in r["errors"].values())
    right = lab.StandardAttention.attend
    monkeypatch.setattr(lab.StandardAttention, "attend", lambda self, q, k, v, mask: 1.01 * right(self, q, k, v, mask))
    output = run("lab", "errors", *size, "--system", "standard")
    found = {r["system"]: r["errors"]["o"] for r in json.loads((tmp_path / "e.json").read_text())["results"]}
    assert found["standard"] > 1e3 * found["sdpa"] and "rising" in output


def test_hard_inputs_are_hard():
    """Every tile of 128 keys raises every row's maximum by more than 8 in base 2; outliers are rare."""
    tensors = draw(1, 512, 2, 64, torch.float32, "cpu")
    q, k, _, _ = INPUTS["rising"](tensors)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / 8
    largest = scores.unflatten(-1, (4, 128)).amax(-1)
    assert float((largest.diff() / math.log(2)).mean()) > 8
    changed = [(a != b).float().mean() for a, b in zip(INPUTS["outliers"](tensors), tensors)]
    assert all(3e-4 < share < 3e-3 for share in changed[:3]) and changed[3] == 0


def test_sparsity(tmp_path):
    files = ("--json", tmp_path / "s.json", "--plot", tmp_path / "s.png")
    output = run("lab", "sparsity", "-n", 256, "-D", 16, "--block", 32, "--rounds", 1, *files)
    assert "r^2" in output and "butterfly" in output
    data = json.loads((tmp_path / "s.json").read_text())
    assert {p["family"] for p in data["points"]} == {"butterfly", "local+global", "random"}
    assert max(p["density"] for p in data["points"]) == 1.0
    assert data["fits"]["bytes forward"]["r2"] > 0.999
    assert (tmp_path / "s.png").exists()


def test_a_line_is_fitted():
    rows = [{"density": x, "y": 3 + 2 * x} for x in (0.1, 0.4, 1.0)]
    assert fit(rows, lambda row: row["y"]) == pytest.approx({"slope": 2.0, "intercept": 3.0, "r2": 1.0})


def test_memory(tmp_path):
    files = ("--json", tmp_path / "m.json", "--plot", tmp_path / "m.png")
    args = ("--lengths", "512,65536,1048576", "--measure-up-to", 512, "--gib", 4, "-D", 32)
    output = run("lab", "memory", *args, "--system", "standard", "--system", "flash1", *files)
    assert "OOM" in output and "~" in output
    data = json.loads((tmp_path / "m.json").read_text())
    first, *rest = data["points"]
    assert first["measured"].keys() == {"standard", "flash1"} and not any(p["measured"] for p in rest)
    for who, measured in first["measured"].items():
        assert measured["saved"] == first["computed"][who]["saved"]
    assert data["out_of_memory_at"]["flash1"] > 50 * data["out_of_memory_at"]["standard"]


def test_generations(tmp_path):
    files = ("--json", tmp_path / "g.json", "--plot", tmp_path / "g.png")
    shapes = ("--shape", "1x2x64x16:causal", "--shape", "1x1x96x16")
    output = run("lab", "generations", "--device", "cpu", *shapes, "--rounds", 1, *files)
    assert "flash2 over flash1" in output and "the papers" in output
    data = json.loads((tmp_path / "g.json").read_text())
    assert len(data["results"]) == 4 and data["refused"] == []
    assert data["geometric_means"].keys() == {"flash2 over flash1 forward", "flash2 over flash1 backward"}
    assert (tmp_path / "g.png").exists()


def test_generations_name_what_failed(monkeypatch):
    def broken(self, q, k, v, mask):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(lab.Flash1, "attend", broken)
    output = run("lab", "generations", "--device", "cpu", "--shape", "1x1x64x16", "--rounds", 1, code=1)
    assert "flash1: RuntimeError: out of resource" in output


def test_usage_errors():
    assert "systems on cpu are" in error("lab", "compare", "--system", "flash3")
    assert "dtype must be one of" in error("lab", "sparsity", "--dtype", "fp8")
    if not torch.cuda.is_available():
        assert "no GPU" in error("lab", "generations")
