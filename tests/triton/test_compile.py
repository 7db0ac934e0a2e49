"""The Triton kernels compile for every GPU they ship for, within its shared memory. No GPU is needed."""

import pytest
import torch
from compiling import SHARED_BYTES, compile_call

from tilewise.testing import Case, make_inputs

CAUSAL = ("causal",)
CASES = [
    Case("causal_d64", Sq=512, H=4, Hkv=2, D=64, mask=(CAUSAL,)),
    Case("full_d128", Sq=512, H=2, D=128),
    Case("causal_d256", Sq=256, H=2, D=256, mask=(CAUSAL,)),
    Case("blocks", B=1, Sq=200, Sk=230, mask=(("blocks", 32, 64),)),
    Case("mix_everything", Sq=65, Sk=80, H=4, Hkv=2, D=20, Dv=36, softcap=4.0, alibi="BH", bias="BHQK", sinks=True,
         dropout=0.2, mask=(("document", "BS"), ("window", 50, 40))),
    Case("varlen", lengths_q=(60, 35), lengths_k=(70, 30), H=4, D=64, bias="H1Q1",
         mask=(("window", 25, 9), ("chunk", 32), ("prefix", 30))),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("target", ["sm_90"])
def test_compiles(target, case, dtype):
    kernels = compile_call(make_inputs(case, dtype), target)
    assert kernels
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES[target], kernel.name
