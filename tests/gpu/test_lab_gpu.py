"""The systems of the lab on a GPU, FlashAttention-1's kernels and the backends by name among them, by the float64 rule."""

import pytest
import torch
from lane import needs_cuda
from test_lab import CASES

from tilewise import lab
from tilewise.testing import Case, judge, make_inputs

pytestmark = needs_cuda
#: More tiles than one along both sides, at the head dims of the papers.
LARGER = [Case(f"d{D}", B=2, Sq=600, Sk=700, H=3, D=D, mask=(("causal",),)) for D in (64, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=lambda case: case.name)
def test_systems_are_exact(case, dtype):
    inputs = make_inputs(case, dtype, device="cuda")
    mask = inputs.options.get("mask")
    systems = [lab.find(name, "cuda") for name in lab.names("cuda")]
    able = [s for s in systems if not s.why_not(inputs.q, inputs.k, inputs.v, mask)]
    verdicts = judge(inputs, {s.name: lambda q, k, v, s=s: s(q, k, v, mask) for s in able})
    assert "standard" in verdicts
    assert {name: v.complaints for name, v in verdicts.items() if v.complaints} == {}
