"""Score modifiers, element masks and dropout on one tile of scores, for forward and backward."""

import triton
import triton.language as tl

from .portable import dropout_bits, dropout_row_keys, keep_interval
from .softmax import LOG2E

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
# tanh(x) = x + x^3 P(x^2) for |x| < 0.625, least maximum of the relative error (5e-9)
_T0 = tl.constexpr(-0.33333282)
_T1 = tl.constexpr(0.13331442)
_T2 = tl.constexpr(-0.05373971)
_T3 = tl.constexpr(0.02063909)
_T4 = tl.constexpr(-0.00570499)


@triton.jit
def tanh(x):
    """tanh, relatively accurate near 0, where a difference of exponentials would cancel."""
    near = x * x
    poly = x + x * near * (_T0 + near * (_T1 + near * (_T2 + near * (_T3 + near * _T4))))
    size = tl.abs(x)
    grown = tl.math.exp2(tl.minimum(size, 15.0) * (2.0 * LOG2E))  # tanh is 1 in fp32 from 9 on
    far = 1.0 - 2.0 / (grown + 1.0)
    return tl.where(size < 0.625, poly, tl.where(x < 0, -far, far))


@triton.jit
def _element_at(data, batch, head, row_stride, key_stride, b, h, row, key):
    base = data + tl.cast(b, tl.int64) * batch + tl.cast(h, tl.int64) * head
    return base + tl.cast(row, tl.int64) * row_stride + tl.cast(key, tl.int64) * key_stride


@triton.jit
def scores(product, scoring, rows, key, k_len):
    """(scores in units of log2, d score / d product over scale) of `product` = q k^T: rows by keys, or transposed."""
    s = product
    slope = 1.0
    if scoring.scale is not None:
        s = s * scoring.scale
    if scoring.cap is not None:
        t = tanh(s / scoring.cap)
        s, slope = t * scoring.cap, 1.0 - t * t
    if scoring.slopes is not None:
        slopes = tl.load(scoring.slopes + rows.b * scoring.slopes_batch + rows.h)
        s -= slopes * LOG2E * tl.abs(rows.m.to(tl.float32) - key.to(tl.float32))  # exact up to position 2^24
    if scoring.bias is not None:
        at = _element_at(
            scoring.bias, scoring.bias_b, scoring.bias_h, scoring.bias_m, scoring.bias_n, rows.b, rows.h, rows.index, key
        )  # fmt: skip
        bias = tl.load(at, mask=rows.valid & (key < k_len), other=0.0).to(tl.float32)
        # Finite stays finite: only -inf means "masked". NaN stays NaN.
        scaled = tl.maximum(bias * LOG2E, -LARGEST_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        s += tl.where(bias == -float("inf"), bias, scaled)
    return s, slope


@triton.jit
def hide(s, scoring, rows, key, k_len):
    """The scores with -inf where a row does not see a key."""
    inside = rows.valid & (key < k_len)
    keep = keep_interval(key, rows.lo, rows.hi)
    if scoring.dense is not None:
        at = _element_at(
            scoring.dense, scoring.dense_b, scoring.dense_h, scoring.dense_m, scoring.dense_n, rows.b, rows.h, rows.index,
            key,
        )  # fmt: skip
        keep = keep & (tl.load(at, mask=inside, other=0) != 0)
    if scoring.pattern is not None:
        keep = keep & in_pattern(scoring, rows, key, inside)
    return tl.where(keep, s, -float("inf"))


@triton.jit
def in_pattern(scoring, rows, key, inside):
    """Whether block-sparse attention computes the rows' scores with the keys, which are `inside` the sequence."""
    at = _element_at(
        scoring.pattern, scoring.pattern_b, scoring.pattern_h, scoring.pattern_m, scoring.pattern_n, rows.b, rows.h,
        rows.index // scoring.block_m, key // scoring.block_n,
    )  # fmt: skip
    return tl.load(at, mask=inside, other=0) != 0


@triton.jit
def dropout_keys(scoring, b, h, row):
    """The two keys of each row's random stream."""
    first, second = dropout_row_keys(
        tl.load(scoring.seed), tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(row, tl.int64)
    )
    return first.to(tl.uint32), second.to(tl.uint32)


@triton.jit
def drop(p, scoring, rows, key):
    """`p` without what dropout removes; the same elements on every backend for the same seed."""
    bits = dropout_bits(rows.first_key, rows.second_key, tl.cast(key, tl.uint32))
    return tl.where(bits >= tl.cast(scoring.drop_threshold, tl.uint32), p, 0.0)
