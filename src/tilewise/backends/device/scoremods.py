"""Score modifiers, element masks and dropout on one tile of scores, for forward and backward."""

import triton
import triton.language as tl

from .portable import dropout_bits, dropout_row_keys, keep_interval
from .softmax import LOG2E

FAR = tl.constexpr(
    1.8e38
)  # farther below ordinary scores than any, yet within floats of the least bias times LOG2E - 1
# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9.1, least maximum of the relative error (2.4e-8); beyond, float32 knows it as 1.
_P1 = tl.constexpr(0.13377498697496357)
_P2 = tl.constexpr(0.0034912892159677995)
_P3 = tl.constexpr(2.0534075188700332e-05)
_P4 = tl.constexpr(1.3242842754290652e-08)
_Q1 = tl.constexpr(0.46710818969508444)
_Q2 = tl.constexpr(0.025860909563606677)
_Q3 = tl.constexpr(0.0003278419116622266)
_Q4 = tl.constexpr(7.732455530962084e-07)


@triton.jit
def _tanh_unit(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tanh(x):
    """tanh to float32's accuracy; it takes the special function unit once, which exponentials keep busy."""
    NAN: tl.constexpr = tl.PropagateNan.ALL
    x = tl.minimum(tl.maximum(x, -9.1, propagate_nan=NAN), 9.1, propagate_nan=NAN)
    u = x * x
    p = x + x * u * (_P1 + u * (_P2 + u * (_P3 + u * _P4)))
    q = 1.0 + u * (_Q1 + u * (_Q2 + u * (_Q3 + u * _Q4)))
    root = tl.math.rsqrt(q)
    inverse = root * root  # a division takes twice the instructions
    t = p * inverse
    return t + inverse * (p - t * q)


@triton.jit
def tanh(x, coarse):
    """tanh. `coarse`, where present: to 11 bits, of which q and k of 16 bits leave fewer in their product."""
    if coarse is None:
        return _tanh(x)
    else:
        return _tanh_unit(x)


@triton.jit
def _element_at(data, batch, head, row_stride, key_stride, b, h, row, key):
    base = data + tl.cast(b, tl.int64) * batch + tl.cast(h, tl.int64) * head
    return base + tl.cast(row, tl.int64) * row_stride + tl.cast(key, tl.int64) * key_stride


@triton.jit
def scores(product, scoring, rows, key, k_len):
    """(scores in units of log2, d score / d product over scale) of `product` = q k^T: rows by keys, or transposed."""
    s = product
    slope = 1.0
    if scoring.cap is not None:
        t = tanh(s * (scoring.scale / scoring.cap), scoring.coarse)
        s, slope = t * scoring.cap, 1.0 - t * t
    elif scoring.scale is not None:
        s = s * scoring.scale
    if scoring.slopes is not None:
        slopes = tl.load(scoring.slopes + rows.b * scoring.slopes_batch + rows.h)
        s -= slopes * LOG2E * tl.abs(rows.m.to(tl.float32) - key.to(tl.float32))  # exact up to position 2^24
    if scoring.bias is not None:
        at = _element_at(
            scoring.bias, scoring.bias_b, scoring.bias_h, scoring.bias_m, scoring.bias_n, rows.b, rows.h, rows.index, key
        )  # fmt: skip
        bias = tl.load(at, mask=rows.valid & (key < k_len), other=0.0).to(tl.float32)
        part = s + bias * (LOG2E - 1.0)  # finite where the bias is
        s = tl.maximum(part + bias, part - FAR)  # finite stays finite: only -inf means "masked"; NaN stays NaN, in both
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
def kept(scoring, rows, key):
    """What dropout leaves: the same elements on every backend for the same seed."""
    bits = dropout_bits(rows.first_key, rows.second_key, tl.cast(key, tl.uint32))
    return bits >= tl.cast(scoring.drop_threshold, tl.uint32)


@triton.jit
def unknown_zero(scoring):
    """0, of which the compiler does not know it: constants it chooses after rounding, by two instructions instead of one."""
    return scoring.drop_scale * 0.0


@triton.jit
def drop(p, scoring, rows, key):
    """`p` without what dropout removes."""
    return tl.where(kept(scoring, rows, key), p, unknown_zero(scoring))
