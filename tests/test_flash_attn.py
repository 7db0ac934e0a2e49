"""The drop-in names: FlashAttention-2's signatures and meanings."""

import inspect

import pytest
import torch

from tilewise import attention, attention_varlen, flash_attn

TAIL = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *TAIL],
    "flash_attn_kvpacked_func": ["q", "kv", *TAIL],
    "flash_attn_qkvpacked_func": ["qkv", *TAIL],
    "flash_attn_varlen_func": ["q", "k", "v", *LENGTHS, *TAIL, ("block_table", None)],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *LENGTHS, *TAIL],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *TAIL],
}
CU = torch.tensor([0, 4, 10], dtype=torch.int32)


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signature(name, expected):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    found = [p.name if p.default is p.empty else (p.name, p.default) for p in parameters]
    assert found == expected
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def _qkv(dtype=torch.float32, H=4, Hkv=4, packed=False):
    lead = (10,) if packed else (2, 10)
    return [torch.randn(*lead, heads, 8).to(dtype) for heads in (H, Hkv, Hkv)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_positional_call(dtype):
    q, k, v = _qkv(dtype)
    slopes = torch.rand(4)
    found = flash_attn.flash_attn_func(q, k, v, 0.0, 0.5, True, (3, 2), 7.0, slopes, True, False)
    options = {"softmax_scale": 0.5, "window_size": (3, 0), "softcap": 7.0, "alibi_slopes": slopes}
    assert torch.equal(found, attention(q, k, v, **options))


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (-1, 2), (3, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_causal_forces_the_right_side_to_0(window, causal):
    q, k, v = _qkv()
    found = flash_attn.flash_attn_func(q, k[:, :7], v[:, :7], causal=causal, window_size=window)
    expected = attention(q, k[:, :7], v[:, :7], window_size=(window[0], 0) if causal else window)
    assert torch.equal(found, expected)


def test_window_as_a_tensor():
    q, k, v = _qkv()
    found = flash_attn.flash_attn_func(q, k, v, window_size=torch.tensor([3, 2]))
    assert torch.equal(found, attention(q, k, v, window_size=(3, 2)))


def test_packed_forms_are_the_plain_one_with_gradients():
    qkv = torch.randn(2, 10, 3, 4, 8, requires_grad=True)
    o = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    (grad,) = torch.autograd.grad(o.sin().sum(), qkv)
    q, k, v = (t.detach().requires_grad_() for t in qkv.unbind(2))
    o2 = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, None, True)
    o3 = flash_attn.flash_attn_func(q, k, v, 0.0, None, True)
    assert torch.equal(o, o3)
    assert torch.equal(o2, o3)
    torch.testing.assert_close(grad, torch.stack(torch.autograd.grad(o3.sin().sum(), (q, k, v)), 2))


def test_varlen_forms_are_equal():
    q, k, v = _qkv(packed=True)
    lengths = (CU, CU, 6, 6)
    expected = attention_varlen(q, k, v, CU, causal=True)
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, *lengths, 0.0, None, True), expected)
    kv = torch.stack([k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, 0.0, None, True), expected)
    qkv = torch.stack([q, k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, CU, 6, 0.0, None, True), expected)


def test_return_attn_probs_without_dropout():
    q, k, v = _qkv()
    o, lse, mask = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
    assert mask.numel() == 0


def _explains(o, mask, v, p, group):
    """Whether S_dmask holds the weights and the dropout pattern from which o was made."""
    v = v.repeat_interleave(group, dim=2)
    kept = mask.clamp(min=0)[:, :, : o.shape[1], : v.shape[1]]
    torch.testing.assert_close(o, torch.einsum("bhmn,bnhd->bmhd", kept, v) / (1 - p))


def test_return_attn_probs_with_dropout():
    q, k, v = _qkv(H=4, Hkv=2)
    o, lse, mask = flash_attn.flash_attn_func(q, k, v, 0.3, causal=True, return_attn_probs=True)
    assert (mask.shape, mask.dtype) == ((2, 4, 128, 128), q.dtype)
    assert (mask[:, :, 10:] == 0).all()
    assert (mask[..., 10:] == 0).all()
    torch.testing.assert_close(mask.abs().sum(-1)[:, :, :10], torch.ones(2, 4, 10))
    _explains(o, mask, v, 0.3, 2)
    torch.testing.assert_close(lse, attention(q, k, v, causal=True, return_lse=True)[1])


def test_return_attn_probs_varlen():
    q, k, v = _qkv(packed=True)
    o, lse, mask = flash_attn.flash_attn_varlen_func(q, k, v, CU, CU, 6, 6, 0.3, return_attn_probs=True)
    assert lse.shape == (4, 10)
    assert mask.shape == (2, 4, 128, 128)
    for b, rows in enumerate((slice(0, 4), slice(4, 10))):
        _explains(o[None, rows], mask[b : b + 1], v[None, rows], 0.3, 1)


def test_dropout_uses_the_global_seed():
    q, k, v = _qkv()
    torch.manual_seed(1)
    first = flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    second = flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    torch.manual_seed(1)
    again = flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second[0])


def test_block_table_is_refused():
    q, k, v = _qkv(packed=True)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache"):
        flash_attn.flash_attn_varlen_func(q, k, v, CU, CU, 6, 6, block_table=torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(2, 10, 2, 4, 8), (10, 8)])
def test_wrong_packing_is_refused(shape):
    with pytest.raises(ValueError, match="qkv must be"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(shape))
