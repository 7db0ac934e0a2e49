"""Every refusal of the public functions, before any kernel runs: the argument, what was given, what is accepted."""

import dataclasses

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
from tilewise.problem import Signature, make_problem
from tilewise.spec import AttentionSpec

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
    ("head_dim_0", {"q": _t(2, 5, 4, 0), "k": _t(2, 7, 2, 0)}, ValueError, ("head dim", "1..576", "got 0")),
    ("head_dim_577", {"q": _t(2, 5, 4, 577), "k": _t(2, 7, 2, 577)}, ValueError, ("1..576", "got 577")),
    ("dv_577", {"v": _t(2, 7, 2, 577)}, ValueError, ("head dim of v", "got 577")),
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


def test_bhsd_refuses_a_wrong_rank(no_kernels):
    with pytest.raises(ValueError, match="4 dims"):
        attention(Q[0], K, V, layout="bhsd")


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((1, 8, 2, 20), (1, 8, 2, 20)), {}, "20, 20 are not multiples of 8"),
        (((1, 8, 2, 64), (1, 0, 2, 64)), {}, "no rows or no keys"),
        (((1, 2**15, 2**16, 8), (1, 8, 2, 8)), {}, "too many"),
        (((1, 8, 2, 64), (1, 8, 2, 64)), {"mask": Blocks(_t(1, 1, dtype=torch.bool), 64, 32)}, "32 keys, not a"),
        (((1, 8, 2, 512), (1, 8, 2, 512)), {}, "exceed 256"),
        (((1, 64, 32, 64), (1, 4096, 8, 64)), {}, "256 rows share 4096 keys"),
        (((1, 8, 2, 64), (1, 8, 2, 64)), {"dropout_p": 0.1}, "no dropout"),
    ],
)
def test_the_hopper_backend_says_what_it_lacks(monkeypatch, shapes, options, words):
    row = dataclasses.replace(dispatch.capabilities("gluon"), device="cpu", requires=lambda: None)
    monkeypatch.setattr(dispatch, "BACKENDS", (row,))
    q, k = (_t(1, dtype=torch.bfloat16).expand(shape) for shape in shapes)
    with pytest.raises(NoBackendError, match=words):
        attention(q, k, k, **options)


def test_B91_each_gpu_of_a_machine_is_asked_for_itself(monkeypatch):
    """One with a Hopper GPU and another: which one a process asked first, and which is the current one, does not matter."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 0), (9, 0), (10, 0)][index])
    monkeypatch.setattr(dispatch, "_no_triton", lambda: None)
    monkeypatch.setattr(dispatch.importlib.metadata, "version", lambda name: "3.6.0")
    caches = (dispatch._no_gluon, dispatch._not_hopper)
    for cache in caches:
        cache.cache_clear()
    try:
        chosen = []
        for index in range(3):
            q = Signature((1, 128, 2, 64), torch.bfloat16, torch.device("cuda", index))
            chosen.append(dispatch.select(make_problem(q, q, q, [], AttentionSpec(), 0, 0)))
        assert chosen == ["triton", "gluon", "triton"]
        with pytest.raises(NoBackendError, match="cuda:2 is sm_100"):
            dispatch.select(make_problem(q, q, q, [], AttentionSpec(), 0, 0), "gluon")
        assert dispatch.capabilities("gluon").requires() is None
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        dispatch._no_gluon.cache_clear()
        assert "cuda:0 is sm_80" in dispatch.capabilities("gluon").requires()
    finally:
        for cache in caches:
            cache.cache_clear()
