"""The online softmax (Milakov and Gimelshein 2018; FlashAttention-2, section 3.1) in base 2."""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.0 / math.log(2.0))
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def update_softmax(s, m, l, factor):
    """p = 2^(factor s - m'), with the new row maximum m' and sum l'; alpha = 2^(m - m') rescales what is summed up.

    `l` has several sums for each row, of every `l.shape[1]`-th key each: so threads need not add up theirs.
    """
    top = tl.maximum(m, tl.max(s, 1) * factor)
    shift = tl.where(top == -float("inf"), 0.0, top)  # of a row that has seen no key
    p = tl.math.exp2(s * factor - shift[:, None])
    alpha = tl.math.exp2(m - shift)
    SUMS: tl.constexpr = l.shape[1]
    sums = tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // SUMS, SUMS]), 1)
    return p, top, l * alpha[:, None] + sums, alpha


@triton.jit
def finish_softmax(m, l, sink):
    """(lse, what normalises the output) of each row; a sink, if any, joins the sum."""
    factor = 1.0
    if sink is not None:
        top = tl.maximum(m, sink * LOG2E)
        shift = tl.where(top == -float("inf"), 0.0, top)
        factor = tl.math.exp2(m - shift)
        l = l * factor + tl.math.exp2(sink * LOG2E - shift)
        m = top
    empty = l == 0.0
    safe = tl.where(empty, 1.0, l)
    lse = tl.where(empty, -float("inf"), m * LN2 + tl.log(safe))
    return lse, tl.where(empty, 0.0, factor / safe)
