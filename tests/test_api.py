"""The public functions: spellings that mean the same, layouts, outputs, seeds."""

import numpy as np
import pytest
import torch

import tilewise
from tilewise import (
    Causal,
    Dense,
    Prefix,
    Window,
    attention,
    attention_varlen,
)

CU = torch.tensor([0, 4, 10], dtype=torch.int32)


# ---- spellings ----


def _random(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) for s in shapes]


DENSE = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)]

SAME = {
    "no_window": [{}, *({"window_size": w} for w in ((-1, -1), (None, None), [-1, None], torch.tensor([-1, -1])))],
    "window": [
        {"window_size": (2, 1)},
        {"window_size": [2, 1]},
        {"window_size": (np.int64(2), np.int32(1))},
        {"window_size": (torch.tensor(2), torch.tensor(1))},
        {"window_size": torch.tensor([2, 1])},
        {"window_size": np.array([2, 1])},
        {"mask": Window(2, 1)},
        {"mask": Window(2, None) & Window(None, 1)},
        {"window_size": (2, 1), "mask": tilewise.Full()},
    ],
    "causal": [
        {"causal": True},
        {"causal": "bottom_right"},
        {"mask": Causal()},
        {"mask": Causal("bottom_right")},
        {"window_size": (None, 0)},
        {"window_size": (-1, 0)},
        {"mask": torch.ones(5, 7, dtype=torch.bool).tril(2)},
        {"mask": Prefix(0)},
        {"causal": True, "window_size": (-1, 4)},
    ],
    "top_left": [{"causal": "top_left"}, {"mask": Causal("top_left")}, {"mask": Window(None, 0, "top_left")}],
    "left_only": [{"window_size": (4, -1)}, {"window_size": (4, None)}, {"window_size": (4, 10**6)}],
    "softcap": [{"softcap": 0.5}, {"softcap": torch.tensor(0.5)}, {"softcap": np.float64(0.5)}],
    "no_softcap": [{}, {"softcap": 0.0}, {"softcap": None}, {"softcap": 0}],
    "scale": [{"softmax_scale": 2}, {"softmax_scale": 2.0}, {"softmax_scale": torch.tensor(2.0)}],
    "default_scale": [{}, {"softmax_scale": 8**-0.5}, {"dropout_p": 0}, {"deterministic": True}, {"backend": "cpu"}],
    "slopes": [{"alibi_slopes": torch.arange(4.0)}, {"alibi_slopes": torch.arange(4.0).expand(2, 4)}],
    "bias": [{"bias": torch.arange(7.0)}, {"bias": torch.arange(7.0).expand(2, 4, 5, 7)}],
    "prefix": [{"mask": Prefix(3)}, {"mask": Prefix(torch.tensor([3, 3]))}, {"mask": Prefix(np.int64(3))}],
}


@pytest.mark.parametrize("options", [pytest.param(o, id=name) for name, o in SAME.items()])
def test_spellings_are_bitwise_equal(options):
    q, k, v = _random(*DENSE)
    first, *others = [attention(q, k, v, return_lse=True, **o) for o in options]
    for o, lse in others:
        assert torch.equal(o, first[0])
        assert torch.equal(lse, first[1])


def test_the_families_of_spellings_differ():
    q, k, v = _random(*DENSE)
    names = ("no_window", "window", "causal", "top_left", "left_only", "softcap", "scale", "slopes", "bias")
    results = [attention(q, k, v, **SAME[name][0]) for name in names]
    for i, a in enumerate(results):
        assert not any(torch.equal(a, b) for b in results[:i])


def test_layouts_are_equal():
    q, k, v = (t.requires_grad_() for t in _random(*DENSE))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
    o2, lse2 = attention(*turned, causal=True, return_lse=True, layout="bhsd")
    assert torch.equal(o2.transpose(1, 2), o)
    assert torch.equal(lse2, lse)
    o.sin().sum().backward()
    o2.sin().sum().backward()
    for a, b in zip((q, k, v), turned, strict=True):
        torch.testing.assert_close(b.grad.transpose(1, 2), a.grad)


def test_varlen_of_one_sequence_is_dense():
    q, k, v = _random((5, 4, 8), (7, 2, 8), (7, 2, 6))
    packed = attention_varlen(
        q, k, v, CU.new_tensor([0, 5]), CU.new_tensor([0, 7]), causal=True, return_lse=True, return_max_logit=True
    )
    dense = attention(q[None], k[None], v[None], causal=True, return_lse=True, return_max_logit=True)
    for a, b in zip(packed, (dense[0][0], dense[1][0], dense[2]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_seqlen", [None, 6, 100, np.int64(6), torch.tensor(6)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_in_all_spellings(max_seqlen, dtype):
    q, k = _random((10, 4, 8), (10, 2, 8))
    expected = attention_varlen(q, k, k, CU)
    assert torch.equal(attention_varlen(q, k, k, CU.to(dtype), CU.to(dtype), max_seqlen, max_seqlen), expected)


def test_outputs_are_those_asked_for():
    q, k, v = (t.bfloat16() for t in _random(*DENSE))
    o = attention(q, k, v)
    assert (o.shape, o.dtype, o.is_contiguous()) == ((2, 5, 4, 6), torch.bfloat16, True)
    o2, lse, peak = attention(q, k, v, return_lse=True, return_max_logit=True)
    assert torch.equal(o2, o)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    assert (peak.shape, peak.dtype) == ((4,), torch.float32)
    assert torch.equal(attention(q, k, v, return_max_logit=True)[1], peak)
    assert attention(q.double(), k.double(), v.double(), return_lse=True)[1].dtype == torch.float64


def test_caches_follow_values_not_objects():
    """A number given as a tensor and changed in place is a new number."""
    q, k, v = _random(*DENSE)
    cap, scale = torch.tensor(0.5), torch.tensor(2.0)
    attention(q, k, v, softcap=cap, softmax_scale=scale)
    cap.fill_(3.0)
    scale.fill_(0.1)
    found = attention(q, k, v, softcap=cap, softmax_scale=scale)
    assert torch.equal(found, attention(q, k, v, softcap=3.0, softmax_scale=scale.item()))


def test_dropout_tensor_changed_in_place():
    q, k, v = _random(*DENSE)
    p = torch.tensor(0.5)
    attention(q, k, v, dropout_p=p)
    p.fill_(0.75)
    found = attention(q, k, v, dropout_p=p, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found, attention(q, k, v, dropout_p=0.75, generator=torch.Generator().manual_seed(3)))


def test_masks_changed_in_place_are_read_again():
    q, k, v = _random(*DENSE)
    keep = torch.rand(5, 7) < 0.5
    mask = Dense(keep)
    attention(q, k, v, mask=mask)
    keep.logical_not_()
    assert torch.equal(attention(q, k, v, mask=mask), attention(q, k, v, mask=keep.clone()))


# ---- seeds ----


def test_dropout_seeds():
    q, k, v = _random(*DENSE)

    def run(**options):
        return attention(q, k, v, dropout_p=0.5, **options)

    torch.manual_seed(5)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(run(), first)
    own = [run(generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(own[0], own[1])
    assert not torch.equal(own[0], own[2])


def test_without_dropout_no_random_state_is_used():
    q, k, v = _random(*DENSE)
    before = torch.get_rng_state()
    attention(q, k, v)
    attention(q, k, v, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_own_generator_leaves_the_global_one_alone():
    q, k, v = _random(*DENSE)
    before = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_keeps_the_mean():
    q, k, v = _random((1, 64, 8, 8), (1, 256, 8, 8), (1, 256, 8, 8))
    weights_seen = attention(q * 0, k, torch.ones_like(v), dropout_p=0.3)
    kept = weights_seen.mean() * 0.7
    assert abs(float(kept) - 0.7) < 5 * (0.21 / (64 * 256 * 8)) ** 0.5
