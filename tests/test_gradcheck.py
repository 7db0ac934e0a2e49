"""torch.autograd.gradcheck in float64, every feature, every differentiable input and both outputs, full Jacobians."""

import pytest
import torch
from torch.autograd import gradcheck

from tilewise import attention, attention_varlen, dispatch
from tilewise.testing import Case, make_inputs, why_not

SMALL = {"B": 1, "Sq": 5, "Sk": 8, "H": 2, "Hkv": 1, "D": 3, "dtypes": (torch.float64,)}
SHAPES = [Case(f"n{n}_d{d}", B=1, Sq=n, H=1, D=d, mask=(("causal",),)) for n in (1, 2, 5, 8, 17) for d in (1, 3, 8)]
FEATURES = [
    Case("sq_ne_sk", **SMALL | {"Sq": 9}, mask=(("causal",),)),
    Case("top_left", **SMALL, mask=(("causal", "top_left"),)),
    Case("gqa_dv", **SMALL | {"H": 3}, Dv=2),
    Case("window", **SMALL, mask=(("window", 2, 1),)),
    Case("prefix", **SMALL | {"B": 2}, mask=(("prefix", "B"),)),
    Case("chunk", **SMALL, mask=(("chunk", 3),)),
    Case("document", **SMALL, mask=(("document",),)),
    Case("blocks", **SMALL, mask=(("blocks", 2, 3, "HQK", 0.5),)),
    Case("dense", **SMALL, mask=(("dense", "HQK", 0.5),)),
    *(Case(f"softcap_{cap}", **SMALL, softcap=cap, softmax_scale=scale) for cap, scale in ((1.0, 3.0), (50.0, 20.0))),
    Case("alibi", **SMALL | {"B": 2}, alibi="BH"),
    Case("bias", **SMALL, bias="BHQK"),
    Case("bias_scalar", **SMALL, bias=""),
    Case("bias_keys", **SMALL, bias="H1K"),
    Case("sinks", **SMALL, sinks=True, mask=(("causal",),)),
    Case("sinks_rows_without_keys", **SMALL | {"Sq": 9, "Sk": 5}, sinks=True, mask=(("causal",),)),
    Case("dropout", **SMALL, dropout=0.4),
    Case("scale", **SMALL, softmax_scale=-0.7),
    Case("varlen", lengths_q=(3, 0, 2), lengths_k=(4, 2, 1), H=2, Hkv=1, D=3, spare=1, mask=(("causal",),)),
    Case("seqused", lengths_q=(3, 4), lengths_k=(4, 3), used_q=(2, 4), used_k=(3, 0), H=1, D=3),
    Case("mix", **SMALL, softcap=2.0, alibi="H", bias="1HQK", sinks=True, dropout=0.2, mask=(("window", 4, 2),)),
    Case("mix_varlen", lengths_q=(3, 4), lengths_k=(5, 3), H=2, Hkv=1, D=2, softcap=2.0, alibi="BH", bias="BHQK",
         sinks=True, dropout=0.2, mask=(("causal",),)),
]  # fmt: skip


@pytest.mark.parametrize("backend", dispatch.names())
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in SHAPES + FEATURES])
def test_gradcheck(case: Case, backend: str):
    inputs = make_inputs(case, torch.float64)
    if reasons := why_not(inputs, backend):
        pytest.skip("; ".join(reasons))
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.tensors().items()}
    call = attention_varlen if inputs.varlen else attention

    def visible_outputs(*tensors):
        named = dict(zip(leaves, tensors, strict=True))
        q, k, v = (named.pop(name) for name in ("q", "k", "v"))
        generator = torch.Generator().manual_seed(0)
        o, lse = call(q, k, v, **inputs.options | named, return_lse=True, backend=backend, generator=generator)
        return o, lse[lse.isfinite()]  # rows that see no key have the constant lse -inf, of which no difference exists

    assert gradcheck(visible_outputs, tuple(leaves.values()), eps=1e-6, atol=1e-6, fast_mode=False)
