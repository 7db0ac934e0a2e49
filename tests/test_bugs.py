"""Faults that other attention libraries had, each by the id of the bug list in which it was found (B01, B02, ...).

Left out here: B54 in Hugging Face position_ids beyond `Document.from_position_ids`, B55 (no Hugging Face adapter yet), B58,
B59, B60, B64, B65, B67 (no KV cache or rotary embedding yet), B83, B86 (no context parallelism yet), and those that need a
GPU: B06 to B08, B12, B18, B19, B30, B33, B36, B46, B49, B50, B80, B87, B90 to B92. Where such a fault has a form that a CPU
can show, that form is a case of `cases.py` (zero-length sequences, empty keys, NaN behind the mask) or a test of
`test_ops.py` (B92, compile).
"""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tilewise import Causal, Dense, Document, attention, attention_varlen
from tilewise.flash_attn import flash_attn_func
from tilewise.merge import merge
from tilewise.testing import Case, Inputs, assert_matches_reference, make_inputs

FMIN = torch.finfo(torch.float32).min
CAUSAL = (("causal",),)


def _check(case: Case, **options):
    inputs = make_inputs(case)
    assert_matches_reference(Inputs(inputs.q, inputs.k, inputs.v, inputs.options | options))


def _leaves(case: Case, dtype=torch.float32):
    inputs = make_inputs(case, dtype)
    return [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]


def _finite(*tensors):
    return all(bool(t.isfinite().all()) for t in tensors)


# ---- A. masked rows, NaN, extremes ----


def test_B01_rows_without_keys_give_zero():
    q, k, v = _leaves(Case(B=1, Sq=8, H=1, D=8))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    o = attention(q, k, v, mask=mask)
    o.sum().backward()
    assert (o[:, 4:] == 0).all()
    assert (q.grad[:, 4:] == 0).all()
    assert _finite(q.grad, k.grad, v.grad)


def test_B02_bias_of_finfo_min_is_a_number_not_a_mask():
    q, k, v = _leaves(Case(B=1, Sq=6, Sk=9, H=2))
    bias = torch.zeros(6, 9)
    bias[2] = FMIN
    o = attention(q, k, v, bias=bias)
    torch.testing.assert_close(o[:, 2], v.mean(1))
    o.sum().backward()
    assert _finite(q.grad, k.grad, v.grad)
    wide = torch.zeros(441)
    wide[:128] = FMIN
    _check(Case(B=2, Sq=9, Sk=441, H=2, D=64), bias=wide)


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("grad", [False, True])
def test_B03_rows_without_keys_are_zero_in_every_mode(B, p, grad):
    i = make_inputs(Case(B=B, Sq=6, Sk=9))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[[1, 4]] = False
    o, lse = attention(i.q.requires_grad_(grad), i.k, i.v, mask=mask, dropout_p=p, return_lse=True)
    assert (o[:, [1, 4]] == 0).all()
    assert (lse[..., [1, 4]] == -torch.inf).all()
    assert (o[:, [0, 2, 3, 5]].abs().sum((0, 2, 3)) > 0).all()


@pytest.mark.parametrize("S", [9, 200])
def test_B04_NaN_in_a_forbidden_key_is_as_if_the_key_were_not_there(S):
    q, k, v = _leaves(Case(Sq=S, Sk=S))
    hidden = [2, S - 4]
    keep = torch.ones(S, dtype=torch.bool)
    keep[hidden] = False
    with torch.no_grad():
        k[:, hidden] = torch.nan
        v[:, hidden] = torch.inf
    o, lse = attention(q, k, v, mask=keep, return_lse=True)
    short = [t.detach()[:, keep].requires_grad_() for t in (k, v)]
    expected, expected_lse = attention(q, *short, return_lse=True)
    torch.testing.assert_close((o, lse), (expected, expected_lse))
    found = torch.autograd.grad(o.sin().sum(), (q, k, v))
    grads = torch.autograd.grad(expected.sin().sum(), (q, *short))
    torch.testing.assert_close(found[0], grads[0])
    for g, e in zip(found[1:], grads[1:], strict=True):
        torch.testing.assert_close(g[:, keep], e)
        assert (g[:, hidden] == 0).all()


def test_B04_NaN_in_a_future_key_reaches_no_earlier_row():
    i = make_inputs(Case(B=1, Sq=100, D=32))
    expected = attention(i.q, i.k, i.v, causal=True)
    i.k[:, 70], i.v[:, 70] = torch.nan, torch.nan
    o = attention(i.q, i.k, i.v, causal=True)
    torch.testing.assert_close(o[:, :70], expected[:, :70])
    assert o[:, 70:].isnan().all()


@pytest.mark.parametrize("shift", [-1e5, -1e6, 1e5])
def test_B10_softmax_does_not_depend_on_a_shift_of_all_scores(shift):
    i = make_inputs(Case(B=1, Sq=40, Sk=50, D=128))
    size = abs(shift) ** 0.5
    q, k = i.q.clone(), i.k.clone()
    q[..., 0], k[..., 0] = size, size if shift > 0 else -size
    inputs = Inputs(q, k, i.v, {"softmax_scale": 1.0})
    assert_matches_reference(inputs)
    assert_matches_reference(inputs.to(torch.float64))


@pytest.mark.parametrize("shift", [0, -128, -1024])
@pytest.mark.parametrize("Sk", [97, 128])
def test_B12_one_query_with_shifted_scores(shift, Sk):
    i = make_inputs(Case(Sq=1, Sk=Sk, D=64))
    assert_matches_reference(Inputs(i.q, i.k, i.v, {"bias": torch.full((1,), float(shift))}))


@pytest.mark.parametrize("D", [16, 32, 64])
@pytest.mark.parametrize("S", [1, 2, 5, 17, 128])
def test_B14_large_float16_inputs_do_not_overflow_in_the_backward_pass(D, S):
    assert_matches_reference(Case(Sq=S, D=D, magnitude=5.0, mask=CAUSAL), torch.float16)


def test_B15_constant_inputs_of_1000():
    q, k, v = (torch.full((1, 20, 2, 64), 1000.0, requires_grad=True) for _ in range(3))
    for _ in range(3):
        o = attention(q, k, v)
        o.mean().backward()
        assert _finite(o, q.grad, k.grad, v.grad)
        with torch.no_grad():
            for t in (q, k, v):
                t -= t.grad


def test_B17_block_diagonal_is_separate_calls():
    q, k, v = (t.detach() for t in _leaves(Case(B=1, Sq=600, D=32), torch.bfloat16))
    edges = [0, 100, 350, 351, 600]
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    mask = torch.zeros(600, 600, dtype=torch.bool)
    for s in spans:
        mask[s, s] = True
    expected = torch.cat([attention(q[:, s], k[:, s], v[:, s]) for s in spans], 1)
    # Probabilities are rounded relative to the largest score so far, which depends on where tiles begin.
    rounding = {"rtol": 0.0, "atol": torch.finfo(torch.bfloat16).eps * v.abs().max().item()}
    torch.testing.assert_close(attention(q, k, v, mask=mask), expected, **rounding)
    document = Document.from_cu_seqlens(torch.tensor(edges))
    torch.testing.assert_close(attention(q, k, v, mask=document), expected, **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B18_huge_additive_masks(dtype):
    bias = torch.zeros(7, 9)
    for row, value in enumerate((-1e4, -1e30, FMIN, -torch.inf)):
        bias[row, 3:] = value
    bias[5] = -torch.inf
    i = make_inputs(Case(Sq=7, Sk=9), dtype)
    o, lse = attention(i.q, i.k, i.v, bias=bias, return_lse=True)
    assert (o[:, 5] == 0).all()
    assert (lse[..., 5] == -torch.inf).all()
    expected = attention(i.q[:, :4], i.k[:, :3], i.v[:, :3])
    torch.testing.assert_close(o[:, :4], expected)
    leaves = [t.clone().requires_grad_() for t in (i.q, i.k, i.v, bias)]
    attention(*leaves[:3], bias=leaves[3]).sum().backward()
    assert _finite(*(t.grad for t in leaves))


def test_B19_ties_at_the_maximum_are_not_biased():
    """Equal keys and values of one sign: the mean signed error of bfloat16 stays far below its rounding step."""
    key = torch.randn(1, 1, 8, 64)
    q = torch.randn(1, 64, 8, 64).bfloat16()
    k, v = key.expand(1, 300, 8, 64).bfloat16(), torch.rand(1, 300, 8, 64).add(1).bfloat16()
    o = attention(q, k, v).double()
    expected = v.double().mean(1, keepdim=True).expand_as(o)
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    assert abs(float((o / expected - 1).mean())) < half_ulp / 2


# ---- B. alignment, windows ----


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("Sq", "Sk"), [(2, 5), (5, 2)])
def test_B21_alignment(align, Sq, Sk):
    expected = {
        (2, 5, "bottom_right"): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        (5, 2, "bottom_right"): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
        (2, 5, "top_left"): [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
        (5, 2, "top_left"): [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]],
    }[Sq, Sk, align]
    weights = attention(torch.randn(1, Sq, 1, 4), torch.randn(1, Sk, 1, 4), torch.eye(Sk)[None, :, None], causal=align)
    assert (weights[0, :, 0] > 0).int().tolist() == expected


def test_B22_more_queries_than_keys_under_causal():
    q, k, v = _leaves(Case(B=1, Sq=256, Sk=128))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :128] == 0).all()
    assert (lse[..., :128] == -torch.inf).all()
    assert _finite(lse[..., 128:])


@pytest.mark.parametrize("w", [0, 1, 5])
def test_B23_a_window_sees_left_plus_one_keys(w):
    weights = attention(
        torch.randn(1, 20, 1, 4), torch.randn(1, 20, 1, 4), torch.eye(20)[None, :, None], window_size=(w, 0)
    )
    counts = (weights[0, :, 0] > 0).sum(1)
    assert counts.tolist() == [min(m, w) + 1 for m in range(20)]


@pytest.mark.parametrize("window", [(3, 10**6), (10**6, 3), (2**31 - 1, 0), (0, 2**31 - 1), (2**40, 2**40)])
def test_B25_a_window_wider_than_the_keys_is_infinite_on_that_side(window):
    _check(Case(Sq=64, Sk=16), window_size=window)
    i = make_inputs(Case(Sq=64, Sk=16))
    unlimited = tuple(None if w > 1000 else w for w in window)
    found = attention(i.q, i.k, i.v, window_size=window)
    assert torch.equal(found, attention(i.q, i.k, i.v, window_size=unlimited))


@pytest.mark.parametrize("call", [attention, flash_attn_func])
def test_B27_other_negative_windows_are_refused(call):
    i = make_inputs(Case())
    with pytest.raises(ValueError, match="window right"):
        call(i.q, i.k, i.v, window_size=(-1, -3))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (-1, 4), (4, -1), (4, 0)])
def test_B28_no_limit_means_the_same_in_every_form(window):
    i = make_inputs(Case(Sq=10, Sk=13))
    none = tuple(None if w == -1 else w for w in window)
    expected = attention(i.q, i.k, i.v, window_size=none)
    forms = (window, list(window), np.array(window), torch.tensor(window), tuple(map(torch.tensor, window)))
    for form in (*forms, tuple(map(np.int32, window))):
        assert torch.equal(attention(i.q, i.k, i.v, window_size=form), expected)
        assert torch.equal(flash_attn_func(i.q, i.k, i.v, window_size=form), expected)
    _check(Case(Sq=10, Sk=13), window_size=none)


@pytest.mark.parametrize("H", [5, 40])
@pytest.mark.parametrize("dims", ["H", "BH"])
def test_B32_alibi_lse_holds_the_whole_bias(H, dims):
    case = Case(Sq=9, Sk=14, H=H, D=8, alibi=dims)
    i = make_inputs(case, torch.float64)
    slopes = i.options["alibi_slopes"].reshape(-1, H)[:, :, None, None]
    row, key = torch.arange(9)[:, None] + 5, torch.arange(14)
    scores = torch.einsum("bmhd,bnhd->bhmn", i.q, i.k) * 8**-0.5 - slopes * (row - key).abs()
    expected = scores.masked_fill(key > row, -torch.inf).logsumexp(-1)
    _, lse = attention(i.q, i.k, i.v, causal=True, return_lse=True, alibi_slopes=i.options["alibi_slopes"])
    torch.testing.assert_close(lse, expected)


# ---- C. GQA, head dims, strides ----


@pytest.mark.parametrize("G", [1, 2, 3, 5, 6, 7, 8, 16])
def test_B33_group_sizes(G):
    assert_matches_reference(Case(B=1, Sq=37, H=G, Hkv=1, D=16, mask=CAUSAL), torch.float32)


def test_B35_group_of_three_and_short_sequences():
    assert_matches_reference(Case(B=1, Sq=5, H=9, Hkv=3))


def test_B36_group_sums_are_rounded_once():
    """MQA in bfloat16: dk, summed over 32 heads, is as close as one rounding of the exact sum."""
    case = Case(B=1, Sq=64, H=32, Hkv=1, D=32)
    _, k, _ = low = _leaves(case, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in low]
    do = torch.randn(1, 64, 32, 32).bfloat16()
    (found,) = torch.autograd.grad(attention(*low), k, do)
    (expected,) = torch.autograd.grad(attention(*exact), exact[1], do.double())
    rounding = (expected.bfloat16().double() - expected).abs().max()
    assert (found.double() - expected).abs().max() < 3 * rounding


def test_B37_gqa_is_repeat_interleave_with_summed_gradients():
    q, k, v = _leaves(Case(Sq=20, Sk=30, H=6, Hkv=2), torch.float64)
    found = torch.autograd.grad(attention(q, k, v, causal=True).sin().sum(), (q, k, v))
    repeated = attention(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), causal=True)
    torch.testing.assert_close(found, torch.autograd.grad(repeated.sin().sum(), (q, k, v)))


def test_B39_permuted_and_tiny():
    assert_matches_reference(Case(B=84, Sq=3, H=3, D=64, strides="transposed"), torch.float32)


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "reversed"])
def test_B41_output_and_gradients_have_one_layout(strides):
    q, k, v = _leaves(Case(strides=strides))
    o, lse = attention(q, k, v, return_lse=True)
    assert o.is_contiguous()
    assert lse.is_contiguous()
    grads = torch.autograd.grad(o, (q, k, v), torch.empty_like(o).fill_(1))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("Sk", [43, 77, 1218])
def test_B42_bias_of_any_stride_and_length(Sk):
    wide = torch.randn(2, 2, 9, Sk + 3)
    for bias in (wide[..., :Sk], wide[..., 3:], torch.randn(2, 2, Sk, 9).transpose(2, 3), torch.randn(1, 2, 1, Sk)):
        _check(Case(Sq=9, Sk=Sk), bias=bias)
    _check(Case(Sq=9, Sk=Sk), bias=torch.randn(1, 2, 1, Sk).expand(2, 2, 9, Sk))


# ---- D. varlen and packing ----


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


# ---- F. outputs, autograd, dropout ----


def test_B68_lse_has_its_true_gradient():
    case = Case(Sq=9, Sk=12, H=4, Hkv=2, mask=CAUSAL, sinks=True, alibi="H")
    i = make_inputs(case, torch.float64)
    slopes = i.options["alibi_slopes"]
    leaves = [t.requires_grad_() for t in (i.q, i.k, i.v, slopes)]
    _, lse = attention(*leaves[:3], causal=True, alibi_slopes=slopes, return_lse=True)
    found = torch.autograd.grad((lse**2).sum(), leaves)
    m, n = torch.arange(9)[:, None] + 3, torch.arange(12)
    scores = torch.einsum("bmhd,bnhd->bhmn", i.q, i.k.repeat_interleave(2, 2)) / 4
    scores = (scores - slopes[:, None, None] * (m - n).abs()).masked_fill(n > m, -torch.inf)
    expected = torch.autograd.grad((scores.logsumexp(-1) ** 2).sum(), leaves, allow_unused=True)
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(g, torch.zeros_like(g) if e is None else e)


def test_B69_an_unused_lse_changes_nothing():
    leaves = _leaves(Case())
    with_lse, _ = attention(*leaves, return_lse=True)
    found = torch.autograd.grad(with_lse.sin().sum(), leaves)
    expected = torch.autograd.grad(attention(*leaves).sin().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dims", ["", "1111", "H11", "11QK", "B11K", "1", "Q1", "BHQK"])
def test_B72_bias_of_every_shape_gets_its_gradient(dims):
    assert_matches_reference(Case(Sq=9, Sk=12, bias=dims, mask=CAUSAL))


@pytest.mark.parametrize("cap", [1.0, 10.0, 50.0])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_B73_softcap_gradients(cap, ratio):
    assert_matches_reference(Case(Sq=20, softcap=cap, softmax_scale=cap * ratio / 8), torch.float64)
    assert_matches_reference(Case(Sq=20, softcap=cap, softmax_scale=cap * ratio / 8), torch.float32)


@pytest.mark.parametrize("p", [1e-16, 0.17, 0.5, 0.999])
def test_B75_forward_and_backward_use_one_dropout_mask(p):
    """With v the identity, o holds the weights that were kept, and dv for a given do must be built from the same."""
    q, k = torch.randn(1, 50, 2, 16), torch.randn(1, 60, 2, 16)
    v = torch.eye(60)[None, :, None].expand(1, 60, 2, 60).clone().requires_grad_()
    weights = attention(q, k, v, dropout_p=p)
    do = torch.randn_like(weights)
    (dv,) = torch.autograd.grad(weights, v, do)
    torch.testing.assert_close(dv, torch.einsum("bmhn,bmhd->bnhd", weights.detach(), do))
    kept = float((weights > 0).double().mean())
    assert abs(kept - (1 - p)) <= 5 * (p * (1 - p) / weights.numel()) ** 0.5
    plain = attention(q, k, v).detach()
    torch.testing.assert_close(weights[weights > 0].detach(), plain[weights > 0] / (1 - p))


def test_B76_consecutive_calls_draw_different_masks():
    i = make_inputs(Case())
    torch.manual_seed(1)
    first, second = (attention(i.q, i.k, i.v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(attention(i.q, i.k, i.v, dropout_p=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_B77_recomputation_redraws_the_mask(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    leaves = _leaves(Case())
    torch.manual_seed(1)
    expected = torch.autograd.grad(attention(*leaves, dropout_p=0.5).sin().sum(), leaves)
    torch.manual_seed(1)
    checkpoint(lambda *t: attention(*t, dropout_p=0.5).sin().sum(), *leaves, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, expected, strict=True))


def test_B79_attn_probs():
    i = make_inputs(Case())
    assert flash_attn_func(i.q, i.k, i.v, return_attn_probs=True)[2].numel() == 0
    assert flash_attn_func(i.q, i.k, i.v, 0.1, return_attn_probs=True)[2].shape == (2, 2, 128, 128)


@pytest.mark.parametrize("deterministic", [False, True])
def test_B80_backward_is_bitwise_repeatable(deterministic):
    leaves = _leaves(Case(B=2, Sq=150, H=4, Hkv=2, mask=CAUSAL))
    o = attention(*leaves, causal=True, deterministic=deterministic)
    first = torch.autograd.grad(o.sin().sum(), leaves, retain_graph=True)
    for _ in range(10):
        again = torch.autograd.grad(o.sin().sum(), leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_B82_second_derivatives_are_refused_not_zero():
    leaves = _leaves(Case(Sq=5))
    (g,) = torch.autograd.grad(attention(*leaves).sin().sum(), leaves[0], create_graph=True)
    assert g.requires_grad
    with pytest.raises(NotImplementedError, match="double backward"):
        g.sum().backward()


def test_B84_merge_with_infinities_and_gaps():
    o1, o2 = torch.randn(3, 2, 4, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    nothing, one = torch.full((2, 3), -torch.inf), torch.ones(2, 3, requires_grad=True)
    o, lse = merge([o1, o2], [nothing, one])
    assert torch.equal(o, o2)
    assert torch.equal(lse, one)
    o, lse = merge([o1, o2], [nothing, nothing])
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    o, lse = merge([o1, o2], [one + 1e5, one])
    assert torch.equal(o, o1)
    (o.sum() + lse.sum()).backward()
    assert _finite(o1.grad, o2.grad, one.grad)


def test_B85_error_does_not_grow_with_the_number_of_parts():
    i = make_inputs(Case(B=1, Sq=16, Sk=256, H=4, D=32))
    expected = attention(i.q.double(), i.k.double(), i.v.double())

    def error(parts):
        chunks = zip(i.k.chunk(parts, 1), i.v.chunk(parts, 1), strict=True)
        o, _ = merge(*zip(*(attention(i.q, k, v, return_lse=True) for k, v in chunks), strict=True))
        return float((o - expected).square().mean().sqrt())

    errors = {parts: error(parts) for parts in (2, 4, 8, 16)}
    assert max(errors.values()) <= 1.2 * errors[2] + torch.finfo(torch.float32).eps * float(
        expected.square().mean().sqrt()
    )


# ---- G. devices, compile ----


@pytest.mark.parametrize("number", [int, np.int64, np.int32, torch.tensor])
def test_B94_longest_length_in_any_integer_form(number):
    q = torch.randn(10, 2, 8)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    expected = attention_varlen(q, q, q, cu, cu, 6, 6)
    assert torch.equal(attention_varlen(q, q, q, cu, cu, number(6), number(6)), expected)


def test_B94_a_list_of_lengths_is_refused():
    q = torch.randn(10, 2, 8)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(TypeError, match="max_seqlen"):
        attention_varlen(q, q, q, cu, cu, [4, 6], [4, 6])


def test_B95_mixed_dtypes_are_refused_and_autocast_casts():
    i = make_inputs(Case())
    with pytest.raises(TypeError, match="share a dtype"):
        attention(i.q, i.k, i.v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(i.q, i.k, i.v.bfloat16()).dtype == torch.bfloat16


def test_B99_models_on_the_meta_device():
    with torch.device("meta"):
        x = torch.empty(2, 5, 2, 8, requires_grad=True)
        attention(x, x, x, causal=True, mask=Dense(torch.empty(5, 5, dtype=torch.bool))).sum().backward()
    assert x.grad.device.type == "meta"


def test_B100_import_without_triton_and_gpu():
    code = "import sys; sys.modules['triton'] = None; import tilewise, tilewise.flash_attn, tilewise.testing"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
