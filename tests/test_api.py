"""The public functions: every refusal before any kernel runs, spellings that mean the same, layouts, seeds."""

import dataclasses

import numpy as np
import pytest
import torch

import tilewise
from tilewise import (
    Blocks,
    Causal,
    Chunk,
    Dense,
    Document,
    NoBackendError,
    Prefix,
    Window,
    attention,
    attention_varlen,
    dispatch,
)

NAN, INF = float("nan"), float("inf")


def _t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def _ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.fixture
def no_kernels(monkeypatch):
    """Whoever loads a backend fails the test."""

    def load(name):
        pytest.fail(f"backend {name} was loaded by a call that should have been refused")

    monkeypatch.setattr(dispatch, "load", load)


Q, K, V = _t(2, 5, 4, 8), _t(2, 7, 2, 8), _t(2, 7, 2, 6)
PQ, PK, CU = _t(10, 4, 8), _t(10, 2, 8), _ints(0, 4, 10)

# (id, arguments that replace those of a good call, exception, words its message must hold: the argument, what was given,
# what is accepted)
REFUSALS = [
    ("q_not_tensor", {"q": [1.0]}, TypeError, ("q must be a tensor", "list")),
    ("k_none", {"k": None}, TypeError, ("k must be a tensor", "NoneType")),
    ("q_scalar", {"q": _t()}, ValueError, ("q must have 4 dims", "()")),
    ("q_rank_3", {"q": _t(5, 4, 8)}, ValueError, ("q must have 4 dims", "(5, 4, 8)")),
    ("v_rank_5", {"v": _t(2, 7, 2, 6, 1)}, ValueError, ("v must have 4 dims", "(2, 7, 2, 6, 1)")),
    ("int_q", {"q": _t(2, 5, 4, 8, dtype=torch.int32)}, TypeError, ("q must be float32", "torch.int32")),
    ("bool_v", {"v": _t(2, 7, 2, 6, dtype=torch.bool)}, TypeError, ("v must be float32", "torch.bool")),
    ("mixed_dtypes", {"v": V.bfloat16()}, TypeError, ("share a dtype", "float32", "v torch.bfloat16")),
    ("mixed_devices", {"k": K.to("meta")}, ValueError, ("one device", "cpu", "meta")),
    ("heads", {"k": _t(2, 7, 3, 8), "v": _t(2, 7, 3, 6)}, ValueError, ("multiple of kv heads", "4 and 3")),
    ("no_heads", {"q": _t(2, 5, 0, 8)}, ValueError, ("multiple of kv heads", ">= 1")),
    ("kv_heads_differ", {"v": _t(2, 7, 4, 6)}, ValueError, ("k and v must agree", "(2, 7, 2, 8)", "(2, 7, 4, 6)")),
    ("kv_lengths_differ", {"v": _t(2, 8, 2, 6)}, ValueError, ("k and v must agree",)),
    ("head_dim", {"k": _t(2, 7, 2, 9)}, ValueError, ("share the head dim", "(2, 5, 4, 8)", "(2, 7, 2, 9)")),
    ("batch", {"q": _t(3, 5, 4, 8)}, ValueError, ("share the batch size", "(3, 5, 4, 8)")),
    ("head_dim_0", {"q": _t(2, 5, 4, 0), "k": _t(2, 7, 2, 0)}, ValueError, ("head dim", "1..512", "got 0")),
    ("head_dim_513", {"q": _t(2, 5, 4, 513), "k": _t(2, 7, 2, 513)}, ValueError, ("1..512", "got 513")),
    ("dv_513", {"v": _t(2, 7, 2, 513)}, ValueError, ("head dim of v", "got 513")),
    ("layout", {"layout": "sbhd"}, ValueError, ("layout", "bshd", "'sbhd'")),
    ("causal_word", {"causal": "upper"}, ValueError, ("causal", "top_left", "'upper'")),
    ("causal_number", {"causal": 2}, ValueError, ("causal", "True", "2")),
    ("window_number", {"window_size": 3}, ValueError, ("window_size", "(left, right)", "3")),
    ("window_three", {"window_size": (1, 2, 3)}, ValueError, ("window_size", "(left, right)")),
    ("window_negative_left", {"window_size": (-2, 0)}, ValueError, ("window left", ">= 0", "-2")),
    ("window_negative_right", {"window_size": (-1, -3)}, ValueError, ("window right", ">= 0", "-3")),
    ("window_float", {"window_size": (1.5, 0)}, TypeError, ("window left", "int", "1.5")),
    ("window_bool", {"window_size": (True, 0)}, TypeError, ("window left", "int", "True")),
    ("alignments", {"mask": Window(2, 0, "top_left"), "causal": "bottom_right"}, ValueError, ("one alignment",)),
    ("mask_type", {"mask": "causal"}, TypeError, ("mask", "bool tensor", "str")),
    ("mask_float", {"mask": _t(5, 7)}, ValueError, ("bool tensor", "float32", "`bias`")),
    ("mask_shape", {"mask": _t(5, 8, dtype=torch.bool)}, ValueError, ("broadcast", "(2, 4, 5, 7)", "(5, 8)")),
    (
        "mask_too_many_dims",
        {"mask": _t(1, 2, 4, 5, 7, dtype=torch.bool)},
        ValueError,
        ("bool tensor", "(1, 2, 4, 5, 7)"),
    ),
    ("mask_device", {"mask": _t(5, 7, dtype=torch.bool, device="meta")}, ValueError, ("dense mask", "cpu", "meta")),
    ("blocks_shape", {"mask": Blocks(_t(3, 3, dtype=torch.bool), 4, 4)}, ValueError, ("Blocks", "(2, 2)", "(3, 3)")),
    ("prefix_shape", {"mask": Prefix(_ints(1, 2, 3))}, ValueError, ("Prefix", "(2,)", "(3,)")),
    ("document_length", {"mask": Document(_ints(0, 0, 1))}, ValueError, ("Document", "(1, 3)")),
    ("document_keys", {"mask": Document(_ints(0, 0, 0, 0, 1))}, ValueError, ("Document", "7", "(1, 5)")),
    ("bias_list", {"bias": [0.0]}, TypeError, ("bias must be a tensor", "[0.0]")),
    ("bias_bool", {"bias": _t(5, 7, dtype=torch.bool)}, TypeError, ("bias", "floating point", "bool")),
    ("bias_shape", {"bias": _t(3, 5, 7)}, ValueError, ("bias must broadcast", "(2, 4, 5, 7)", "(3, 5, 7)")),
    ("bias_dims", {"bias": _t(1, 1, 1, 1, 1)}, ValueError, ("bias must broadcast", "(1, 1, 1, 1, 1)")),
    ("bias_device", {"bias": _t(5, 7, device="meta")}, ValueError, ("bias must be on cpu", "meta")),
    ("slopes_shape", {"alibi_slopes": _t(2)}, ValueError, ("alibi_slopes", "(4,)", "(2, 4)", "got (2,)")),
    ("slopes_int", {"alibi_slopes": _ints(1, 2, 3, 4)}, TypeError, ("alibi_slopes", "floating point", "int32")),
    ("slopes_list", {"alibi_slopes": [1.0] * 4}, TypeError, ("alibi_slopes", "tensor")),
    ("sinks_shape", {"sinks": _t(2, 4)}, ValueError, ("sinks must be (H,) = (4,)", "(2, 4)")),
    ("softcap_negative", {"softcap": -1.0}, ValueError, ("softcap", "-1.0")),
    ("softcap_nan", {"softcap": NAN}, ValueError, ("softcap", "finite", "nan")),
    ("softcap_word", {"softcap": "big"}, TypeError, ("softcap", "number", "'big'")),
    ("dropout_one", {"dropout_p": 1.0}, ValueError, ("dropout_p", "[0.0, 1.0)", "1.0")),
    ("dropout_negative", {"dropout_p": -0.1}, ValueError, ("dropout_p", "-0.1")),
    ("dropout_nan", {"dropout_p": NAN}, ValueError, ("dropout_p", "nan")),
    ("scale_nan", {"softmax_scale": NAN}, ValueError, ("softmax_scale", "finite", "nan")),
    ("scale_inf", {"softmax_scale": INF}, ValueError, ("softmax_scale", "finite", "inf")),
    ("scale_word", {"softmax_scale": "auto"}, TypeError, ("softmax_scale", "number", "'auto'")),
    ("backend", {"backend": "gpu9000"}, ValueError, ("backend", "cpu", "'gpu9000'")),
]

VARLEN_REFUSALS = [
    ("rank", {"q": Q}, ValueError, ("packed q", "(2, 5, 4, 8)", "use attention")),
    ("list", {"cu_seqlens_q": [0, 4, 10]}, ValueError, ("cu_seqlens_q", "int32", "[0, 4, 10]")),
    ("float", {"cu_seqlens_q": torch.tensor([0.0, 10.0])}, ValueError, ("cu_seqlens_q", "int32", "float32")),
    ("two_dims", {"cu_seqlens_k": CU[None]}, ValueError, ("cu_seqlens_k", "1-D", "(1, 3)")),
    ("empty", {"cu_seqlens_q": CU[:0]}, ValueError, ("cu_seqlens_q", "0")),
    ("start", {"cu_seqlens_q": _ints(1, 4, 10)}, ValueError, ("cu_seqlens_q must start at 0", "[1, 4, 10]")),
    ("decreasing", {"cu_seqlens_k": _ints(0, 8, 6)}, ValueError, ("cu_seqlens_k", "never decrease", "[0, 8, 6]")),
    ("too_long", {"cu_seqlens_k": _ints(0, 4, 11)}, ValueError, ("cu_seqlens_k", "11", "10 rows")),
    ("counts", {"cu_seqlens_k": _ints(0, 4, 8, 10)}, ValueError, ("cu_seqlens_k", "3 entries", "(4,)")),
    ("max_seqlen", {"max_seqlen_q": 5}, ValueError, ("max_seqlen", "5", "6 rows")),
    ("max_seqlen_float", {"max_seqlen_q": 6.5}, TypeError, ("max_seqlen", "int", "6.5")),
    ("used_too_long", {"seqused_k": _ints(4, 7)}, ValueError, ("seqused", "[4, 7]", "[4, 6]")),
    ("used_negative", {"seqused_q": _ints(-1, 2)}, ValueError, ("seqused", "[-1, 2]")),
    ("used_count", {"seqused_k": _ints(4)}, ValueError, ("seqused", "(2,)", "(1,)")),
    ("used_scalar", {"seqused_k": torch.tensor(3, dtype=torch.int32)}, ValueError, ("seqused", "(2,)", "()")),
    ("used_two_dims", {"seqused_k": _ints(4, 6)[:, None]}, ValueError, ("seqused", "(2,)", "(2, 1)")),
    ("used_list", {"seqused_k": [4, 6]}, ValueError, ("seqused", "int32", "[4, 6]")),
    ("document", {"mask": Document(_ints(0, 0, 0, 0, 1, 1))}, ValueError, ("Document", "cu_seqlens")),
    ("bias_shape", {"bias": _t(10, 10)}, ValueError, ("bias must broadcast", "(2, 4, 6, 6)", "(10, 10)")),
]


def _refused(call, arguments, change, error, words):
    with pytest.raises(error) as caught:
        call(**arguments | change)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in {caught.value}"


@pytest.mark.parametrize(("change", "error", "words"), [pytest.param(*r[1:], id=r[0]) for r in REFUSALS])
def test_attention_refuses(change, error, words, no_kernels):
    _refused(attention, {"q": Q, "k": K, "v": V}, change, error, words)


@pytest.mark.parametrize(("change", "error", "words"), [pytest.param(*r[1:], id=r[0]) for r in VARLEN_REFUSALS])
def test_attention_varlen_refuses(change, error, words, no_kernels):
    good = {"q": PQ, "k": PK, "v": PK, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    _refused(attention_varlen, good, change, error, words)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Window(-2, 0), ValueError, "window left"),
        (lambda: Window(0, 0.5), TypeError, "window right"),
        (lambda: Causal("middle"), ValueError, "align"),
        (lambda: Chunk(0), ValueError, "Chunk size"),
        (lambda: Chunk(2.0), TypeError, "Chunk size"),
        (lambda: Prefix(-1), ValueError, "Prefix length"),
        (lambda: Prefix(torch.tensor(3)), ValueError, "Prefix length"),
        (lambda: Prefix(torch.tensor([1.0])), ValueError, "Prefix length"),
        (lambda: Document(torch.tensor([0.0])), ValueError, "ids_q"),
        (lambda: Document(_ints(0, 1)[None].expand(2, 2), _ints(0, 1)[None].expand(3, 2)), ValueError, "batch size"),
        (lambda: Document.from_cu_seqlens(_ints(1, 2)), ValueError, "start at 0"),
        (lambda: Document.from_cu_seqlens(_ints(0, 2, 1)), ValueError, "never decrease"),
        (lambda: Blocks(torch.ones(2, 2)), ValueError, "bool tensor"),
        (lambda: Blocks(torch.ones(2, dtype=torch.bool)), ValueError, "2, 3 or 4 dims"),
        (lambda: Blocks(torch.ones(2, 2, dtype=torch.bool), 0), ValueError, "block_m"),
        (lambda: Dense(torch.ones(2, 2)), ValueError, "bool tensor"),
        (lambda: Causal() & 3, TypeError, "mask"),
    ],
)
def test_masks_refuse(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_no_backend_error_names_every_backend_and_every_reason(monkeypatch, no_kernels):
    row = dispatch.capabilities("cpu")
    poor = dataclasses.replace(
        row,
        name="poor",
        features=frozenset({"causal"}),
        dtypes=(torch.float16,),
        max_head_dim=4,
        requires=lambda: "no luck",
    )
    other = dataclasses.replace(row, name="other", device="cuda", extra=lambda problem: "odd rule")
    monkeypatch.setattr(dispatch, "BACKENDS", (poor, other))
    options = {"window_size": (3, 0), "softcap": 17.25, "sinks": _t(4), "causal": True}
    with pytest.raises(NoBackendError) as caught:
        attention(Q, K, V, **options)
    poor_line, other_line = str(caught.value).splitlines()[1:]
    for word in (
        "poor",
        "float32",
        "exceed 4",
        "no luck",
        "no sliding window",
        "no softcap",
        "no attention sinks",
        "no Dv != D",
    ):
        assert word in poor_line
    assert "causal" not in poor_line
    assert "other: the tensors are on cpu, this backend runs on cuda; odd rule" in other_line
    with pytest.raises(NoBackendError, match=r"'other'.*asked for explicitly") as caught:
        attention(Q, K, V, backend="other", softcap=17.25)
    assert "poor" not in str(caught.value)


def test_use_backend_is_scoped_and_never_falls_back(monkeypatch):
    row = dataclasses.replace(dispatch.capabilities("cpu"), name="none", requires=lambda: "never there")
    monkeypatch.setattr(dispatch, "BACKENDS", (*dispatch.BACKENDS, row))
    with tilewise.use_backend("none"), pytest.raises(NoBackendError, match="never there"):
        attention(Q, K, V)
    attention(Q, K, V)
    with pytest.raises(ValueError, match="nonsense"), tilewise.use_backend("nonsense"):
        pass


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


def test_bhsd_refuses_a_wrong_rank(no_kernels):
    with pytest.raises(ValueError, match="4 dims"):
        attention(Q[0], K, V, layout="bhsd")


def test_varlen_of_one_sequence_is_dense():
    q, k, v = _random((5, 4, 8), (7, 2, 8), (7, 2, 6))
    packed = attention_varlen(q, k, v, _ints(0, 5), _ints(0, 7), causal=True, return_lse=True, return_max_logit=True)
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
