"""The ops under what watches or transforms calls: torch.func, checkpoint, autocast, modes, threads."""

import pytest
import torch
from calls import MIX, PLAIN, assert_equal, leaves_of
from torch.utils.checkpoint import checkpoint

from tilewise import attention, attention_varlen, ops
from tilewise.testing import make_inputs, run


def _scalar(q, k, v):
    return attention(q, k, v, causal=True).sin().sum()


# ---- torch.func ----


def test_func_grad():
    leaves = leaves_of(PLAIN)
    found = torch.func.grad(_scalar, argnums=(0, 1, 2))(*leaves)
    assert_equal(found, torch.autograd.grad(_scalar(*leaves), leaves))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 0), (2, 0, None)])
def test_vmap(in_dims):
    i = make_inputs(PLAIN)
    many = [
        t if d is None else torch.stack([t, t.flip(1), t + 1], dim=d)
        for t, d in zip((i.q, i.k, i.v), in_dims, strict=True)
    ]
    found = torch.func.vmap(lambda q, k, v: attention(q, k, v, causal=True), in_dims=in_dims)(*many)
    for n in range(3):
        one = [t if d is None else t.select(d, n) for t, d in zip(many, in_dims, strict=True)]
        torch.testing.assert_close(found[n], attention(*one, causal=True))


@pytest.mark.parametrize("in_dim", [0, 1])
def test_vmap_over_nothing(in_dim):
    nothing = torch.zeros(2, 5, 4, 8).unsqueeze(in_dim).narrow(in_dim, 0, 0)
    slices = torch.func.vmap(lambda t: attention(t, t, t, return_lse=True), in_dims=in_dim)
    (o, lse), vjp = torch.func.vjp(slices, nothing)
    assert (o.shape, lse.shape) == ((0, 2, 5, 4, 8), (0, 2, 4, 5))
    assert vjp((o, lse))[0].shape == nothing.shape


def test_vmap_over_bias():
    i = make_inputs(PLAIN)
    biases = torch.randn(3, 9, 12)
    found = torch.func.vmap(lambda b: attention(i.q, i.k, i.v, bias=b))(biases)
    assert_equal(found, [attention(i.q, i.k, i.v, bias=b) for b in biases])


def test_vmap_over_lengths():
    many = torch.randn(2, 10, 2, 8)
    cu = torch.tensor([[0, 4, 10], [0, 7, 9]], dtype=torch.int32)
    found = torch.func.vmap(lambda t, c: attention_varlen(t, t, t, c, None, 7, 7, causal=True))(many, cu)
    assert_equal(found, [attention_varlen(t, t, t, c, causal=True) for t, c in zip(many, cu, strict=True)])
    with pytest.raises(ValueError, match="max_seqlen is required"):
        torch.func.vmap(lambda t, c: attention_varlen(t, t, t, c))(many, cu)


def test_gradients_per_sample():
    i = make_inputs(PLAIN)

    def loss(q, k, v):
        return attention(q[None], k[None], v[None], causal=True).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(i.q, i.k, i.v)
    leaves = [t.clone().requires_grad_() for t in (i.q, i.k, i.v)]
    assert_equal(found, torch.autograd.grad(_scalar(*leaves), leaves))


def test_vmap_with_dropout_is_refused():
    i = make_inputs(PLAIN)
    with pytest.raises((NotImplementedError, RuntimeError), match="vmap"):
        torch.func.vmap(lambda q: attention(q[None], i.k[:1], i.v[:1], dropout_p=0.5))(i.q)


def test_functional_call():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.proj(x), x, x
            return attention(q, k, v, causal=True)

    model, x = Model(), torch.randn(2, 5, 2, 8)
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(parameters)
    expected = torch.autograd.grad(model(x).sin().sum(), list(parameters.values()))
    assert_equal(found.values(), expected)


# ---- checkpoint, autocast, modes, threads ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_redraws_the_same_dropout_mask(use_reentrant):
    leaves = leaves_of(PLAIN)

    def function(q, k, v):
        return attention(q, k, v, causal=True, dropout_p=0.4).sin().sum()

    torch.manual_seed(3)
    expected = torch.autograd.grad(function(*leaves), leaves)
    torch.manual_seed(3)
    checkpoint(function, *leaves, use_reentrant=use_reentrant).backward()
    for t, g in zip(leaves, expected, strict=True):
        assert torch.equal(t.grad, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_sdpa(dtype):
    q, k, v = leaves_of(PLAIN)
    with torch.autocast("cpu", dtype):
        o, lse = attention(q, k.bfloat16(), v, causal=True, return_lse=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, q, q)))
        double = attention(q.double(), k.double(), v.double())
    assert o.dtype == theirs.dtype == dtype
    assert lse.dtype == torch.float32
    assert double.dtype == torch.float64
    o.sum().backward()
    assert q.grad.dtype == v.grad.dtype == torch.float32


def test_outside_autocast_mixed_dtypes_are_refused():
    q, k, v = leaves_of(PLAIN)
    with pytest.raises(TypeError, match="share a dtype"):
        attention(q, k, v.bfloat16())


def test_inference_mode():
    i = make_inputs(MIX)
    with torch.inference_mode():
        found = attention(i.q, i.k, i.v, **i.options)
    assert torch.equal(found, attention(i.q, i.k, i.v, **i.options))


def test_dispatch_modes_see_the_ops():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **kwargs or {})

    leaves = leaves_of(PLAIN)
    with Log() as log:
        _scalar(*leaves).backward()
    assert "tilewise::attention_fwd" in log.names
    assert "tilewise::attention_bwd" in log.names


def test_tensor_subclasses_reach_their_own_dispatch():
    from torch.testing._internal.two_tensor import TwoTensor

    i = make_inputs(PLAIN)
    o = attention(TwoTensor(i.q, i.q * 2), TwoTensor(i.k, i.k), TwoTensor(i.v, i.v))
    assert torch.equal(o.a, attention(i.q, i.k, i.v))
    assert torch.equal(o.b, attention(i.q * 2, i.k, i.v))


def test_parameters_are_plain_tensors():
    i = make_inputs(MIX)
    options = i.options | {name: torch.nn.Parameter(i.options[name]) for name in ("bias", "alibi_slopes", "sinks")}
    found = attention(i.q, i.k, i.v, **options)
    assert torch.equal(found.detach(), attention(i.q, i.k, i.v, **i.options))
    found.sum().backward()
    assert all(options[name].grad is not None for name in ("bias", "alibi_slopes", "sinks"))


def test_calls_from_many_threads_are_equal():
    from concurrent.futures import ThreadPoolExecutor

    inputs = make_inputs(MIX)
    expected = run(inputs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(inputs), range(8)):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_refusals_name_the_way_out():
    for text in (ops.DOUBLE_BACKWARD, ops.JVP):
        assert "tilewise.reference.attention" in text


@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_is_refused(grad):
    leaves = [t.requires_grad_(grad) for t in (t.detach() for t in leaves_of(PLAIN))]
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.trace(lambda q, k, v: attention(q, k, v, causal=True), leaves)
