"""Faults that other attention libraries had, by their ids (B01, B02, ...) in a list of such bugs.

Here: gradients, dropout, merging, devices, dtypes.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from calls import all_finite, leaves_of

from tilewise import Dense, attention, attention_varlen
from tilewise.flash_attn import flash_attn_func
from tilewise.merge import merge
from tilewise.testing import Case, assert_matches_reference, make_inputs

CAUSAL = (("causal",),)


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
    leaves = leaves_of(Case())
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

    leaves = leaves_of(Case())
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
    leaves = leaves_of(Case(B=2, Sq=150, H=4, Hkv=2, mask=CAUSAL))
    o = attention(*leaves, causal=True, deterministic=deterministic)
    first = torch.autograd.grad(o.sin().sum(), leaves, retain_graph=True)
    for _ in range(10):
        again = torch.autograd.grad(o.sin().sum(), leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_B82_second_derivatives_are_refused_not_zero():
    leaves = leaves_of(Case(Sq=5))
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
    assert all_finite(o1.grad, o2.grad, one.grad)


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


# ---- devices, dtypes, imports ----


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
