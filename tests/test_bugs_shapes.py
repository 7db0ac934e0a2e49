"""Faults that other attention libraries had, by their ids (B01, B02, ...) in a list of such bugs.

Here: grouped heads, strides, packed and empty sequences.
"""

import pytest
import torch
from calls import check, leaves_of

from tilewise import Causal, Document, attention, attention_varlen
from tilewise.testing import Case, assert_matches_reference, make_inputs

CAUSAL = (("causal",),)


@pytest.mark.parametrize("G", [1, 2, 3, 5, 6, 7, 8, 16])
def test_B33_group_sizes(G):
    assert_matches_reference(Case(B=1, Sq=37, H=G, Hkv=1, D=16, mask=CAUSAL), torch.float32)


def test_B35_group_of_three_and_short_sequences():
    assert_matches_reference(Case(B=1, Sq=5, H=9, Hkv=3))


def test_B36_group_sums_are_rounded_once():
    """MQA in bfloat16: dk, summed over 32 heads, is as close as one rounding of the exact sum."""
    case = Case(B=1, Sq=64, H=32, Hkv=1, D=32)
    _, k, _ = low = leaves_of(case, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in low]
    do = torch.randn(1, 64, 32, 32).bfloat16()
    (found,) = torch.autograd.grad(attention(*low), k, do)
    (expected,) = torch.autograd.grad(attention(*exact), exact[1], do.double())
    rounding = (expected.bfloat16().double() - expected).abs().max()
    assert (found.double() - expected).abs().max() < 3 * rounding


def test_B37_gqa_is_repeat_interleave_with_summed_gradients():
    q, k, v = leaves_of(Case(Sq=20, Sk=30, H=6, Hkv=2), torch.float64)
    found = torch.autograd.grad(attention(q, k, v, causal=True).sin().sum(), (q, k, v))
    repeated = attention(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), causal=True)
    torch.testing.assert_close(found, torch.autograd.grad(repeated.sin().sum(), (q, k, v)))


def test_B39_permuted_and_tiny():
    assert_matches_reference(Case(B=84, Sq=3, H=3, D=64, strides="transposed"), torch.float32)


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "reversed"])
def test_B41_output_and_gradients_have_one_layout(strides):
    q, k, v = leaves_of(Case(strides=strides))
    o, lse = attention(q, k, v, return_lse=True)
    assert o.is_contiguous()
    assert lse.is_contiguous()
    grads = torch.autograd.grad(o, (q, k, v), torch.empty_like(o).fill_(1))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("Sk", [43, 77, 1218])
def test_B42_bias_of_any_stride_and_length(Sk):
    wide = torch.randn(2, 2, 9, Sk + 3)
    for bias in (wide[..., :Sk], wide[..., 3:], torch.randn(2, 2, Sk, 9).transpose(2, 3), torch.randn(1, 2, 1, Sk)):
        check(Case(Sq=9, Sk=Sk), bias=bias)
    check(Case(Sq=9, Sk=Sk), bias=torch.randn(1, 2, 1, Sk).expand(2, 2, 9, Sk))


# ---- packed and empty sequences ----


@pytest.mark.parametrize("as_tensor", [False, True])
def test_B47_one_query_each_and_empty_sequences(as_tensor):
    q, k, v = torch.randn(2, 9, 16), torch.randn(8, 3, 16), torch.randn(8, 3, 16)
    cu_q, cu_k = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32), torch.tensor([0, 0, 3, 3, 8], dtype=torch.int32)
    longest = (torch.tensor(1), torch.tensor(5)) if as_tensor else (1, 5)
    o = attention_varlen(q, k, v, cu_q, cu_k, *longest)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        torch.testing.assert_close(o[row], attention(q[None, row : row + 1], k[None, keys], v[None, keys])[0, 0])


def test_B49_empty_on_one_side_only():
    lengths_q, lengths_k = (0, 12, 8, 0), (25, 17, 0, 31)
    for mask in ((), CAUSAL):
        assert_matches_reference(Case(lengths_q=lengths_q, lengths_k=lengths_k, mask=mask, poison=True))
    assert_matches_reference(Case(lengths_q=lengths_q, lengths_k=lengths_k, D=256), torch.bfloat16)


@pytest.mark.parametrize("causal", [False, True])
def test_B50_no_keys(causal):
    q, k = torch.randn(2, 5, 2, 8, requires_grad=True), torch.randn(2, 0, 2, 8, requires_grad=True)
    o, lse = attention(q, k, k, causal=causal, return_lse=True)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    o.sum().backward()
    assert (q.grad == 0).all()
    assert k.grad.shape == k.shape


def test_B51_no_sequences():
    for B, S in ((0, 5), (2, 0)):
        q = torch.randn(B, S, 2, 8, requires_grad=True)
        o, lse = attention(q, q, q, causal=True, return_lse=True)
        assert (o.shape, lse.shape) == ((B, S, 2, 8), (B, 2, S))
        o.sum().backward()
        assert q.grad.shape == q.shape
    q = torch.randn(0, 2, 8, requires_grad=True)
    o = attention_varlen(q, q, q, torch.tensor([0], dtype=torch.int32))
    o.sum().backward()
    assert o.shape == q.grad.shape == (0, 2, 8)


def test_B54_positions_that_never_are_0():
    i = make_inputs(Case(B=1, Sq=7))
    expected = attention(i.q, i.k, i.v, mask=Document(torch.tensor([0, 0, 0, 1, 1, 2, 2])) & Causal())
    for positions in ([0, 1, 2, 0, 1, 0, 1], [2, 3, 4, 2, 3, 2, 3], [5, 6, 7, 9, 10, 2, 3]):
        mask = Document.from_position_ids(torch.tensor(positions)) & Causal()
        assert torch.equal(attention(i.q, i.k, i.v, mask=mask), expected)


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_B57_lengths_beyond_the_tensors_are_refused(which):
    q = torch.randn(10, 2, 8)
    cu = {name: torch.tensor([0, 4, 10], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    cu[which] = torch.tensor([0, 4, 11], dtype=torch.int32)
    with pytest.raises(ValueError, match=which):
        attention_varlen(q, q, q, **cu)
