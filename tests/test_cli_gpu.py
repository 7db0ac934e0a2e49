"""What of `tilewise bench --device cuda` needs no GPU: its check, its means, its picture, its refusals."""

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise.cli import gpu, gpu_features, gpu_rivals, measure
from tilewise.cli.main import app
from tilewise.cli.problems import Shape

SHAPE = Shape.parse("2x3x40x16:causal")


@pytest.fixture
def check(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    return lambda: gpu._check(SHAPE, torch.bfloat16, ())


def _results():
    rates = [("1x2x512x64:causal", 300.0, 200.0), ("1x2x1024x64:causal", 400.0, 100.0)]
    return [
        {"shape": shape, "dtype": "bf16", "pass": name, "tflops": {gpu.OURS: ours, "flash": theirs}}
        for shape, ours, theirs in rates
        for name in gpu.PASSES
    ]


def test_the_grid_is_the_papers():
    assert len(gpu.GRID) == 36
    assert {(s.B * s.S, s.H * s.D) for s in gpu.GRID} == {(gpu.TOKENS, gpu.HIDDEN)}


def test_right_results_pass_the_check(check):
    assert check() == ""


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_wrong_results_do_not(monkeypatch, check, factor):
    right = gpu.ours(SHAPE)
    monkeypatch.setattr(gpu, "ours", lambda shape: lambda q, k, v: right(q, k, v * factor))
    assert check().startswith("tilewise: o ")


def test_processes_give_what_one_gives_in_order():
    arguments = [(3, 4), (7, 2), (5, 5)]
    assert list(measure.in_processes(max, arguments, 2)) == list(measure.in_processes(max, arguments, 1)) == [4, 7, 5]


def test_no_size_of_flex_attention_runs_uncompiled(monkeypatch):
    """PyTorch compiles eight by default; what comes after them is not what is to be timed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="eager", **options))
    sizes = range(16, 26)
    with torch.no_grad():
        for S in sizes:
            q, k, v = torch.randn(3, 1, 2, S, 16)
            found = gpu._flex(Shape(1, 2, 2, S, 16, False))(q, k, v)
            torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(sizes)


def test_kernels_that_do_not_start_are_refused(monkeypatch, on_cpu):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")

    def broken(*_, **__):
        raise RuntimeError("out of shared memory\nmore")

    monkeypatch.setattr(gpu, "ours", lambda shape: broken)
    monkeypatch.setattr(gpu_features.tilewise, "attention", broken)
    said = "RuntimeError: out of shared memory"
    assert gpu._complaint(SHAPE, torch.float32, ()) == gpu_features._complaint("causal", torch.float32, None) == said


def test_means():
    means = gpu._means(_results(), ["flash", "cudnn"])
    assert means == pytest.approx({"forward over flash": 6**0.5, "backward over flash": 6**0.5})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    found = CliRunner().invoke(app, ["bench", "--device", "cuda"])
    assert found.exit_code != 0 and "no GPU" in found.output


@pytest.fixture
def on_cpu(monkeypatch):
    """The table of features, tiny and on the CPU; every timing is a second."""
    for name, value in {
        "DEVICE": "cpu",
        "CHECKED": 32,
        "SETS": ((gpu_features.FEATURES, 64), (gpu_features.WINDOWS, 64)),
        "WINDOW": 8,
        "D": 16,
        "HEADS": 4,
    }.items():
        monkeypatch.setattr(gpu_features, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(gpu_features, "burst", lambda function: [function(), 1.0][1])


def test_features_are_checked_and_compared_with_the_plain_kernel(on_cpu):
    parts = []
    data = gpu_features.bench([torch.float32], 2, None, 1, parts.append)
    assert data["refused"] == [] and parts[-1] is data
    rows = {(row["feature"], row["S"] and row["over"]): row for row in data["results"]}
    assert len(data["results"]) == len(gpu_features.FEATURES) + len(gpu_features.WINDOWS)
    plain, packed, documents = (rows[name, "causal"] for name in ("causal", "packed (varlen)", "documents"))
    assert plain["flops_share"] == plain["forward"]["times_per_flop"] == 1
    assert packed["flops"] == documents["flops"] < plain["flops"]
    assert packed["backward"]["times"] == 1 < packed["backward"]["times_per_flop"]
    assert plain["forward"]["rivals"] == {"flash": 1}
    assert plain["missing"].keys() == {"cudnn", "flex"} and packed["missing"].keys() == {"varlen"}


ON_A_CPU = [f for f in gpu_features.FEATURES + gpu_features.WINDOWS if "flex" in f.rivals]


@pytest.mark.parametrize("feature", ON_A_CPU, ids=lambda feature: feature.name)
def test_rivals_compute_the_same(on_cpu, feature):
    """FlexAttention, uncompiled, and SDPA: the output of each is ours, or they are not timed."""
    inputs = feature.call(64, 4, torch.float32)
    o = tilewise.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    found, _ = gpu_rivals.able([name for name in feature.rivals if name in ("flash", "flex")], inputs, o)
    assert found.keys() == {"flash", "flex"} & {*feature.rivals}
    assert gpu_rivals.able(feature.rivals, inputs, 1.1 * o)[0] == {}


def test_wrong_features_are_refused(on_cpu, monkeypatch):
    right = gpu_features.tilewise.attention
    monkeypatch.setattr(gpu_features.testing, "attention", lambda q, *rest, **options: right(q * 1.1, *rest, **options))
    assert gpu_features._complaint("causal", torch.float32, None).startswith("o ")


@pytest.mark.parametrize(
    "arguments", [["--device", "tpu"], ["--peer", "flash"], ["--features"], ["--backend", "triton"]]
)
def test_arguments_are_checked(arguments):
    found = CliRunner().invoke(app, ["bench", *arguments])
    assert found.exit_code != 0
    assert "cpu or cuda" in found.output + str(found.exception)
