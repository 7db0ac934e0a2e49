"""Calls made again: what goes straight to the kernels gives what the long way gives, and all that may not goes that way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import again, attention, dispatch

BF16, FP16 = torch.bfloat16, torch.float16


class _Repeating:
    """The CPU's kernels as a backend that can repeat forward passes, and counts them."""

    def __init__(self):
        self.backend = dispatch.capabilities("cpu").load()
        self.repeats = 0

    def forward(self, *args):
        return self.backend.forward(*args)

    def backward(self, *args):
        return self.backend.backward(*args)

    def repeated(self, q, k, v, bound):
        layouts = [(t.shape, t.stride()) for t in (q, k, v)]

        def start(tensors, at):
            assert at == [t.data_ptr() for t in tensors]
            assert layouts == [(t.shape, t.stride()) for t in tensors] or tensors[0].shape != q.shape  # bhsd: as given
            self.repeats += 1
            swapped = layouts != [(t.shape, t.stride()) for t in tensors]
            x, y, z = (t.transpose(1, 2) for t in tensors) if swapped else tensors
            return self.backend.forward(x, y, z, bound, 0, 0)

        return start


@pytest.fixture
def repeating(monkeypatch):
    """CPU tensors stand for those of a GPU."""
    made = _Repeating()
    monkeypatch.setattr(again, "_on_gpu", lambda q: q.device.type == "cpu")
    monkeypatch.setattr(again, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(dispatch, "load", lambda name: made)
    return made


def _qkv(dtype=BF16, S=20, H=2, D=16, grad=False):
    return [torch.randn(1, S, H, D).to(dtype).requires_grad_(grad) for _ in range(3)]


def _long_way(monkeypatch, function):
    with monkeypatch.context() as patch:
        patch.setattr(again, "key_of", lambda *args: None)
        return function()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"softmax_scale": 0.3, "return_lse": True},
        {"layout": "bhsd", "return_max_logit": True, "return_lse": True},
        {"deterministic": True, "causal": True, "layout": "bhsd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_made_again_is_the_same_call(repeating, monkeypatch, options, grad):
    attention(*_qkv(grad=grad), **options)
    assert repeating.repeats == 0
    inputs = _qkv(grad=grad)

    def outputs():
        found = attention(*inputs, **options)
        found = found if isinstance(found, tuple) else (found,)
        if not grad:
            return found
        total = sum(
            (x.float() * torch.linspace(0.5, 1, x.numel()).view(x.shape)).sum() for x in found if x.requires_grad
        )
        return (*found, *torch.autograd.grad(total, inputs))

    found = outputs()
    assert repeating.repeats == 1
    expected = _long_way(monkeypatch, outputs)
    assert repeating.repeats == 1
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.requires_grad == y.requires_grad and torch.equal(x, y)


def test_no_gradient_where_none_is_asked_for(repeating):
    q, k, v = _qkv()
    k.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not attention(q, k, v).requires_grad
        o = attention(q, k, v)
        assert o.requires_grad
        (dk,) = torch.autograd.grad(o.sum(), k)
        assert dk.shape == k.shape
    assert repeating.repeats == 3


def test_what_differs_is_another_call(repeating, monkeypatch):
    """Each of these differs from all before it in something that the kernels or the result depend on."""
    q, k, v = _qkv()
    strided = [torch.randn(1, 2, 20, 16).to(BF16).transpose(1, 2) for _ in range(3)]
    calls = [
        lambda: attention(q, k, v),
        lambda: attention(q, k, v, causal=True),
        lambda: attention(q, k, v, softmax_scale=0.5),
        lambda: attention(q, k, v, layout="bhsd"),
        lambda: attention(q, k, v, deterministic=True),
        lambda: attention(q, k, v, return_max_logit=True),
        lambda: attention(q, k, v, backend="cpu"),
        lambda: attention(*_qkv(FP16)),
        lambda: attention(*_qkv(S=21)),
        lambda: attention(*_qkv(H=1)),
        lambda: attention(*_qkv(D=8)),
        lambda: attention(q, *_qkv(S=24)[1:]),
        lambda: attention(strided[0], k, v),
        lambda: attention(q, strided[1], v),
        lambda: attention(q, k, strided[2]),
    ]
    for call in calls:
        call()
    assert repeating.repeats == 0
    with tilewise.use_backend("cpu"):
        attention(q, k, v)
    assert repeating.repeats == 0
    for call in calls:
        call()
    assert repeating.repeats == len(calls)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_unusual_calls_go_the_long_way(repeating):
    q, k, v = _qkv()
    attention(q, k, v)
    attention(*_qkv(torch.float32)), attention(*_qkv(torch.float32))
    shifted = torch.randn(641).to(BF16)[1:].view(1, 20, 2, 16)  # not aligned to 16 bytes
    negative = torch.complex(torch.zeros(1, 20, 2, 16), torch.randn(1, 20, 2, 16)).conj().imag
    assert negative.is_neg()
    calls = [
        lambda: attention(q, k, k),
        lambda: attention(q, q, v),
        lambda: attention(q, k, shifted),
        lambda: attention(q, k, v, causal="top_left"),
        lambda: attention(q, k, v, window_size=(3, 3)),
        lambda: attention(q, k, v, softcap=2.0),
        lambda: attention(q, k, v, dropout_p=0.5),
        lambda: attention(q, k, v, sinks=torch.zeros(2)),
        lambda: torch.func.vmap(attention)(*(x[None] for x in (q, k, v))),
        lambda: torch.func.grad(lambda x: attention(x, k, v).sum().float())(q),
    ]
    for call in calls * 2:
        call()
    with _Mode():
        attention(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        attention(q, k, v)
    assert repeating.repeats == 0
    attention(q, k, v)
    assert repeating.repeats == 1


def test_autocast_casts(repeating, monkeypatch):
    """Also in the call that would be remembered: without it, the same tensors are refused or mean another call."""
    q, k, v = _qkv(BF16)
    mixed = q.float(), k, v
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        patch.setattr(torch, "get_autocast_dtype", lambda device: FP16)
        for _ in range(2):
            assert attention(q, k, v).dtype == attention(*mixed).dtype == FP16
    with pytest.raises(TypeError, match="share a dtype"):
        attention(*mixed)
    assert attention(q, k, v).dtype == BF16 and repeating.repeats == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        patch.setattr(torch, "get_autocast_dtype", lambda device: FP16)
        assert attention(q, k, v).dtype == FP16 and repeating.repeats == 0


def test_numbers_in_tensors_are_read_each_time(repeating):
    q, k, v = _qkv()
    scale = torch.tensor(0.5)
    first = attention(q, k, v, softmax_scale=scale)
    scale.fill_(0.1)
    assert not torch.equal(attention(q, k, v, softmax_scale=scale), first)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, 20, 2, 16).to_sparse(), [[1.0]], None], ids=["sparse", "list", "None"]
)
def test_errors_are_those_of_the_long_way(repeating, wrong):
    q, k, v = _qkv()
    attention(q, k, v)
    for args in ((wrong, k, v), (q, wrong, v), (q, k, wrong)):
        with pytest.raises(TypeError, match="must be a"):
            attention(*args)
    with pytest.raises(ValueError, match="layout"):
        attention(q, k, v, layout=["bshd"])
    with pytest.raises(ValueError, match="backend must be one of"):
        attention(q, k, v, backend="none")


def test_what_is_remembered_has_a_limit(repeating, monkeypatch):
    monkeypatch.setattr(again, "MOST", 4)
    for S in range(1, 12):
        attention(*_qkv(S=S))
    assert len(again._known) <= 4


def test_backends_that_repeat_nothing_are_asked_as_always(monkeypatch):
    monkeypatch.setattr(again, "_on_gpu", lambda q: True)
    monkeypatch.setattr(again, "_known", {})
    q, k, v = _qkv()
    assert torch.equal(attention(q, k, v), attention(q, k, v)) and not again._known


def test_gradients_of_gradients_and_batches_of_them_are_refused_as_ever(repeating):
    q, k, v = _qkv(grad=True)
    attention(q, k, v)
    o = attention(q, k, v)
    assert repeating.repeats == 1
    (dq,) = torch.autograd.grad(o.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.float().square().sum().backward()
    o = attention(q, k, v)
    with pytest.raises(NotImplementedError, match="batched gradients"):
        torch.autograd.grad(o, q, torch.ones(2, *o.shape, dtype=BF16), is_grads_batched=True)
    o, lse = attention(q, k, v, return_lse=True)
    (dv,) = torch.autograd.grad(lse.sum(), v)
    assert not dv.any()
