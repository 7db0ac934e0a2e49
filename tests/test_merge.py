"""merge: partial (o, lse) pairs against attention over all keys."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck

from tilewise import attention
from tilewise.merge import merge
from tilewise.testing import Case, make_inputs


def _parts(inputs, cuts):
    edges = [0, *cuts, inputs.k.shape[1]]
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    parts = [attention(inputs.q, inputs.k[:, s], inputs.v[:, s], return_lse=True) for s in spans]
    return [list(x) for x in zip(*parts, strict=True)]


@pytest.mark.parametrize("cuts", [(), (1,), (13, 13), (5, 20, 39)])
def test_equals_attention_over_all_keys(cuts):
    inputs = make_inputs(Case(Sq=9, Sk=40, H=4, Hkv=2), torch.float64)
    o, lse = merge(*_parts(inputs, cuts))
    expected = attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    torch.testing.assert_close((o, lse), expected)


def test_order_does_not_matter():
    inputs = make_inputs(Case(Sq=9, Sk=40), torch.float64)
    outputs, lses = _parts(inputs, (5, 20))
    torch.testing.assert_close(merge(outputs[::-1], lses[::-1]), merge(outputs, lses))


def test_gradients_flow_through_both_outputs():
    g = torch.Generator().manual_seed(0)
    outputs = [torch.randn(1, 3, 2, 2, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert gradcheck(lambda *t: merge(t[:3], t[3:]), (*outputs, *lses))


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_empty_parts_contribute_nothing(empty):
    o = torch.randn(3, 2, 4, dtype=torch.float64).requires_grad_()
    garbage = torch.full_like(o, torch.nan).detach().requires_grad_()
    lse = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    nothing = torch.full((2, 3), empty, dtype=torch.float64, requires_grad=True)
    merged, merged_lse = merge([garbage, o], [nothing, lse])
    torch.testing.assert_close((merged, merged_lse), (o, lse), rtol=0, atol=0)
    (merged.sum() + merged_lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in (o, lse, garbage, nothing))
    assert (garbage.grad == 0).all()
    assert (nothing.grad == 0).all()


def test_all_parts_empty():
    o = torch.full((3, 2, 4), torch.nan, requires_grad=True)
    lse = torch.full((2, 3), -torch.inf, requires_grad=True)
    merged, merged_lse = merge([o, o], [lse, lse])
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()
    merged.sum().backward()
    assert (o.grad == 0).all()
    assert (lse.grad == 0).all()


@pytest.mark.parametrize("gap", [1e2, 1e5])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_gaps(gap, sign):
    a, b = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(2))
    lse = torch.zeros(1, 2, 3, requires_grad=True)
    far = torch.full((1, 2, 3), sign * gap, requires_grad=True)
    merged, merged_lse = merge([a, b], [lse, far])
    winner, top = (b, far) if sign > 0 else (a, lse)
    torch.testing.assert_close((merged, merged_lse), (winner, top), rtol=0, atol=0)
    (merged.sum() + merged_lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in (a, b, lse, far))


def test_dtypes():
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        o, lse = merge([torch.ones(3, 1, 2, dtype=dtype)], [torch.zeros(1, 3, dtype=expected)])
        assert (o.dtype, lse.dtype) == (dtype, expected)


@pytest.mark.parametrize(
    ("outputs", "lses", "words"),
    [
        ([], [], "at least one"),
        ([(3, 2, 4)], [], "one lse per output"),
        ([(2, 4)], [(2, 4)], "packed"),
        ([(3, 2, 4), (3, 2, 5)], [(2, 3), (2, 3)], "part 1"),
        ([(3, 2, 4)], [(3, 2)], "part 0"),
    ],
)
def test_refuses_what_does_not_fit(outputs, lses, words):
    with pytest.raises(ValueError, match=words):
        merge([torch.zeros(s) for s in outputs], [torch.zeros(s) for s in lses])
