"""Rows of many key tiles: every kind of mask at every width of tile, growing maxima, and Inf or NaN that few rows see."""

import pytest
import torch
from lane import CAUSAL, DEVICE, HALF, needs_cuda, on_gpu, same

from tilewise import attention
from tilewise.testing import Case, Inputs, assert_matches_reference, run

SOME = {"B": 1, "H": 4, "Hkv": 2}
PACKED = {"lengths_q": (700, 1, 0, 333, 64, 129), "lengths_k": (700, 50, 9, 400, 64, 500), "spare": 7, "H": 4}
CASES = [
    Case("full", Sq=1000, Sk=1357, **SOME),
    Case("causal", Sq=700, Sk=1333, mask=CAUSAL, **SOME),
    Case("window", Sq=1000, Sk=1100, mask=(("window", 70, 200),), **SOME),
    Case("chunk", Sq=1200, mask=(("chunk", 500), *CAUSAL), **SOME),
    Case("packed", mask=CAUSAL, poison=True, **PACKED),
]
DIMS = (64, 128, 256)


def _with(case: Case, D: int) -> Case:
    return Case(**{name: value for name, value in vars(case).items() if name != "D"} | {"D": D})


@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_masks(case, D, backend):
    assert_matches_reference(on_gpu(_with(case, D), backend), backend=backend)


@pytest.mark.parametrize("D", DIMS)
def test_maxima_that_grow_from_tile_to_tile(D, backend):
    """Whichever way tiles are walked: sums are rescaled late, and never wrongly."""
    g = torch.Generator().manual_seed(D)
    q, k, v = torch.randn(3, 1, 1500, 2, D, generator=g).to(HALF)
    slope = torch.linspace(12, 0.1, 1500).to(HALF)[None, :, None, None]
    for keys in (k * slope, k * slope.flip(1)):
        inputs = Inputs(q, keys, v, {"causal": True}).on(DEVICE)
        assert_matches_reference(inputs, backend=backend)
        inputs.options["deterministic"] = True
        assert same(run(inputs, backend).values(), run(inputs, backend).values())


def _expected(q, k, v, keep, slopes):
    """o in float64, with values taken only by rows that see their key."""
    distance = (torch.arange(len(keep), device=q.device)[:, None] - torch.arange(len(keep), device=q.device)).abs()
    s = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) * q.shape[-1] ** -0.5
    p = (s - slopes[None, :, None, None].double() * distance).masked_fill(~keep, -torch.inf).softmax(-1)
    odd = ~v.isfinite()
    o = torch.einsum("bhmn,bnhd->bmhd", p.masked_fill(~keep, 0.0), v.double().masked_fill(odd, 0.0))
    for _, n, h, d in odd.nonzero().tolist():
        o[:, keep[:, n], h, d] += v[0, n, h, d].double()
    return o


@needs_cuda
@pytest.mark.parametrize("D", DIMS)
def test_inf_and_nan_reach_only_the_rows_that_see_them(D, backend):
    g = torch.Generator().manual_seed(D)
    q, k, v = torch.randn(3, 1, 1500, 2, D, generator=g).to(DEVICE, HALF)
    v[:, 500, :, 3], v[:, 700, 1, 5], v[:, 900, 0] = torch.inf, -torch.inf, torch.nan
    k[:, 1200] = torch.nan
    m, n = torch.arange(1500, device=DEVICE)[:, None], torch.arange(1500, device=DEVICE)
    slopes = torch.tensor([0.1, 0.01], device=DEVICE)
    for left, given in ((1500, slopes * 0), (200, slopes)):
        exact = _expected(q, k, v, (n <= m) & (n >= m - left), given)
        with torch.no_grad():
            o = attention(q, k, v, window_size=(left, 0), alibi_slopes=given, backend=backend)
        torch.testing.assert_close(o.double(), exact, rtol=0.01, atol=0.02, equal_nan=True)
