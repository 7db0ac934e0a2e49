"""The Triton kernels around the Hopper backward kernel, run by Triton's interpreter: rows prepared, dq finished, repair.

As if every sum of the Hopper kernel, which has no interpreter, were NaN: then the repair computes all gradients.
"""

import importlib

import pytest
import torch
import triton

from tilewise.backends.base import Needs
from tilewise.backends.device.lower import lower
from tilewise.backends.triton import TritonBackend
from tilewise.testing import Case, bind, make_inputs

assert triton.knobs.runtime.interpret, "run with TRITON_INTERPRET=1"

hopper = importlib.import_module("tilewise.backends.gluon.backward")
rows = importlib.import_module("tilewise.backends.gluon.backward_rows")
CAUSAL = ("causal",)
CASES = [
    Case("one_query", Sq=1, Sk=129, H=4, Hkv=2, D=64),
    Case("causal_wide", B=1, Sq=70, Sk=80, H=2, D=192, mask=(CAUSAL,)),
    Case("varlen", lengths_q=(60, 0, 35), lengths_k=(70, 5, 30), H=4, Hkv=2, D=64, softcap=3.0, mask=(CAUSAL,)),
    Case("poisoned", B=1, Sq=70, Sk=50, H=2, D=64, mask=(CAUSAL,), poison=True),
    Case("poisoned_sinks", B=1, Sq=70, Sk=50, H=2, D=64, mask=(CAUSAL,), sinks=True, poison=True),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_broken_sums_are_summed_again(case):
    inputs = make_inputs(case, torch.float16)
    bound, q, k, v = bind(inputs), inputs.q, inputs.k, inputs.v
    lengths = (bound.cu_seqlens_q, bound.cu_seqlens_k) if inputs.varlen else ()
    longest = [int(t.diff().max()) for t in lengths if t is not None] or [0, 0]
    portable = TritonBackend()
    o, lse, _ = portable.forward(q, k, v, bound, *longest)
    do, dlse = inputs.upstream()
    expected = portable.backward(
        do, dlse, q, k, v, o, lse, bound, *longest, Needs(True, True, True, False, False, False)
    )
    call = lower(q, k, bound, *longest)
    config = hopper.backward_config(q.shape[-1], v.shape[-1], call.scoring.scale is None)
    found = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    launch = hopper._Launch(q, k, v, do, lse, found, call, config)
    launch.prepare(o, dlse)
    launch.dq_sum.fill_(torch.nan)
    launch.broken_keys.fill_(1)
    launch.finish()
    launch.repair()
    for got, want in zip(found, expected[:3], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_what_products_start_from_is_exact():
    """The terms of -lse and -delta add up to them, to the last bit but one; rows that see no key start below all scores."""
    inputs = make_inputs(Case("causal", B=1, Sq=150, Sk=100, H=2, D=64, mask=(CAUSAL,)), torch.float16)
    bound, q, k, v = bind(inputs), inputs.q, inputs.k, inputs.v
    o, lse, _ = TritonBackend().forward(q, k, v, bound, 0, 0)
    do, dlse = inputs.upstream()
    call = lower(q, k, bound, 0, 0)
    config = hopper.backward_config(64, 64, True)
    launch = hopper._Launch(q, k, v, do, lse, (q.clone(), k.clone(), v.clone()), call, config)
    launch.prepare(o, dlse)
    assert launch.starts is not None
    starts = launch.starts.double()
    minus_lse = launch.minus_lse.double().clamp(min=rows.LEAST.value)
    assert (launch.minus_lse == -torch.inf).any()
    for terms, number in ((starts[:, :8], minus_lse), (starts[:, 8:], launch.minus_delta.double())):
        assert ((terms.sum(1) - number).abs() <= 2.0**-23 * number.abs()).all()
        assert not terms[:, rows.TERMS.value :].any()


@pytest.mark.parametrize("part", [32, 64])
def test_sums_of_dq_are_put_in_order(part):
    inputs = make_inputs(Case("full", B=1, Sq=64, H=1, D=64), torch.float16)
    q, k, v = inputs.q, inputs.k, inputs.v
    call = lower(q, k, bind(inputs), 0, 0)
    config = hopper.BackwardConfig(2 * part, 128)
    launch = hopper._Launch(q, k, v, q, q.new_zeros(1, 1, 64).float(), (q.clone(), k.clone(), v.clone()), call, config)
    assert launch.part == part
    expected = torch.randn(64, 64).half().float()
    # Shares of some columns; in each eight columns, four warps of 16 rows, eight rows, four pairs, two rows, a pair.
    shares = expected.reshape(4, 2, 8, 64 // part, part // 8, 4, 2).permute(3, 4, 0, 2, 5, 1, 6)
    launch.dq_sum[: 64 * 64] = shares.reshape(-1)
    launch.finish()
    torch.testing.assert_close(launch.dq[0, :, 0].float(), expected * call.bound.softmax_scale, rtol=1e-3, atol=1e-4)
