"""Inputs that look ordinary and are not: views, default devices, learnable numbers, values that only a compiled call sees."""

import subprocess
import sys

import pytest
import torch

import tilewise
from tilewise.testing import Inputs, assert_matches_reference


def _qkv(S=9, H=4, D=8):
    return [torch.randn(1, S, H, D) for _ in range(3)]


@pytest.mark.parametrize("view", [lambda b: b[::2], lambda b: b[:1].expand(4), lambda b: b.flip(0)[:4]])
def test_sinks_and_slopes_of_any_stride(view):
    q, k, v = _qkv()
    values = view(torch.randn(8))
    for name in ("sinks", "alibi_slopes"):
        assert_matches_reference(Inputs(q, k, v, {name: values}, repro=name))
        given = tilewise.attention(q, k, v, **{name: values})
        assert torch.equal(given, tilewise.attention(q, k, v, **{name: values.clone()}))


def test_negated_views():
    z = torch.randn(1, 9, 4, 8, dtype=torch.complex64)
    q, k, v = _qkv()
    for negated in (torch._neg_view(q), z.conj().imag):
        assert torch.equal(tilewise.attention(negated, k, v), tilewise.attention(negated.clone().resolve_neg(), k, v))
    bias = torch.randn(9, 9, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    assert torch.equal(tilewise.attention(q, k, v, bias=bias), tilewise.attention(q, k, v, bias=bias.resolve_neg()))


def test_default_device_does_not_matter():
    code = (
        "import torch, tilewise\n"
        "q, k, v = torch.randn(3, 1, 13, 2, 8).requires_grad_().unbind()\n"
        "with torch.device('meta'):\n"
        "    o, lse = tilewise.attention(q, k, v, causal=True, dropout_p=0.1, return_lse=True)\n"
        "    g = torch.autograd.grad(o, q, torch.ones_like(o, device='cpu'))[0]\n"
        "assert o.device.type == lse.device.type == g.device.type == 'cpu'\n"
        "assert torch.equal(tilewise.attention(q, k, v), tilewise.attention(q, k, v))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("cu", [[0, 5, 900000], [0, 5, 20], [3, 5, 9], [0, 7, 5]])
def test_lengths_that_only_the_compiled_call_sees(cu):
    q = torch.randn(9, 2, 8)
    compiled = torch.compile(
        lambda q, cu: tilewise.attention_varlen(q, q, q, cu, None, 9, 9), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        compiled(q, torch.tensor(cu, dtype=torch.int32))


def test_too_small_max_seqlen_in_a_compiled_call():
    q = torch.randn(37, 2, 8)
    compiled = torch.compile(lambda q, cu: tilewise.attention_varlen(q, q, q, cu, None, 10, 10), backend="aot_eager")
    with pytest.raises(ValueError, match="max_seqlen_q = 10"):
        compiled(q, torch.tensor([0, 30, 37], dtype=torch.int32))


def test_cu_seqlens_may_be_a_parameter():
    cu = torch.nn.Parameter(torch.tensor([0, 4, 9], dtype=torch.int32), requires_grad=False)
    q = torch.randn(9, 2, 8)
    assert torch.equal(tilewise.attention_varlen(q, q, q, cu), tilewise.attention_varlen(q, q, q, cu.data))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_learnable_numbers_are_refused_not_ignored(name):
    q, k, v = _qkv()
    learnable = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ValueError, match=f"{name} gets no gradient"):
        tilewise.attention(q, k, v, **{name: learnable})
    with torch.no_grad():
        tilewise.attention(q, k, v, **{name: learnable})


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [1e-46, 5e-324, 1e39, 1e300, "0.5", True, float("nan")])
def test_numbers_that_float32_cannot_hold_are_refused(name, value):
    q, k, v = _qkv()
    with pytest.raises((ValueError, TypeError), match=name):
        tilewise.attention(q, k, v, **{name: value})


@pytest.mark.parametrize("side", [sys.maxsize, 2**70, 2**31])
def test_windows_wider_than_any_sequence(side):
    q, k, v = _qkv()
    for window, same in (((0, side), (0, None)), ((side, 1), (None, 1)), ((side, side), None)):
        given = tilewise.attention(q, k, v, window_size=window)
        assert torch.equal(given, tilewise.attention(q, k, v, window_size=same))


def test_batched_gradients_are_refused_and_vmap_over_vjp_is_right():
    q, k, v = _qkv(S=5, H=1, D=3)
    o, vjp = torch.func.vjp(lambda q: tilewise.attention(q, k, v), q)
    upstream = torch.randn(4, *o.shape)
    (batched,) = torch.func.vmap(vjp)(upstream)
    o = tilewise.attention(q.requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="batched gradients"):
        torch.autograd.grad(o, q, upstream, is_grads_batched=True, retain_graph=True)
    for one, do in zip(batched, upstream, strict=True):
        assert torch.equal(one, torch.autograd.grad(o, q, do, retain_graph=True)[0])


def test_what_is_not_a_dense_tensor_is_refused():
    q, k, v = _qkv()
    with pytest.raises(TypeError, match="q must be a dense"):
        tilewise.attention(q.to_sparse(), k, v)
    with pytest.raises(TypeError, match="generator"):
        tilewise.attention(q, k, v, dropout_p=0.1, generator=3)
