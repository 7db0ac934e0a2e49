"""The score panel, shared by forward and backward: S^T = K Q^T, then one pass over the panel per modifier and mask.

Scores are in units of log2. Every pass is skipped when its address or number is 0, so one kernel serves all calls.
A key tile starts at key `n0`; row n of a panel is key n0 + n.
"""

import math

from numba import njit

from tilewise import predicates

from .blocks import LOG2E
from .memory import U8, get_real, load, load_i32, load_u32, store
from .panels import gather_panel, scale_vectors
from .products import dot_panel
from .simd import (
    absolute,
    copy_sign,
    element_bytes,
    exp2m1,
    inlined,
    operand_bytes,
    panel_width,
    runtime,
    select,
    splat,
    splat_i32,
    splat_u32,
    vector_width,
)

LARGEST_CAP_ARGUMENT = 60.0  # tanh is 1 in fp64 from 2^60 on; keeps exp2m1 finite in fp32


@njit
def cap_pass(lanes, panel, k0, k1, cap, slope):
    """s = cap * tanh(x), the panel holding w = 2 log2(e) x; slope (if not 0) = 1 - tanh(x)^2.

    With t = 2^|w| - 1, tanh = t / (t + 2) and 1 - tanh^2 = 4 (t + 1) / (t + 2)^2: accurate at both ends. The slope of a NaN
    is 0: at a masked entry it meets ds = 0, which must stay 0, and at a visible one ds is NaN already.
    """
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    largest, zero = splat(lanes, LARGEST_CAP_ARGUMENT), splat(lanes, 0.0)
    for i in range(k0 * columns, k1 * columns, width):
        w = load(lanes, panel + i * size)
        distance = absolute(w)
        t = exp2m1(select(distance > largest, largest, distance))
        tanh = t / (t + 2.0)
        store(lanes, panel + i * size, copy_sign(tanh, w) * cap)
        if slope != 0:
            store(lanes, slope + i * size, select(w == w, (t + 1.0) * 4.0 / ((t + 2.0) * (t + 2.0)), zero))


@njit
def alibi_pass(lanes, panel, n0, k0, k1, positions, slopes):
    """s -= slope * |m - n|."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    for strip in range(0, columns, width):
        m, slope = load(lanes, positions + strip * size), load(lanes, slopes + strip * size)
        for n in range(k0, k1):
            at = panel + (n * columns + strip) * size
            store(lanes, at, load(lanes, at) - slope * absolute(m - (n0 + n)))


@njit
def bias_pass(lanes, panel, extra, k0, k1):
    """s += bias * log2(e), the bias in `extra`; finite stays finite, since only -inf means "masked"."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    infinity, zero = splat(lanes, math.inf), splat(lanes, 0.0)
    least = splat(lanes, -3.4028234663852886e38 if size == 4 else -1.7976931348623157e308)
    for i in range(k0 * columns, k1 * columns, width):
        bias = load(lanes, extra + i * size)
        scaled = bias * LOG2E
        overflows = (scaled == zero - infinity) & (bias > scaled)
        store(lanes, panel + i * size, load(lanes, panel + i * size) + select(overflows, least, scaled))


@njit
def keep_pass(lanes, panel, extra, k0, k1):
    """s = -inf where `extra` is 0."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    masked = splat(lanes, -math.inf)
    for i in range(k0 * columns, k1 * columns, width):
        keep = load(lanes, extra + i * size) != 0.0
        store(lanes, panel + i * size, select(keep, load(lanes, panel + i * size), masked))


@njit
def interval_pass(lanes, panel, n0, n1, k0, k1, lows, highs):
    """s = -inf where the lane's row does not see the key: outside [lo, hi) or beyond the tile's end n1."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    masked, end = splat(lanes, -math.inf), splat_i32(lanes, n1)
    for strip in range(0, columns, width):
        lo, hi = load_i32(lanes, lows + strip * 4), load_i32(lanes, highs + strip * 4)
        hi = select(hi < end, hi, end)
        for n in range(k0, k1):
            at, key = panel + (n * columns + strip) * size, splat_i32(lanes, n0 + n)
            store(lanes, at, select(predicates.keep_interval(key, lo, hi), load(lanes, at), masked))


@njit
def dropout_pass(lanes, a, panel, n0, k0, k1, firsts, seconds):
    """Dropped entries become 0, kept ones are scaled by 1 / (1 - p)."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    zero, scale = splat(lanes, 0.0), splat(lanes, a.drop_scale)
    threshold = splat_u32(lanes, a.drop_threshold)
    for strip in range(0, columns, width):
        first, second = load_u32(lanes, firsts + strip * 4), load_u32(lanes, seconds + strip * 4)
        for n in range(k0, k1):
            at = panel + (n * columns + strip) * size
            bits = predicates.dropout_bits(first, second, splat_u32(lanes, n0 + n))
            store(lanes, at, select(bits >= threshold, load(lanes, at) * scale, zero))


@inlined
def drop(lanes, a, s, p, panel, n0, k0, k1):
    """Dropout, if any, on a panel of block panel p."""
    if a.drop_threshold != 0:
        lane = 4 * p * panel_width(lanes)
        dropout_pass(lanes, a, panel, n0, k0, k1, s.lane_first + lane, s.lane_second + lane)


@inlined
def score_panel(lanes, a, s, p, panel, slope, n0, n1, k0, k1, masked, use_keep):
    """Scores of block panel p against the keys [n0 + k0, n0 + k1) of the tile [n0, n1), -inf where masked."""
    columns, size = panel_width(lanes), element_bytes(lanes)
    first = p * columns
    query = s.q_t + first * a.dim_padded * operand_bytes(lanes)
    dot_panel(lanes, panel, s.k, a.tile_rows, query, a.dim_padded, k0, k1)
    if a.product_scale != 1.0:
        scale_vectors(lanes, panel + k0 * columns * size, (k1 - k0) * columns, a.product_scale)
    if a.cap != 0.0:
        cap_pass(lanes, panel, k0, k1, a.cap, slope)
    if a.slopes != 0:
        alibi_pass(lanes, panel, n0, k0, k1, s.lane_m + first * size, s.lane_slope + first * size)
    known = min(k1, n1 - n0)  # rows beyond the tile's end are masked below, their bias and keep do not exist
    if a.bias != 0:
        gather_panel(lanes, s.extra, s.lane_bias + first * 8, n0 * a.bias_n, a.bias_n, a.bias_code, k0, known)
        bias_pass(lanes, panel, s.extra, k0, known)
    if use_keep:
        gather_panel(lanes, s.extra, s.lane_keep + first * 8, n0 * a.keep_n, a.keep_n, runtime(U8), k0, known)
        keep_pass(lanes, panel, s.extra, k0, known)
    if masked:
        interval_pass(lanes, panel, n0, n1, k0, k1, s.lane_lo + first * 4, s.lane_hi + first * 4)


@inlined
def lane_sees(lanes, scores, n, lane):
    """Whether a score panel holds anything but -inf for this key and lane."""
    return get_real(lanes, scores, n * panel_width(lanes) + lane) != -math.inf
