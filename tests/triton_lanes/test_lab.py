"""FlashAttention-1's kernels: their bodies run by Triton's interpreter, or, without TRITON_INTERPRET, compiled for Hopper."""

import dataclasses

import pytest
import torch
import triton
from compiling import SHARED_BYTES, compiling_for, sass_of, spilled_bytes

from tilewise import lab
from tilewise.testing import Case, judge, make_inputs

FLASH1 = lab.find("flash1", "cuda")
CASES = [
    Case("full", Sq=64, D=16),
    Case("odd_lengths", B=1, Sq=71, Sk=37, H=3, D=40),
    Case("causal_rows_without_keys", B=1, Sq=70, Sk=45, mask=(("causal",),)),
    Case("window", B=1, Sq=70, mask=(("window", 17, 9),)),
    Case("blocks_causal", B=1, Sq=100, mask=(("blocks", 16, 32), ("causal",))),
]
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case):
    inputs = make_inputs(case)
    mask = inputs.options.get("mask")
    small = dataclasses.replace(FLASH1, fast_bytes=4 * 4 * 16 * case.D, device="cpu")
    assert judge(inputs, {"flash1": lambda q, k, v: small(q, k, v, mask)})["flash1"].complaints == []


@compiled
@pytest.mark.parametrize("D", [64, 128])
def test_compiles_for_hopper(D):
    q = torch.randn(1, 2, 512, D, dtype=torch.bfloat16)
    with compiling_for("sm_90") as found:
        _, kept = FLASH1.forward(q, q, q, None)
        FLASH1.backward(q, q, q, q, kept, None)
    assert [kernel.metadata.name for kernel in found] == ["flash1_forward_kernel", "flash1_backward_kernel"]
    for kernel in found:
        assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
        assert "HGMMA" in sass_of(kernel) and spilled_bytes(kernel) <= 64  # of 1,020 in registers: a fair opponent
