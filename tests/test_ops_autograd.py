"""The ops under autograd: what is saved, what requires grad, and derivatives that are refused."""

import itertools

import pytest
import torch
from calls import MIX, PLAIN, as_function, assert_equal, leaves_of, loss_of
from torch.autograd import forward_ad

from tilewise import attention
from tilewise.testing import make_inputs


def _scalar(q, k, v):
    return attention(q, k, v, causal=True).sin().sum()


# ---- what is saved, what requires grad ----


def _saved(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = function()
    return saved, outputs


def test_saved_tensors_are_q_k_v_o_and_lse():
    i = make_inputs(PLAIN)
    q, k, v = (t.requires_grad_() for t in (i.q, i.k, i.v))
    saved, (o, lse) = _saved(lambda: attention(q, k, v, causal=True, return_lse=True))
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (q, k, v, o, lse)}
    assert len(saved) == 5


def test_without_grad_nothing_is_saved():
    i = make_inputs(PLAIN)
    saved, o = _saved(lambda: attention(i.q, i.k, i.v))
    assert not saved
    assert not o.requires_grad


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=6)))
def test_any_subset_of_inputs_requires_grad(wanted):
    inputs = make_inputs(MIX)
    names = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    function, leaves = as_function(inputs)
    full = dict(zip(names, torch.autograd.grad(loss_of(function(*leaves)), leaves), strict=True))
    some = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
    outputs = function(*some)
    assert outputs[0].requires_grad == outputs[1].requires_grad == any(wanted)
    if any(wanted):
        loss_of(outputs).backward()
    for name, t, w in zip(names, some, wanted, strict=True):
        assert (t.grad is not None) == w
        if w:
            torch.testing.assert_close(t.grad, full[name])


def test_each_output_alone():
    function, leaves = as_function(make_inputs(MIX))
    o, lse = function(*leaves)
    both = torch.autograd.grad(o.sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum(), leaves, retain_graph=True)
    parts = [
        torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True)
        for x in (o.sin().sum(), lse.nan_to_num(0, 0, 0).cos().sum())
    ]
    for whole, a, b in zip(both, *parts, strict=True):
        torch.testing.assert_close(a + b, whole)


def test_max_logit_is_not_differentiable():
    i = make_inputs(PLAIN)
    _, peak = attention(i.q.requires_grad_(), i.k, i.v, return_max_logit=True)
    assert not peak.requires_grad


def test_backward_twice_accumulates():
    function, leaves = as_function(make_inputs(PLAIN))
    loss = loss_of(function(*leaves))
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in leaves]
    loss.backward()
    assert_equal([t.grad for t in leaves], [2 * g for g in once])


def test_changing_a_saved_input_in_place_is_noticed():
    i = make_inputs(PLAIN)
    k = i.k.clone()
    o = attention(i.q.requires_grad_(), k, i.v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# ---- second derivatives and forward mode: refused, never silently zero ----


def test_double_backward_is_refused():
    leaves = leaves_of(PLAIN)
    grads = torch.autograd.grad(_scalar(*leaves), leaves, create_graph=True)
    assert_equal([g.detach() for g in grads], torch.autograd.grad(_scalar(*leaves), leaves))
    with pytest.raises(NotImplementedError, match="tilewise: double backward is not implemented"):
        sum(g.sum() for g in grads).backward()


def test_hessian_is_refused():
    leaves = leaves_of(PLAIN)
    with pytest.raises(NotImplementedError, match="tilewise: double backward is not implemented"):
        torch.func.grad(lambda q: torch.func.grad(_scalar)(q, *leaves[1:]).sum())(leaves[0])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(position, requires_grad):
    leaves = [t.detach().requires_grad_(requires_grad) for t in leaves_of(PLAIN)]
    with forward_ad.dual_level():
        leaves[position] = forward_ad.make_dual(leaves[position], torch.ones_like(leaves[position]))
        with pytest.raises(NotImplementedError, match="tilewise: forward-mode derivatives"):
            _scalar(*leaves)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_forward_mode_through_other_inputs_is_refused(name):
    i = make_inputs(MIX)
    with forward_ad.dual_level():
        t = i.options[name]
        options = i.options | {name: forward_ad.make_dual(t, torch.ones_like(t))}
        with pytest.raises(NotImplementedError, match="tilewise: forward-mode derivatives"):
            attention(i.q, i.k, i.v, **options)


def test_jvp_is_refused():
    leaves = tuple(t.detach() for t in leaves_of(PLAIN))
    with pytest.raises(NotImplementedError, match="tilewise: forward-mode derivatives"):
        torch.func.jvp(_scalar, leaves, leaves)


def test_jvp_of_the_backward_is_refused():
    """Forward over reverse."""
    leaves = tuple(t.detach() for t in leaves_of(PLAIN))
    with pytest.raises(NotImplementedError, match="tilewise"):
        torch.func.jvp(torch.func.grad(_scalar), leaves, leaves)
