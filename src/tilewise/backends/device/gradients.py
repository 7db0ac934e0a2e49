"""From recomputed scores to gradients, on one tile: shared by all backward kernels. And the sinks' gradient, on the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scoremods import hide, kept, scores, unknown_zero
from .seqinfo import rows_at
from .softmax import LOG2E


@triton.jit
def statistics(lse, scoring):
    """-lse as a part of the sum q k^T before scaling; -inf, which makes p 0, where a row sees no key."""
    return tl.where(lse == -float("inf"), lse, -lse * LOG2E / scoring.factor)


@triton.jit
def load_statistics(minus_lse, minus_delta, b, h, q_start, q_len, i, BLOCK_M: tl.constexpr):
    """(-lse, -delta) of the rows of tile i, -lse in the units of `statistics`."""
    index = i * BLOCK_M + tl.arange(0, BLOCK_M)
    row_lse = tl.load(rows_at(minus_lse, b, h, q_start) + index, mask=index < q_len, other=-float("inf"))
    row_delta = tl.load(rows_at(minus_delta, b, h, q_start) + index, mask=index < q_len, other=0.0)
    return row_lse, row_delta


@triton.jit
def score_start(scoring, minus_lse):
    """(what the sum q k^T starts from, what of lse, in units of log2, is left to go off the scores).

    A sum that starts from -lse saves the registers that hold lse until then; where something modifies the scores, it
    cannot.
    """
    if scoring.scale is None:
        return minus_lse, 0.0
    else:
        return tl.zeros_like(minus_lse), -minus_lse


@triton.jit
def upstream_start(scoring, minus_delta):
    """The same for delta and the sum do v^T, which dropout scales."""
    if scoring.seed is None:
        return minus_delta, 0.0
    else:
        return tl.zeros_like(minus_delta), -minus_delta


@triton.jit
def score_gradients(product, dp, scoring, rows, key, k_len, lse2, delta, partial, CLEAN: tl.constexpr):
    """(p as it weighs the values, ds, d score / d product over scale), all shaped like `product`.

    `lse2` (in units of log2) and `delta` go off the scores and dp; `partial`: not every row sees every key. CLEAN keeps
    NaN and Inf of unseen keys out of p and ds.
    """
    s, slope = scores(product, scoring, rows, key, k_len)
    if partial:
        s = hide(s, scoring, rows, key, k_len)
    p = tl.math.exp2(s * scoring.factor - lse2)
    if CLEAN:
        p = tl.where(s == -float("inf"), 0.0, p)  # lse of a row that sees a NaN is NaN
    weight = p
    if scoring.seed is not None:
        keep = kept(scoring, rows, key)
        weight = tl.where(keep, p * scoring.drop_scale, unknown_zero(scoring))
        dp = tl.where(keep, dp, 0.0) * scoring.drop_scale  # what scales it joins the difference below
    ds = p * (dp - delta)
    if CLEAN:
        ds = tl.where(s == -float("inf"), 0.0, ds)
        if scoring.cap is not None:
            slope = tl.where(s == -float("inf"), 0.0, slope)
    return weight, ds, slope


@triton.jit
def row_product(x, y):
    """rowsum(x * y) of o and do, in which an o of 0 counts for nothing: do of a row that sees no key may be NaN."""
    return tl.sum(tl.where(x == 0.0, 0.0, x * y), 1)


@triton.jit
def weighed_rows(x, weight):
    """The rows of `x` that some key of the tile weighs, keys by rows, and 0: 0 times NaN is not 0."""
    return tl.where((tl.max(tl.where(weight == 0.0, 0, 1), 0) > 0)[:, None], x, 0.0).to(x.dtype)


@triton.jit
def finite(x):
    """`x` with 0 for Inf and NaN."""
    return tl.where(x * 0.0 == 0.0, x, 0.0).to(x.dtype)


def sink_gradient(sinks: Tensor | None, lse: Tensor, minus_delta: Tensor) -> Tensor:
    """d loss / d sink = -sum over rows of p_sink delta, with p_sink = exp(sink - lse)."""
    assert sinks is not None
    p = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks[:, None] - lse))
    share = (p * minus_delta).sum(-1)
    return share if share.dim() == 1 else share.sum(0)
