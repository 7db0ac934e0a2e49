"""The IO model: the papers' formulas, laws, GPUs, roofline, what fits, and ncu's output."""

import math

import pytest
import torch

import tilewise
from tilewise import masks
from tilewise.dispatch import BACKENDS
from tilewise.io_model import counters, fit, laws, workload
from tilewise.io_model.gpus import GPUS, gpu_of
from tilewise.io_model.models import MODELS, model_of
from tilewise.io_model.roofline import predict, read_again
from tilewise.io_model.systems import SYSTEMS, plain_problem, report, tiles_for
from tilewise.problem import Problem
from tilewise.spec import AttentionSpec, MaskTerm

N, D = 4096, 64


def elements(name, which, block=(256, 128), n=N):
    problem, bound = plain_problem(N=n, D=D, dtype=torch.float32)
    return getattr(report(SYSTEMS[name], problem, bound, lambda _: block), which).account.elements


def test_standard_is_4_and_7_matrices():
    assert elements("standard", "forward") == 4 * N * N + 4 * N * D
    assert elements("standard", "backward") == 7 * N * N + 8 * N * D


def test_flash1_forward_is_the_papers():
    visits = N // 128  # of every row, one per block of keys
    zeroed = N * D + 2 * N
    assert elements("flash1", "forward") == 2 * N * D + visits * (3 * N * D + 4 * N) + zeroed


def test_flash2_forward_is_the_papers():
    visits = N // 256
    assert elements("flash2", "forward") == 2 * N * D + 2 * N * D * visits + N


def test_flash2_backward_is_the_papers():
    visits, delta, zeroed = N // 128, 2 * N * D + N, N * D
    assert elements("flash2", "backward") == 4 * N * D + visits * (4 * N * D + 2 * N) + delta + zeroed


def test_flash1_backward_is_the_papers():
    assert elements("flash1", "backward") == 4 * N * D + (N // 128) * (5 * N * D + 2 * N) + N * D


def test_our_portable_backward_is_the_pages():
    keys, rows = N // 128, N // 256
    sweeps = 4 * N * D + keys * (2 * N * D + 2 * N) + 3 * N * D + 2 * N + 2 * N * D * rows
    assert elements("triton", "backward") == sweeps + 2 * N * D + 3 * N


def test_the_products_of_training_are_6_and_7():
    problem, bound = plain_problem(N=N, D=D)
    standard, flash = (report(SYSTEMS[n], problem, bound, lambda _: (256, 128)).both for n in ("standard", "flash2"))
    assert (standard.matmul, flash.matmul) == (6 * 2 * N * N * D, 7 * 2 * N * N * D)
    assert flash.matmul - flash.recomputed == standard.matmul and standard.recomputed == 0


def test_flash2_does_less_beside_products_than_flash1():
    problem, bound = plain_problem(N=N, D=D)
    one, two = (report(SYSTEMS[n], problem, bound, lambda _: (64, 128)).forward.account for n in ("flash1", "flash2"))
    assert one.matmul == two.matmul and one.other > 1.1 * two.other


def test_tiles_by_the_papers_rule():
    tiles = tiles_for(M=100 * 1024 // 2, D=64)
    assert tiles("keys") == (64, 200) and tiles("rows") == (200, 64)
    assert tiles_for(M=1000, D=64)("keys") == (4, 4)


def test_a_tile_by_the_rule_fits_the_chip_within_a_quarter():
    for M in (1 << 14, 1 << 16, 1 << 17):
        for d in (32, 64, 128, 256):
            problem, bound = plain_problem(N=1024, D=d)
            for name in ("flash1", "flash2"):
                found = report(SYSTEMS[name], problem, bound, tiles_for(M, d)).forward
                assert found.on_chip <= 1.26 * 2 * M


def test_memory_of_each_system():
    row, tensor = 4 * 1024, 1024 * 64 * 2
    for name, saved, forward, backward in (
        ("flash1", 2 * row, 2 * row + 2 * tensor, 2 * row + 2 * tensor),
        ("flash2", row, row, 2 * row + 2 * tensor),
        ("triton", row, row, 3 * row),
    ):
        problem, bound = plain_problem(N=1024, D=64)
        found = report(SYSTEMS[name], problem, bound, lambda _: (64, 64)).memory
        assert found == (4 * tensor + saved, forward, backward)


def test_standard_keeps_its_dropout_mask():
    plain, dropped = (
        report(SYSTEMS["standard"], *plain_problem(2, 3, 64, 16, dropout_p=p), lambda _: (64, 64)).memory
        for p in (0.0, 0.1)
    )
    assert [b - a for a, b in zip(plain, dropped, strict=True)] == 3 * [3 * 2 * 3 * 64 * 64]


# ---- laws ----


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["standard", "flash1", "flash2", "triton"])
def test_exponents_are_the_theorems_within_2_percent(name, backward):
    found = laws.law(SYSTEMS[name], backward).exponents
    expected = {"N": 2} if name == "standard" else {"N": 2, "d": 2, "M": -1}
    assert {x for x, fitted in found.items() if fitted is not None} == set(expected)
    for x, exponent in expected.items():
        fitted = found[x]
        assert abs(fitted.slope / exponent - 1) < 0.02 and fitted.residual < 0.02, (x, fitted)


@pytest.mark.parametrize("name", ["flash1", "flash2", "triton"])
def test_block_sparse_is_proportional_to_kept_tiles(name):
    found = laws.sparsity(SYSTEMS[name])
    assert found.r2 > 0.999999 and 0 < found.offset < 0.02 * found.slope


def test_fits():
    assert laws.power([1, 2, 4, 8], [5 * x**1.5 for x in (1, 2, 4, 8)])[:2] == pytest.approx((1.5, 5.0))
    assert laws.power([1, 2, 4], [1, 2, 8]).residual > 0.1
    assert laws.line([0, 1, 2], [1, 3, 5]) == pytest.approx((2, 1, 1))


# ---- GPUs and the roofline ----


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_gpus_are_plausible_and_have_sources(gpu):
    assert gpu.source and len(gpu.source) > 20
    assert 64 * 1024 <= gpu.sram <= 256 * 1024 and gpu.l2 < gpu.memory
    balance = gpu.matrix16 / gpu.bandwidth  # FLOP per byte
    assert 100 < balance < 300
    assert gpu.matrix8 is None or 1.8 < gpu.matrix8 / gpu.matrix16 <= 2.01
    assert gpu.vector <= gpu.matrix32 < gpu.matrix16


def test_exponentials_of_an_h100_are_what_flash_attention_3_says():
    assert gpu_of("h100").exponentials == pytest.approx(3.9e12, rel=0.02)
    assert gpu_of("mi300x").exponentials is None


def test_unknown_names_and_dtypes():
    with pytest.raises(ValueError, match="--gpu must be one of t4"):
        gpu_of("tpu")
    with pytest.raises(ValueError, match="--model must be one of gpt2-small"):
        model_of("gpt5")
    with pytest.raises(ValueError, match="no peak"):
        gpu_of("h100").peak(torch.float64)


def at(name, B=64, H=16, n=1024, d=64, gpu="h200"):
    problem, bound = plain_problem(B, H, n, d)
    found = report(SYSTEMS[name], problem, bound, tiles_for(gpu_of(gpu).sram // 2, d))
    return predict(found.forward, problem, gpu_of(gpu)), read_again(found.forward, problem, gpu_of(gpu))


def test_standard_is_bound_by_memory_and_flash_is_not():
    for gpu in GPUS:
        standard, flash = at("standard", gpu=gpu)[0], at("flash2", gpu=gpu)[0]
        assert standard.bound == "memory" and flash.bound != "memory"
        assert standard.seconds > 2 * flash.seconds
        assert standard.seconds == max(standard.seconds_by.values())


def test_what_fits_l2_as_a_whole_crosses_once():
    small, _ = at("standard", B=1, H=4, n=512)
    assert small.memory_bytes == 4 * (4 * 512 * 64 + 2 * 512 * 512) * 2 < small.bytes
    large, _ = at("standard")
    assert large.memory_bytes == large.bytes


def test_l2_hides_what_tiles_read_again_until_it_is_full():
    short, working_set = at("flash2")
    compulsory = 4 * 64 * 16 * 1024 * 64 * 2 + 64 * 16 * 1024 * 4
    assert working_set < gpu_of("h200").l2 and short.memory_bytes == compulsory < short.bytes
    long, working_set = at("flash2", B=1, H=16, n=1 << 18)
    assert working_set > gpu_of("h200").l2 and long.memory_bytes == long.bytes


def test_block_sparse_predictions_follow_kept_tiles():
    pattern = torch.eye(8, dtype=torch.bool)
    spec = AttentionSpec((MaskTerm(masks.Blocks.name, (128, 128), 1),))
    problem = Problem(spec, 1, 1, 1, 1024, 1024, 64, 64, torch.float16, "cuda", 1024, 1024)
    found = report(SYSTEMS["flash2"], problem, spec.bind([pattern], 0.125), tiles_for(1 << 16, 64))
    assert found.forward.block == (128, 128)
    assert found.forward.account.matmul == 8 * 128 * 128 * 4 * 64


# ---- what fits ----


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2-small", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6), ("bert-large", 335.2)],
)
def test_parameters_are_those_of_the_released_models(name, millions):
    assert MODELS[name].parameters() / 1e6 == pytest.approx(millions, abs=0.06)


def test_activations_are_those_of_korthikanti():
    model, b, s = MODELS["gpt3-1.3b"], 4, 2048
    step = fit.training_step(model, "standard", b, s)
    layer = s * b * model.width * 34 + 5 * model.heads * s * s * b
    assert step.attention + step.rest == model.layers * layer
    ours = fit.training_step(model, "tilewise", b, s)
    assert ours.attention + ours.rest == model.layers * (s * b * model.width * 34 + 4 * model.heads * s * b)


def test_what_fits_fits_and_one_more_does_not():
    model, memory = MODELS["gpt2-medium"], fit.usable(gpu_of("a100"), 2 << 30)
    for who in fit.WHO:
        batch = fit.largest_batch(model, who, 1024, memory)
        totals = [fit.training_step(model, who, b, 1024).total for b in (batch, batch + 1)]
        assert totals[0] <= memory < totals[1]
        context = fit.largest_context(model, who, 1, memory)
        totals = [fit.training_step(model, who, 1, n).total for n in (context, context + 1)]
        assert totals[0] <= memory < totals[1]
    assert fit.largest_batch(MODELS["gpt3-6.7b"], "tilewise", 1024, memory) == 0


def test_tilewise_grows_linearly_and_standard_quadratically():
    model = MODELS["gpt2-small"]
    for who, power in (("standard", 2), ("tilewise", 1)):
        one, two, four = (
            fit.training_step(model, who, 1, n, dropout=False).attention for n in (1 << 16, 1 << 17, 1 << 18)
        )
        assert math.log2((four - two) / (two - one)) == pytest.approx(power, abs=0.02)


# ---- hardware counters ----

#: In ncu's raw CSV format, with its lines around the table; the numbers are made up.
SAMPLE = """==PROF== Connected to process 4711 (/usr/bin/python3.11)
a line of the program, "with quotes"
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",""" + (
    ",".join(f'"{metric}"' for metric in counters.METRICS.values())
    + '\n"","","","","","","","","","","","ns","byte","byte","byte","byte","sector","sector","sector","%","%","inst","inst"\n'
    '"0","4711","python3.11","localhost","statistics_kernel","1","7","(128, 1, 1)","(16, 1, 1)","0","9.0",'
    '"1,000","2,048","1,024","4,096","512","128","16","0","0","40","10,000","0"\n'
    '"1","4711","python3.11","localhost","dq_kernel(float *, int)","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0",'
    '"3,000","1,000","0","8,000","88","250","0","3","60","20","90,000","30,000"\n'
)


def test_ncu_output_is_parsed():
    kernels = counters.parse(SAMPLE)
    assert [k.name for k in kernels] == ["statistics_kernel", "dq_kernel(float *, int)"]
    assert kernels[0].values["seconds"] == pytest.approx(1e-6) and kernels[1].values["l2_to_sm"] == 8000
    whole = counters.total(kernels)
    assert (whole["kernels"], whole["seconds"]) == (2, pytest.approx(4e-6))
    assert (whole["dram_bytes"], whole["tile_bytes"], whole["other_instructions"]) == (4072, 12696, 70000)
    assert (whole["tensor_pipe"], whole["occupancy"]) == (pytest.approx(45), pytest.approx(25))


def test_a_counter_that_a_gpu_lacks_is_none():
    kernels = counters.parse(SAMPLE.replace('"3","60"', '"3","n/a"'))
    assert counters.total(kernels)["tensor_pipe"] is None and counters.total(kernels)["occupancy"] is not None
    assert counters.total([])["dram_bytes"] is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("==ERROR== something\n", "no table of kernels: ==ERROR== something"),
        (SAMPLE.replace("dram__bytes_read.sum", "dram__read"), "lacks dram__bytes_read.sum"),
        (SAMPLE.replace('"ns"', '"fortnight"'), "'fortnight'"),
    ],
)
def test_ncu_output_that_is_not_as_expected(text, words):
    with pytest.raises(counters.CounterError, match=words):
        counters.parse(text)


#: A stand-in for ncu says that it knows every metric.
QUERY = f"[ $1 = --query-metrics ] && echo {' '.join(m.split('.')[0] for m in counters.METRICS.values())} && exit 0\n"


def _fake_ncu(tmp_path, monkeypatch, script):
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\n{script}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    counters.available.cache_clear()


def test_measuring_runs_ncu(tmp_path, monkeypatch):
    (tmp_path / "sample.csv").write_text(SAMPLE)
    _fake_ncu(tmp_path, monkeypatch, QUERY + f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/sample.csv')
    assert len(counters.measure("triton", "64x16x1024x64", "backward", "fp16", 0.1)) == 2
    asked = (tmp_path / "asked").read_text()
    assert "--csv --page raw" in asked and "dram__bytes_read.sum" in asked and "--profile-from-start off" in asked
    assert "tilewise.io_model.workload --system triton --shape 64x16x1024x64 --pass backward --dtype fp16" in asked


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (QUERY + "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1", "NVreg_RestrictProfilingToAdminUsers"),
        (QUERY + "echo no; exit 3", "failed on triton"),
        ("echo no GPU; exit 1", "does not list its metrics: no GPU"),
    ],
)
def test_measuring_says_why_not(tmp_path, monkeypatch, script, words):
    _fake_ncu(tmp_path, monkeypatch, script)
    with pytest.raises(counters.CounterError, match=words):
        counters.measure("triton", "1x1x64x16", "forward", "fp16", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(counters.CounterError, match="not on PATH"):
        counters.find_ncu()


def test_metrics_that_a_gpu_does_not_know_are_not_asked_for(tmp_path, monkeypatch):
    _fake_ncu(
        tmp_path, monkeypatch, QUERY.replace("sm__inst_executed_pipe_tensor ", "").replace("pipe_tensor &&", "x &&")
    )
    names = counters.available(counters.find_ncu())
    assert set(counters.METRICS) - set(names) == {"tensor_instructions"}
    assert "pipe_tensor.sum" not in " ".join(counters.command("ncu", [], names))
    cut = counters.total([counters.Kernel("k", dict.fromkeys(names, 1.0))])
    assert cut["instructions"] == 1 and cut["other_instructions"] is None


@pytest.mark.parametrize("causal", [False, True])
def test_the_measured_standard_attention_is_attention(causal):
    q, k, v = torch.randn(3, 2, 20, 3, 8).unbind()
    ours = tilewise.attention(q, k, v, causal=causal)
    torch.testing.assert_close(workload.attention_of("standard", 0.0, causal)(q, k, v), ours)
    assert set(workload.BACKENDS.values()) <= {row.name for row in BACKENDS}
    with pytest.raises(ValueError, match="flash2 is triton's forward"):
        workload.attention_of("flash2", 0.0)
