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
