"""Calls that several test files make: small cases, their leaves, attention as a function of them, comparisons."""

import torch

from tilewise import attention, attention_varlen
from tilewise.testing import Case, Inputs, assert_matches_reference, make_inputs

MIX = Case("mix", Sq=9, Sk=12, H=4, Hkv=2, D=8, Dv=6, softcap=3.0, alibi="BH", bias="1HQK", sinks=True,
           mask=(("document", "BS"), ("window", 6, 4), ("dense", "B11K", 0.8)))  # fmt: skip
PLAIN = Case("plain", Sq=9, Sk=12, H=4, Hkv=2, D=8, mask=(("causal",),))
PACKED = Case("packed", lengths_q=(4, 0, 7), lengths_k=(5, 3, 7), H=4, Hkv=2, D=8, spare=1, sinks=True, alibi="H",
              mask=(("causal",),))  # fmt: skip


def check(case: Case, **options):
    """Compare with the reference: the tensors of a case under other options."""
    inputs = make_inputs(case)
    assert_matches_reference(Inputs(inputs.q, inputs.k, inputs.v, inputs.options | options))


def leaves_of(case: Case, dtype=torch.float32):
    """q, k and v of a case as leaves that require grad."""
    inputs = make_inputs(case, dtype)
    return [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]


def all_finite(*tensors):
    return all(bool(t.isfinite().all()) for t in tensors)


def as_function(inputs):
    """The call as a function of its tensors, and those tensors as leaves."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.tensors().items()}
    call = attention_varlen if inputs.varlen else attention

    def function(*tensors):
        named = dict(zip(leaves, tensors, strict=True))
        q, k, v = (named.pop(name) for name in ("q", "k", "v"))
        return call(q, k, v, **inputs.options | named, return_lse=True)

    return function, tuple(leaves.values())


def loss_of(outputs):
    o, lse = outputs
    return o.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
