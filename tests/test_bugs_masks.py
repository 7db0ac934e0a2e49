"""Faults that other attention libraries had, by their ids (B01, B02, ...) in a list of such bugs.

Here: masked rows, NaN, extreme scores, alignment, windows.
"""

import itertools

import numpy as np
import pytest
import torch
from calls import all_finite, check, leaves_of

from tilewise import Document, attention
from tilewise.flash_attn import flash_attn_func
from tilewise.testing import Case, Inputs, assert_matches_reference, make_inputs

FMIN = torch.finfo(torch.float32).min
CAUSAL = (("causal",),)


def test_B01_rows_without_keys_give_zero():
    q, k, v = leaves_of(Case(B=1, Sq=8, H=1, D=8))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    o = attention(q, k, v, mask=mask)
    o.sum().backward()
    assert (o[:, 4:] == 0).all()
    assert (q.grad[:, 4:] == 0).all()
    assert all_finite(q.grad, k.grad, v.grad)


def test_B02_bias_of_finfo_min_is_a_number_not_a_mask():
    q, k, v = leaves_of(Case(B=1, Sq=6, Sk=9, H=2))
    bias = torch.zeros(6, 9)
    bias[2] = FMIN
    o = attention(q, k, v, bias=bias)
    torch.testing.assert_close(o[:, 2], v.mean(1))
    o.sum().backward()
    assert all_finite(q.grad, k.grad, v.grad)
    wide = torch.zeros(441)
    wide[:128] = FMIN
    check(Case(B=2, Sq=9, Sk=441, H=2, D=64), bias=wide)


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
    q, k, v = leaves_of(Case(Sq=S, Sk=S))
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
        assert all_finite(o, q.grad, k.grad, v.grad)
        with torch.no_grad():
            for t in (q, k, v):
                t -= t.grad


def test_B17_block_diagonal_is_separate_calls():
    q, k, v = (t.detach() for t in leaves_of(Case(B=1, Sq=600, D=32), torch.bfloat16))
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
    assert all_finite(*(t.grad for t in leaves))


def test_B19_ties_at_the_maximum_are_not_biased():
    """Equal keys and values of one sign: the mean signed error of bfloat16 stays far below its rounding step."""
    key = torch.randn(1, 1, 8, 64)
    q = torch.randn(1, 64, 8, 64).bfloat16()
    k, v = key.expand(1, 300, 8, 64).bfloat16(), torch.rand(1, 300, 8, 64).add(1).bfloat16()
    o = attention(q, k, v).double()
    expected = v.double().mean(1, keepdim=True).expand_as(o)
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    assert abs(float((o / expected - 1).mean())) < half_ulp / 2


# ---- alignment, windows ----


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
    q, k, v = leaves_of(Case(B=1, Sq=256, Sk=128))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :128] == 0).all()
    assert (lse[..., :128] == -torch.inf).all()
    assert all_finite(lse[..., 128:])


@pytest.mark.parametrize("w", [0, 1, 5])
def test_B23_a_window_sees_left_plus_one_keys(w):
    weights = attention(
        torch.randn(1, 20, 1, 4), torch.randn(1, 20, 1, 4), torch.eye(20)[None, :, None], window_size=(w, 0)
    )
    counts = (weights[0, :, 0] > 0).sum(1)
    assert counts.tolist() == [min(m, w) + 1 for m in range(20)]


@pytest.mark.parametrize("window", [(3, 10**6), (10**6, 3), (2**31 - 1, 0), (0, 2**31 - 1), (2**40, 2**40)])
def test_B25_a_window_wider_than_the_keys_is_infinite_on_that_side(window):
    check(Case(Sq=64, Sk=16), window_size=window)
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
    check(Case(Sq=10, Sk=13), window_size=none)


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
