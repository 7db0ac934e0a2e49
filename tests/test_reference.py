"""The oracle itself: against torch's attention, gradcheck, and examples worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from tilewise import reference
from tilewise.masks import Causal, Dense, Window
from tilewise.testing import Case, Inputs, bind, make_inputs

FP64 = torch.float64


def _sdpa(inputs, **options):
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _attention(q, k, v, **options):
    return reference.attention(q, k, v, bind(Inputs(q, k, v, options)))


@pytest.mark.parametrize("options", [{}, {"softmax_scale": 0.3}])
def test_is_sdpa(options):
    i = make_inputs(Case(Sq=7, Sk=9, H=3, Dv=5), FP64)
    o, _ = _attention(i.q, i.k, i.v, **options)
    torch.testing.assert_close(o, _sdpa(i, scale=options.get("softmax_scale")))


def test_causal_is_sdpa():
    i = make_inputs(Case(Sq=9), FP64)
    torch.testing.assert_close(_attention(i.q, i.k, i.v, causal=True)[0], _sdpa(i, is_causal=True))
    wide = make_inputs(Case(Sq=5, Sk=9), FP64)
    torch.testing.assert_close(_attention(wide.q, wide.k, wide.v, causal="top_left")[0], _sdpa(wide, is_causal=True))


def test_mask_bias_and_gqa_are_sdpa():
    i = make_inputs(Case(Sq=7, Sk=9, H=6, Hkv=2, bias="BHQK"), FP64)
    keep = torch.rand(2, 6, 7, 9) < 0.6
    keep[..., 0] = True
    o, _ = _attention(i.q, i.k, i.v, mask=keep)
    torch.testing.assert_close(o, _sdpa(i, attn_mask=keep, enable_gqa=True))
    o, _ = _attention(i.q, i.k, i.v, bias=i.options["bias"])
    torch.testing.assert_close(o, _sdpa(i, attn_mask=i.options["bias"], enable_gqa=True))


def test_gradients_are_sdpa():
    i = make_inputs(Case(Sq=7, Sk=9, H=4, Hkv=2), FP64)
    leaves = [t.requires_grad_() for t in (i.q, i.k, i.v)]
    ours = torch.autograd.grad(_attention(*leaves)[0].sin().sum(), leaves)
    theirs = torch.autograd.grad(_sdpa(i, enable_gqa=True).sin().sum(), leaves)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", B=1, Sq=4, Sk=3, D=2, mask=(("causal",),), sinks=True),
        Case("mix", B=1, Sq=3, Sk=4, H=2, Hkv=1, D=2, softcap=2.0, alibi="H", bias="BHQK", sinks=True, dropout=0.3),
        Case("varlen", lengths_q=(2, 0, 1), lengths_k=(1, 2, 3), D=2, alibi="BH", sinks=True, spare=1),
    ],
    ids=lambda c: c.name,
)
def test_gradcheck(case):
    i = make_inputs(case, FP64)
    leaves = {name: t.requires_grad_() for name, t in i.tensors().items()}

    def outputs(*_):
        o, lse = reference.attention(i.q, i.k, i.v, bind(i))
        return o, lse[lse.isfinite()]

    assert gradcheck(outputs, tuple(leaves.values()))


# Three queries, three keys, head dim 1, v = (1, 2, 4): every score is q * k and its exponential a small whole number.
LN2 = math.log(2.0)


def _example(scores_over_ln2, **options):
    """Weights given as exponents of two: row r, key n has score ``ln 2 * s[r][n]``."""
    bias = torch.tensor(scores_over_ln2, dtype=FP64) * LN2
    q = k = torch.zeros(1, len(scores_over_ln2), 1, 1, dtype=FP64)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=FP64).reshape(1, 3, 1, 1)
    o, lse = _attention(q, k, v, bias=bias, **options)
    return o[0, :, 0, 0], lse[0, 0]


def _check(found, outputs, sums):
    """Outputs, and the sums of which lse is the logarithm."""
    o, lse = found
    torch.testing.assert_close(o, torch.tensor(outputs, dtype=FP64))
    torch.testing.assert_close(lse.exp(), torch.tensor(sums, dtype=FP64))


SCORES = [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [2.0, 0.0, 1.0]]  # weights 1 1 1 | 1 2 4 | 4 1 2


def test_by_hand():
    _check(_example(SCORES), [7 / 3, (1 + 4 + 16) / 7, (4 + 2 + 8) / 7], [3.0, 7.0, 7.0])


def test_causal_by_hand():
    _check(_example(SCORES, mask=Causal()), [1.0, (1 + 4) / 3, (4 + 2 + 8) / 7], [1.0, 3.0, 7.0])


def test_window_by_hand():
    _check(_example(SCORES, mask=Window(1, 0)), [1.0, (1 + 4) / 3, (2 + 8) / 3], [1.0, 3.0, 3.0])


def test_row_without_keys_by_hand():
    keep = torch.tensor([[True, True, True], [False, False, False], [False, False, True]])
    _check(_example(SCORES, mask=Dense(keep)), [7 / 3, 0.0, 4.0], [3.0, 0.0, 2.0])


def test_sink_by_hand():
    sinks = torch.tensor([LN2], dtype=FP64)  # exp(sink) = 2 joins each sum
    _check(_example(SCORES, sinks=sinks), [7 / 5, (1 + 4 + 16) / 9, (4 + 2 + 8) / 9], [5.0, 9.0, 9.0])


def test_alibi_by_hand():
    slopes = torch.tensor([LN2], dtype=FP64)  # each step of distance halves the weight
    flat = [[0.0] * 3] * 3
    o, lse = _example(flat, alibi_slopes=slopes)
    _check((o, lse), [(1 + 1 + 1) / 1.75, (0.5 + 2 + 2) / 2, (0.25 + 1 + 4) / 1.75], [1.75, 2.0, 1.75])


def test_softcap_by_hand():
    q = torch.full((1, 1, 1, 1), 3.0, dtype=FP64)
    k = torch.tensor([1.0, -1.0], dtype=FP64).reshape(1, 2, 1, 1)
    v = torch.tensor([1.0, 0.0], dtype=FP64).reshape(1, 2, 1, 1)
    o, _ = _attention(q, k, v, softcap=2.0)
    capped = 2.0 * math.tanh(1.5)
    torch.testing.assert_close(o.item(), 1 / (1 + math.exp(-2 * capped)))


def test_scale_by_hand():
    q = torch.tensor([LN2], dtype=FP64).reshape(1, 1, 1, 1)
    k = torch.tensor([1.0, 2.0], dtype=FP64).reshape(1, 2, 1, 1)
    v = torch.tensor([0.0, 1.0], dtype=FP64).reshape(1, 2, 1, 1)
    torch.testing.assert_close(_attention(q, k, v, softmax_scale=1.0)[0].item(), 2 / 3)
    torch.testing.assert_close(_attention(q, k, v, softmax_scale=2.0)[0].item(), 4 / 5)


def test_max_logit_by_hand():
    q = torch.tensor([[1.0, 3.0], [2.0, -1.0]]).reshape(1, 2, 2, 1)
    k = torch.tensor([[1.0, 1.0], [5.0, 5.0]]).reshape(1, 2, 2, 1)
    inputs = Inputs(q, k, k, {"mask": Causal(), "softmax_scale": 1.0})
    assert reference.max_logit(q, k, bind(inputs)).tolist() == [10.0, 3.0]


def test_signed_probabilities_show_the_dropout_mask():
    i = make_inputs(Case(Sq=6, Sk=7, dropout=0.4), FP64)
    signed = reference.signed_probabilities(i.q, i.k, bind(i))
    o, _ = reference.attention(i.q, i.k, i.v, bind(i))
    torch.testing.assert_close(signed.abs().sum(-1), torch.ones(2, 2, 6, dtype=FP64))
    torch.testing.assert_close(o, torch.einsum("bhmn,bnhd->bmhd", signed.clamp(min=0), i.v) / 0.6)
