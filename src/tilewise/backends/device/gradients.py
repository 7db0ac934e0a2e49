"""From recomputed scores to gradients, on one tile: shared by all backward kernels."""

import triton
import triton.language as tl

from .scoremods import drop, scores
from .seqinfo import rows_at
from .softmax import LOG2E


@triton.jit
def load_statistics(lse, delta, b, h, q_start, rows):
    """(lse in units of log2, delta) of the rows; +inf where a row sees no key, which makes its p 0."""
    row_lse = tl.load(rows_at(lse, b, h, q_start) + rows.index, mask=rows.valid, other=-float("inf"))
    row_delta = tl.load(rows_at(delta, b, h, q_start) + rows.index, mask=rows.valid, other=0.0)
    return tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2E), row_delta


@triton.jit
def score_gradients(product, dp, scoring, rows, key, k_len, lse2, delta, MASKED: tl.constexpr):
    """(p as it weighs the values, ds, d score / d product over scale), all shaped like `product`."""
    s, slope = scores(product, scoring, rows, key, k_len, MASKED)
    p = tl.math.exp2(s * scoring.factor - lse2)
    weight = p
    if scoring.seed is not None:
        weight = drop(p, scoring, rows, key) * scoring.drop_scale
        dp = tl.where(weight == 0.0, 0.0, dp * scoring.drop_scale)
    ds = p * (dp - delta)
    if MASKED:
        ds = tl.where(s == -float("inf"), 0.0, ds)  # dp of a masked key may be NaN
    return weight, ds, slope
