"""The CPU kernels against a dense fp64 oracle that reads nothing but a `Plan`."""

import dataclasses
import importlib.util
import math
import os
import threading

import pytest
import torch
from cpu_cases import BF16, CASES, F32, F64, Case, make_inputs
from cpu_oracle import assert_close, run_kernels, run_oracle
from torch import Tensor

from tilewise.backends.base import Needs
from tilewise.backends.cpu import key_tiles
from tilewise.backends.cpu.backward import backward
from tilewise.backends.cpu.forward import forward


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle(name):
    case = CASES[name]
    inputs = make_inputs(case)
    exact, dense, ours = run_oracle(case, inputs, F64), run_oracle(case, inputs, None), run_kernels(case, inputs)
    assert exact.keys() == ours.keys()
    for output, value in ours.items():
        assert_close(output, value, exact[output], dense[output])


def without_masked(case: Case, poison: float) -> dict[str, Tensor]:
    """A causal call whose last ten keys no row sees, and ten more only the last rows; `poison` sits in those."""
    inputs = make_inputs(case)
    hi = inputs.plan.hi.clamp(max=case.Sk - 10)
    for x in (inputs.k, inputs.v):
        x[:, case.Sk - 10 :] = poison
    return run_kernels(case, dataclasses.replace(inputs, plan=dataclasses.replace(inputs.plan, hi=hi)))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("D", [40, 37])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_unseen_keys_do_not_leak(dtype, poison, D):
    case = Case(Sq=150, Sk=150, D=D, Dv=D, window=(None, 0), dtype=dtype)
    clean, poisoned = without_masked(case, 0.0), without_masked(case, poison)
    for name in clean:
        assert torch.equal(clean[name], poisoned[name]), name


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("where", ["k", "v", "bias"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_bad_key_reaches_only_rows_that_see_it(dtype, where, softcap):
    case, key = Case(Sq=150, Sk=150, window=(20, 0), bias="mn", softcap=softcap, dtype=dtype), 77
    clean, bad = make_inputs(case), make_inputs(case)
    if where == "bias":
        bad.leaves["bias"][:, :, :, key] = math.nan
    else:
        getattr(bad, where)[:, key] = math.nan
    expected, got = run_kernels(case, clean), run_kernels(case, bad)
    rows = torch.arange(150)
    sees = (rows >= key) & (rows <= key + 20)
    for name in ("o", "dq"):
        assert torch.equal(expected[name][:, ~sees], got[name][:, ~sees]), name
    assert got["o"][:, sees].isnan().all()
    touched = (rows >= key - 20) & (rows <= key + 20)  # keys that one of those rows sees
    for name in ("dk", "dv"):
        assert torch.equal(expected[name][:, ~touched], got[name][:, ~touched]), name


@pytest.mark.parametrize("case", [Case(Sq=500, Sk=700), Case(Sq=500, Sk=500, H=4, window=(150, 3)), CASES["packed"]])
def test_held_key_tiles_change_nothing(case, monkeypatch):
    """A thread that stays with a head packs its keys once: the same bits, Inf and NaN included, as packing per block."""
    inputs, again = make_inputs(case), make_inputs(case)
    for x in (inputs, again):
        x.k[..., 150, 1, 5], x.v[..., 120, 0, 7] = math.nan, math.inf
    held = run_kernels(case, inputs)
    monkeypatch.setattr(key_tiles, "KEPT_BYTES", 0)
    for name, value in run_kernels(case, again).items():
        torch.testing.assert_close(held[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_plan_serves_tensors_of_other_strides_and_threads():
    case = Case(B=2, Sq=150, Sk=150, H=4, Hkv=2, window=(None, 0))
    inputs = make_inputs(case)
    expected = run_kernels(case, inputs)
    strided = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "do")}
    got = run_kernels(dataclasses.replace(case, threads=2), dataclasses.replace(inputs, **strided))
    for name in ("o", "lse", "max_logit"):
        assert torch.equal(expected[name], got[name]), name


def test_bias_of_minus_infinity_masks():
    case = Case(bias="mn")
    inputs = make_inputs(case)
    inputs.leaves["bias"][:, :, 3] = -math.inf  # row 3 sees nothing
    inputs.leaves["bias"][:, :, 5, ::2] = -math.inf
    inputs.leaves["bias"][:, :, 6] = torch.finfo(F32).min  # finite: uniform over all keys
    got = run_kernels(case, inputs)
    assert (got["o"][:, 3] == 0).all() and (got["lse"][:, :, 3] == -math.inf).all() and (got["dq"][:, 3] == 0).all()
    torch.testing.assert_close(got["o"][0, 6], inputs.v[0].mean(0))
    assert all(x.isfinite().all() for name, x in got.items() if name not in ("lse", "max_logit"))


@pytest.mark.parametrize("name", ["packed, everything", "bias over all", "two threads"])
def test_bitwise_reproducible(name):
    case = dataclasses.replace(CASES[name], threads=3)
    inputs = make_inputs(case)
    first, second = run_kernels(case, inputs), run_kernels(case, inputs)
    for output in first:
        assert torch.equal(first[output], second[output]), output


def test_only_needed_gradients():
    inputs = make_inputs(Case())
    o, lse, _ = forward(inputs.q, inputs.k, inputs.v, inputs.plan)
    call = (inputs.do, None, inputs.q, inputs.k, inputs.v, o, lse, inputs.plan)
    full = backward(*call, Needs(True, True, True, False, False, False))
    for name in ("dq", "dk", "dv"):
        needs = Needs(*(field_name == name for field_name in Needs._fields))
        grads = backward(*call, needs)._asdict()
        assert torch.equal(grads.pop(name), getattr(full, name))
        assert all(grad is None for grad in grads.values())


def test_no_output_gradient():
    inputs = make_inputs(Case())
    o, lse, _ = forward(inputs.q, inputs.k, inputs.v, inputs.plan)
    call = (inputs.q, inputs.k, inputs.v, o, lse, inputs.plan, Needs(True, True, True, False, False, False))
    only_lse = backward(None, inputs.dlse, *call)
    zeros = backward(torch.zeros_like(o), inputs.dlse, *call)
    assert all(torch.equal(a, b) for a, b in zip(only_lse[:3], zeros[:3], strict=True))


def test_concurrent_callers():
    """Several Python threads call at once, each with parallel regions of its own."""
    case = Case(Sq=400, Sk=400, H=4, Hkv=4, threads=2)
    inputs = [make_inputs(case, seed) for seed in range(4)]
    expected = [run_kernels(case, x) for x in inputs]
    got = [None] * 4

    def work(i):
        for _ in range(3):
            got[i] = run_kernels(case, inputs[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for want, have in zip(expected, got, strict=True):
        assert all(torch.equal(want[name], have[name]) for name in want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_fork():
    case = Case(Sq=400, Sk=400, H=4, Hkv=4, threads=2)
    inputs = make_inputs(case)
    expected = run_kernels(case, inputs)["o"]
    child = os.fork()
    if child == 0:
        o, _, _ = forward(inputs.q, inputs.k, inputs.v, inputs.plan)
        same = (o.numpy() == expected.numpy()).all()  # torch's own parallel loops hang after fork
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_edited_helpers_leave_no_stale_cache(tmp_path):
    """Numba's disk cache knows only the kernel's own file; the hash of all sources in `Lanes` tells it of the others."""
    path = tmp_path / "cached_kernel.py"
    path.write_text(
        "from tilewise.backends.cpu.launch import compile_kernel\n"
        "from tilewise.backends.cpu.simd import Lanes, vector_width\n\n\n"
        "def build(sources):\n"
        "    lanes = Lanes(32, 4, sources)\n\n"
        "    def kernel(address):\n"
        "        vector_width(lanes)\n\n"
        '    return compile_kernel(kernel, "test").stats\n'
    )
    module_spec = importlib.util.spec_from_file_location("cached_kernel", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert module.build("before").cache_misses and module.build("before").cache_hits
    assert module.build("after").cache_misses
