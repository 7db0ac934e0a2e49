"""Faults that other attention libraries had on GPUs, by their ids (B01, B02, ...) in a list of such bugs.

B80 and B90, B92 are in test_streams_and_graphs.py, B87 in test_sizes.py. Not here, as what they are about does not exist yet:
B46 and B64 (rotary embeddings), B58 to B60 and B67 (caches and pages).
"""

import pytest
import torch
from lane import CAUSAL, DEVICE, HALF, able, call_of, needs_cuda, on_gpu, same

from tilewise import attention
from tilewise.testing import Case, Inputs, assert_matches_reference, run

FMIN = torch.finfo(torch.float32).min


def _check(case: Case, backend: str, dtype: torch.dtype = HALF, **options) -> None:
    """Compare with the reference: the tensors of a case under other options."""
    inputs = on_gpu(case, backend, dtype)
    options = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    inputs.options.update(options)
    assert_matches_reference(inputs, backend=backend)


def _spoil(*sizes: torch.Size) -> None:
    """Leave NaN where the allocator will next put tensors of these sizes."""
    waste = [torch.full(size, torch.nan, dtype=dtype, device=DEVICE)
             for size in sizes for dtype in (torch.float32, torch.bfloat16) for _ in range(4)]  # fmt: skip
    del waste


# ---- masked rows, NaN, extremes ----


def test_B06_nothing_of_an_earlier_call_stays_in_shared_memory(backend):
    case = Case(Sq=100, Sk=150, H=4, Hkv=2, D=64, mask=CAUSAL)
    spoiled = on_gpu(Case(Sq=128, Sk=256, H=64, D=64), backend)
    for t in (spoiled.q, spoiled.k, spoiled.v):
        t.fill_(torch.nan)
    function, _ = call_of(on_gpu(case, backend), backend, deterministic=False)  # two sums of dq are one in either order
    spoil, _ = call_of(spoiled, backend, deterministic=False)
    expected = function()
    for _ in range(100):
        spoil()
        assert same(function(), expected)


def test_B07_workspace_beyond_each_sequence(backend):
    case = Case(lengths_q=(17, 0, 100, 3), lengths_k=(40, 9, 100, 70), H=6, Hkv=2, D=64, spare=5, mask=CAUSAL)
    inputs = on_gpu(case, backend)
    _spoil(inputs.q.shape, inputs.k.shape, torch.Size((6, len(inputs.q))))
    assert_matches_reference(inputs, backend=backend)


def test_B08_masked_weights_of_large_scores(backend):
    _check(Case(lengths_q=(1, 5, 64, 129), H=4, Hkv=2, D=64, magnitude=10**0.5, mask=CAUSAL), backend)


@pytest.mark.parametrize("Sk", [97, 128])
@pytest.mark.parametrize("shift", [0.0, -128.0, -1024.0])
def test_B12_one_query_with_shifted_scores(shift, Sk, backend):
    _check(Case(Sq=1, Sk=Sk, D=64), backend, torch.float16, bias=torch.full((1,), shift, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B18_huge_additive_masks(dtype, backend):
    bias = torch.zeros(7, 9, dtype=dtype)
    for row, value in enumerate((-1e4, -1e30, FMIN if dtype == torch.float32 else torch.finfo(dtype).min, -torch.inf)):
        bias[row, 3:] = value
    bias[5] = -torch.inf
    inputs = on_gpu(Case(Sq=7, Sk=9), backend, dtype)
    results = run(able(Inputs(inputs.q, inputs.k, inputs.v, {"bias": bias.to(DEVICE)}), backend), backend)
    assert (results["o"][:, 5] == 0).all() and (results["lse"][..., 5] == -torch.inf).all()
    expected = attention(inputs.q[:, :4], inputs.k[:, :3], inputs.v[:, :3], backend=backend)
    torch.testing.assert_close(results["o"][:, :4], expected)
    assert all(t.isfinite().all() for name, t in results.items() if name.startswith("d"))


def test_B19_ties_at_the_maximum_are_not_biased(backend):
    """Equal keys and values of one sign: the mean signed error of 16 bits stays far below their rounding step."""
    key, q = torch.randn(1, 1, 8, 64), torch.randn(1, 64, 8, 64).to(HALF)
    k, v = key.expand(1, 300, 8, 64).to(HALF), torch.rand(1, 300, 8, 64).add(1).to(HALF)
    o = attention(*(t.to(DEVICE) for t in (q, k, v)), backend=backend).cpu().double()
    expected = v.double().mean(1, keepdim=True).expand_as(o)
    assert abs(float((o / expected - 1).mean())) < torch.finfo(HALF).eps / 4


@pytest.mark.parametrize("where", ["key", "bias"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a_nan_that_is_seen_is_not_lost(where, softcap, backend):
    """The GPU's minimum and maximum drop NaN: clamping an argument must not turn one into a score."""
    inputs = on_gpu(Case(Sq=20, Sk=30, D=64), backend)
    options = {"softcap": softcap, "causal": True, "backend": backend, "return_lse": True}
    if where == "key":
        inputs.k[:, 15] = torch.nan
    else:
        options["bias"] = torch.zeros(20, 30, device=DEVICE)
        options["bias"][:, 15] = torch.nan
    able(Inputs(inputs.q, inputs.k, inputs.v, options), backend)
    o, lse = attention(inputs.q, inputs.k, inputs.v, **options)
    assert o[:, 5:].isnan().all() and lse[..., 5:].isnan().all()
    assert o[:, :5].isfinite().all() and lse[..., :5].isfinite().all()


# ---- windows, groups ----


@pytest.mark.parametrize("window", [(3, 2**31 - 1), (2**31 - 1, 3), (10**6, 3)])
def test_B25_a_window_wider_than_the_keys_is_infinite_on_that_side(window, backend):
    for Sq, Sk in ((64, 16), (16, 64)):
        _check(Case(Sq=Sq, Sk=Sk, D=64), backend, window_size=window)


@needs_cuda
def test_B30_window_of_half_the_sequence(backend):
    _check(Case(B=1, Sq=2048, H=2, D=64), backend, torch.float16, window_size=(1024, 0))


@pytest.mark.parametrize("Sq", [37, 130])
@pytest.mark.parametrize("G", [1, 2, 3, 5, 6, 7, 8, 16])
def test_B33_group_sizes(G, Sq, backend):
    _check(Case(B=1, Sq=Sq, Sk=150, H=2 * G, Hkv=2, D=64, mask=CAUSAL if G % 2 else ()), backend)


def test_rows_of_one_key_beside_nan(backend):
    """Their outputs are values, to the ulp: weights that came from the rounded lse were off by twelve."""
    case = Case(
        lengths_q=(27, 42, 63, 112), lengths_k=(27, 31, 16, 32), used_q=(1, 19, 16, 56), used_k=(9, 6, 6, 14), H=6, Hkv=3,
        D=128, spare=1, mask=(("dense", "1K", 0.1), ("dense", "111", 1.0)), softmax_scale=0.05, alibi="BH", bias="Q1",
        strides="reversed", magnitude=3.0, poison=True,
    )  # fmt: skip
    assert_matches_reference(on_gpu(case, backend, torch.float32, seed=11), backend=backend)


def test_B36_group_sums_are_rounded_once(backend):
    """MQA: dk, summed over 32 heads, is as close as one rounding of the exact sum."""
    inputs = on_gpu(Case(B=1, Sq=64, H=32, Hkv=1, D=32), backend)
    exact = run(inputs.on("cpu").to(torch.float64), "cpu")["dk"]
    rounding = (exact.to(HALF).double() - exact).abs().max()
    assert (run(inputs, backend)["dk"].cpu().double() - exact).abs().max() < 3 * rounding


# ---- packed and empty sequences ----


@needs_cuda
@pytest.mark.parametrize("D", [64, 256])
def test_B49_empty_on_one_side_only(D, backend):
    _check(Case(lengths_q=(0, 12, 8, 0), lengths_k=(25, 17, 0, 31), D=D, poison=True), backend)
    _check(Case(lengths_q=(0, 1208, 840, 0), lengths_k=(2538, 1742, 840, 3072), H=1, D=D, mask=CAUSAL), backend)


@pytest.mark.parametrize("causal", [False, True])
def test_B50_no_keys(causal, backend):
    q = torch.randn(2, 5, 2, 16, device=DEVICE, requires_grad=True)
    k = torch.randn(2, 0, 2, 16, device=DEVICE, requires_grad=True)
    able(Inputs(q, k, k, {"causal": causal}), backend)
    o, lse = attention(q, k, k, causal=causal, return_lse=True, backend=backend)
    assert (o == 0).all() and (lse == -torch.inf).all()
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    assert (dq == 0).all() and dk.shape == k.shape


def test_B65_a_sequence_does_not_depend_on_its_batch(backend):
    """Bit for bit: alone, among others, and packed among others of other lengths."""
    options = {"causal": True, "softcap": 20.0, "return_lse": True, "backend": backend}
    q, k, v = (t.to(DEVICE) for t in torch.randn(3, 64, 130, 2, 64).to(HALF))
    alone = attention(q[:1], k[:1], v[:1], **options)
    for B in (2, 5, 64):
        assert same([t[:1] for t in attention(q[:B], k[:B], v[:B], **options)], alone)
