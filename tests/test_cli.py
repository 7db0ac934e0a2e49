"""Every command as users call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise.backends.cpu import CpuBackend
from tilewise.cli import bench, caps, memory, problems
from tilewise.cli.main import COMMANDS, app
from tilewise.dispatch import BACKENDS


def run(*args, code=0):
    """A command's output, both streams; its exit code is checked."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def error(*args, code=2):
    """The one line of an error."""
    output = run(*args, code=code)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output
    return lines[0].removeprefix("error: ")


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys; from typer.testing import CliRunner; from tilewise.cli.main import app\n"
        "print(CliRunner().invoke(app, ['--help']).output)\n"
        "print([m for m in ('numba', 'matplotlib', 'tilewise.cli.bench', 'tilewise.cli.train') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip().endswith("[]")
    assert all(name in output for name in COMMANDS)


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "tilewise", "caps", "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Example: tilewise caps" in " ".join(output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_with_an_example(name):
    assert f"Example: tilewise {name}" in " ".join(run(name, "--help").split())


def test_version_and_unknown_command():
    assert tilewise.__version__ in run("--version")
    assert "No such command" in run("paint", code=2)


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="--blocks"):
        run("--debug", "explain", "--blocks", "stripes")


# ---- caps ----


def test_caps(tmp_path):
    output = run("caps", "--json", tmp_path / "caps.json")
    assert "attention sinks" in output and "cpu runs here: yes" in output
    data = json.loads((tmp_path / "caps.json").read_text())
    assert data["command"] == "caps" and data["machine"]["torch"] == torch.__version__
    assert {"cpu", "cores", "numba", "python", "date"} <= data["machine"].keys()
    assert [b["name"] for b in data["backends"]] == [b.name for b in BACKENDS]
    assert data["backends"][0]["features"]["varlen"] is True


def test_caps_markdown_is_one_table():
    lines = run("caps", "--markdown").strip().splitlines()
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    assert "\n".join(lines) == caps.markdown_table()


@pytest.mark.parametrize("name", ["README.md", "docs/capabilities.md"])
def test_documents_embed_the_table_of_the_code(name):
    """Refresh with `tilewise caps --markdown`."""
    page = Path(__file__).parent.parent / name
    if not page.exists():
        pytest.skip(f"{name} is not part of this tree")
    text = page.read_text()
    begin, end = "<!-- caps:begin -->", "<!-- caps:end -->"
    assert begin in text and end in text
    assert text.split(begin)[1].split(end)[0].strip() == caps.markdown_table()


# ---- explain ----


def test_explain_everything(tmp_path):
    output = run(
        *("explain", "-B", 2, "--sq", 96, "--sk", 128, "-H", 4, "--kv-heads", 2, "-D", 32, "--value-dim", 16),
        *("--dtype", "bf16", "--causal", "--window", "40,-1", "--prefix", 8, "--chunk", 64, "--softcap", 30, "--alibi"),
        *("--bias", "--sinks", "--dropout", 0.1, "--block-m", 16, "--block-n", 16),
        *("--json", tmp_path / "e.json", "--plot", tmp_path / "e.png"),
    )
    assert "backend" in output and "█" in output + "█" and "▒" in output
    data = json.loads((tmp_path / "e.json").read_text())
    features = {"causal", "window", "prefix", "chunk", "softcap", "alibi", "bias", "sinks", "dropout", "gqa", "d_ne_dv"}
    assert set(data["features"]) == features
    assert data["backend"] == "cpu" and data["problem"]["dtype"] == "bfloat16"
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


def test_explain_patterns_and_documents(tmp_path):
    run("explain", "--sq", 64, "--blocks", "butterfly", "--block-m", 8, "--block-n", 8, "--json", tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    assert data["tile_plan"]["rows"][0] == "███·█···"
    assert data["cost"]["tiles"] == {"full": 8 * 8 * 4, "masked": 0, "skipped": 8 * 8 * 4}
    assert "document mask" in run("explain", "--sq", 64, "--documents", "20,44")
    assert "block-sparse" in run("explain", "--sq", 64, "--blocks", "local-global", "--block-m", 8, "--block-n", 8)


def test_explain_more_than_fits_in_memory():
    assert "TiB" in run("explain", "--sq", 1 << 17, "-H", 64, "--block-m", 2048, "--block-n", 2048)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kv-heads", 3), "multiple of kv heads"),
        (("--blocks", "stripes"), "--blocks must be one of butterfly, local-global, got 'stripes'"),
        (("--window", "1"), "--window must be LEFT,RIGHT"),
        (("--window", "a,b"), "--window must be integers separated by commas"),
        (("--documents", "10,20"), "Document ids must cover"),
        (("--dtype", "int8"), "dtype must be one of"),
        (("--backend", "abacus"), "backend must be one of"),
        (("--dim", 1000), "head dim"),
        (("--sq", -1), "sizes must be >= 0"),
        (("--dropout", 1.5), "dropout_p must be"),
    ],
)
def test_explain_errors(args, words):
    assert words in error("explain", *args)


# ---- bench ----


def test_bench(tmp_path):
    output = run(
        *("bench", "--shape", "1x2x96x16", "--shape", "1x2/1x96x16:causal", "--dtype", "fp32", "--dtype", "bf16"),
        *("--rounds", 2, "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png"),
    )
    assert "geometric means" in output and "FMA peak" in output and "checked against the float64 reference" in output
    data = json.loads((tmp_path / "b.json").read_text())
    assert data["time"] == "cpu" and data["refused"] == [] and len(data["checked"]) == 4
    assert [(r["shape"], r["dtype"], r["pass"]) for r in data["results"][:2]] == [
        ("1x2x96x16", "fp32", "forward"),
        ("1x2x96x16", "fp32", "backward"),
    ]
    first = data["results"][0]
    assert len(data["results"]) == 8 and len(first["sdpa"]["cpu_seconds"]) == 2
    assert first["flops"] == 4 * 96 * 96 * 16 * 2
    assert first["tilewise"]["gflops"] == pytest.approx(first["flops"] / first["tilewise"]["seconds"] / 1e9)
    assert set(data["geometric_means"]) == {f"{d} {p}" for d in ("fp32", "bf16") for p in ("forward", "backward")}
    assert (tmp_path / "b.png").exists()


def test_bench_says_what_it_checked():
    output = run("bench", "--shape", "1x2x400x16:causal", "--dtype", "fp32", "--rounds", 1)
    assert "1x2x400x16:causal fp32: all of one kv head" in " ".join(output.split())


def test_bench_two_threads(tmp_path):
    before = torch.get_num_threads()
    output = run(
        *(
            "bench",
            "--two-threads",
            "--shape",
            "1x2x96x16",
            "--dtype",
            "fp32",
            "--rounds",
            2,
            "--json",
            tmp_path / "b.json",
        )
    )
    assert "Wall time on one and on two threads" in output
    data = json.loads((tmp_path / "b.json").read_text())
    assert data["time"] == "wall" and [r["threads"] for r in data["results"]] == [1, 1, 2, 2]
    assert torch.get_num_threads() == before


def test_bench_refuses_wrong_results(monkeypatch, tmp_path):
    forward = CpuBackend.forward

    def wrong(*args):
        o, *rest = forward(*args)
        return (o * 1.01, *rest)

    monkeypatch.setattr(CpuBackend, "forward", wrong)
    output = run(
        *("bench", "--shape", "1x2x400x16", "--dtype", "fp32", "--rounds", 1, "--json", tmp_path / "b.json"), code=1
    )
    assert "refused: 1x2x400x16 fp32 disagrees with the reference" in output
    data = json.loads((tmp_path / "b.json").read_text())
    assert data["refused"] == ["1x2x400x16 fp32"] and data["results"] == []


def test_bench_errors():
    assert "a shape is BxHxSxD" in error("bench", "--shape", "8x8")
    assert "dtype must be one of" in error("bench", "--dtype", "fp8")


def test_shapes_read_what_they_print():
    for shape in (*problems.PROBLEMS, problems.LONG, problems.Shape.parse("2x8/2x64x32:causal")):
        assert problems.Shape.parse(str(shape)) == shape
    assert bench.RIVALS == ("tilewise", "sdpa")


# ---- memory ----


def test_memory_of_the_model(tmp_path):
    args = ("--lengths", "1024,2048,65536", "--measure-up-to", 0, "--gib", 16)
    output = run("memory", *args, "--json", tmp_path / "m.json", "--plot", tmp_path / "m.png")
    assert "fits in 16.0 GiB" in output
    data = json.loads((tmp_path / "m.json").read_text())
    assert [p["N"] for p in data["points"]] == [1024, 2048, 65536]
    assert data["points"][1]["computed"]["tilewise"]["saved"] == 2 * data["points"][0]["computed"]["tilewise"]["saved"]
    assert data["out_of_memory_at"]["tilewise"] > 50 * data["out_of_memory_at"]["standard"]
    assert (tmp_path / "m.png").exists()


def test_memory_measured(tmp_path):
    run("memory", "--lengths", "512", "-H", 2, "--json", tmp_path / "m.json")
    (point,) = json.loads((tmp_path / "m.json").read_text())["points"]
    for who in memory.WHO:
        assert point["measured"][who]["saved"] == point["computed"][who]["saved"]
    assert point["measured"]["standard"]["peak"] == pytest.approx(point["computed"]["standard"]["peak"], rel=0.5)
    assert point["measured"]["tilewise"]["peak"] < 4 << 20


def test_memory_growth():
    points = [{"N": n, "measured": {"standard": {"saved": n * n, "peak": 3 * n * n}}} for n in (1024, 2048, 4096)]
    assert "(x4.00)" in memory._slopes(points)["standard"]
    assert "tilewise" not in memory._slopes(points)


def test_memory_of_the_paper(capsys):
    points = [{"N": n, "measured": {"tilewise": {"in_all": 135_000_000 * n // 1024}}} for n in (1024, 1500, 65536)]
    memory._show_paper(points)
    assert [p.get("paper_mb") for p in points] == [209, None, 13376]
    assert capsys.readouterr().out.count("65%") == 2


def test_memory_errors():
    assert "cpu or cuda" in error("memory", "--device", "tpu")
    if not torch.cuda.is_available():
        assert "no GPU" in error("memory", "--device", "cuda")
    assert "--lengths must be integers" in error("memory", "--lengths", "1k")
    assert "--lengths must be >= 1" in error("memory", "--lengths", "0")


# ---- doctor ----


def test_doctor(tmp_path):
    output = run("doctor", "--seconds", 0.1, "--json", tmp_path / "d.json")
    assert "Everything that tilewise needs works." in output
    data = json.loads((tmp_path / "d.json").read_text())
    topics = {f["topic"]: f for f in data["findings"]}
    assert data["healthy"] and topics["self test fp32"]["state"] == "good"
    assert topics["FMA peak"]["data"] > 0 and topics["speed backward"]["data"] > 0
    assert topics["kernel cache"]["data"]["kernels"] > 0


def test_doctor_finds_wrong_results(monkeypatch):
    from tilewise import testing

    right = testing.attention
    monkeypatch.setattr(testing, "attention", lambda *args, **options: [2 * t for t in right(*args, **options)])
    output = run("doctor", "--seconds", 0, code=1)
    assert "broken: self test fp32, self test bf16" in output


def test_missing_matplotlib_is_one_line(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert "pip install 'tilewise[plot]'" in error("explain", "--sq", 64, "--plot", "x.png")
