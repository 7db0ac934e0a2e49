"""The backward kernel's device functions: one block of query rows against one key tile, five products."""

import math

from numba import njit

from .blocks import LOG2E, Q_START, SEQ_COLUMNS, panel_keys
from .key_tiles import hold_tile
from .memory import format_bytes, get_i64, get_real, load, load_scalar, put_i64, put_real, store
from .panels import add_lane_sums, multiply_panel, scatter_add_panel
from .products import (
    add_key_gradient,
    add_query_gradient,
    add_value_gradient,
    clear_weights,
    dot_panel,
    exp2_weight,
    keep_weights,
    pack_for_backward,
    place_for_backward,
    set_bad_keys_aside,
    weight_panels,
)
from .scores import drop, score_panel
from .simd import (
    absolute,
    element_bytes,
    fma,
    grad_step,
    inlined,
    key_step,
    operand_bytes,
    panel_width,
    select,
    splat,
    vector_width,
)

SPLIT = 2.0**27 + 1  # cuts an fp64 number into two halves of 26 bits
LOG2E_HIGH = LOG2E * SPLIT - (LOG2E * SPLIT - LOG2E)
LOG2E_LOW = LOG2E - LOG2E_HIGH
LOG2E_MISSING = 2.0355273740931033e-17  # log2(e) - LOG2E
LSE_ERROR_32, LSE_ERROR_64 = 2.0**-24, 2.0**-53  # relative: half a unit in the last place of lse


@njit
def log2e_product(x):
    """x log2(e) in fp64 as a rounded product and what it misses (Dekker's product)."""
    product = x * LOG2E
    carry = x * SPLIT
    high = carry - (carry - x)
    low = x - high
    error = ((high * LOG2E_HIGH - product) + high * LOG2E_LOW + low * LOG2E_HIGH) + low * LOG2E_LOW
    return product, error + x * LOG2E_MISSING


@njit
def is_finite_row(lanes, row, code, dim):
    """Whether no element of a row in memory is Inf or NaN."""
    zero = 0.0
    for c in range(dim):
        zero += load_scalar(lanes, row + c * format_bytes(code), code) * 0.0
    return zero == 0.0


@njit
def set_gradient_lane(lanes, a, s, b, chunk, t, row, head, present):
    """lse, dlse and addresses of lane t. A lane without a row, or whose row saw no key, has p = 0 and zero inputs."""
    index = get_i64(s.lane_index, t)
    token = row + get_i64(a.seq, b * SEQ_COLUMNS + Q_START)
    lse = get_real(lanes, a.lse, index)
    do = a.do + b * a.do_b + token * a.do_s + head * a.do_h
    sees = present and lse != -math.inf
    if sees and a.sinks != 0 and lse == get_real(lanes, a.sinks, head):
        # Such is lse of a row that saw no key, and of one whose keys weigh nothing: what is not finite is of the former.
        q = get_i64(s.lane_q, t)
        sees = is_finite_row(lanes, q, a.code, a.dim) and is_finite_row(lanes, do, a.code, a.value_dim)
    error = LSE_ERROR_32 if element_bytes(lanes) == 4 else LSE_ERROR_64
    scaled, rest = log2e_product(lse) if sees else (math.inf, 0.0)
    put_real(lanes, s.lane_lse, t, scaled)
    put_real(lanes, s.lane_lse_rest, t, (scaled - get_real(lanes, s.lane_lse, t)) + rest if sees else 0.0)
    put_real(lanes, s.lane_slack, t, -abs(scaled) * error if sees else 0.0)
    put_real(lanes, s.lane_delta, t, get_real(lanes, a.dlse, index) if present and a.dlse != 0 else 0.0)
    put_i64(s.lane_do, t, do if sees else a.zeros)
    if not sees:
        put_i64(s.lane_q, t, a.zeros)
        put_i64(s.lane_o, t, a.zeros)
    if a.dq != 0:
        dq = a.dq + chunk * a.dq_chunk + b * a.dq_b + token * a.dq_s + head * a.dq_h
        put_i64(s.lane_dq, t, dq if present else s.trash)
    if a.dbias != 0:
        dbias = a.dbias + chunk * a.dbias_chunk + b * a.dbias_b + head * a.dbias_h + row * a.dbias_m
        put_i64(s.lane_dbias, t, dbias)


@njit
def gradient_pass(lanes, score, grad, k0, k1, scale, lses, rests, slacks, deltas):
    """p = 2^(scale s - lse) over s, ds = p (dp - delta) over dp; both 0 where the score is -inf, whatever dp holds.

    lse, in units of log2, comes as a rounded value and the rest: rounding it again would cost p a bit of precision.
    p is 1 where it is 1 within the rounding of lse (`slacks`): one key with a large logit has taken all the weight.
    """
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    zero, masked, factor = splat(lanes, 0.0), splat(lanes, -math.inf), splat(lanes, scale)
    for strip in range(0, columns, width):
        lse, rest = load(lanes, lses + strip * size), load(lanes, rests + strip * size)
        slack, delta = load(lanes, slacks + strip * size), load(lanes, deltas + strip * size)
        for n in range(k0, k1):
            at = (n * columns + strip) * size
            s = load(lanes, score + at)
            x = fma(s, factor, zero - lse) - rest
            p = select(s == masked, zero, exp2_weight(lanes, select(x > slack, zero, x)))
            store(lanes, score + at, p)
            store(lanes, grad + at, select(p == zero, zero, p * (load(lanes, grad + at) - delta)))


@njit
def slope_pass(lanes, grad, n0, k0, k1, positions, sums):
    """sums[lane] += sum over n of ds * |m - n|."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    for strip in range(0, columns, width):
        m, partial = load(lanes, positions + strip * size), splat(lanes, 0.0)
        for n in range(k0, k1):
            distance = absolute(m - (n0 + n))
            partial = fma(load(lanes, grad + (n * columns + strip) * size), distance, partial)
        store(lanes, sums + strip * size, load(lanes, sums + strip * size) + partial)


@inlined
def gradient_panel(lanes, a, s, p, n0, n1, padded, use_keep):
    """P^T and dS^T of block panel p against the tile [n0, n1), zero outside the keys that the panel needs."""
    columns, size = panel_width(lanes), element_bytes(lanes)
    k0, k1, masked = panel_keys(lanes, s, p, n0, n1)
    k0, k1 = (k0, k1) if k0 < k1 else (0, 0)
    put_i64(s.panel_k0, p, k0)
    put_i64(s.panel_k1, p, k1)
    score, grad = weight_panels(lanes, a, s, p)
    clear_weights(lanes, a, s, p, k0, k1, padded)
    if k1 == 0:
        return
    lane = p * columns * size
    score_panel(lanes, a, s, p, score, s.slope, n0, n1, k0, k1, masked, use_keep)
    gradient = s.do_t + p * columns * a.value_dim_padded * operand_bytes(lanes)
    dot_panel(lanes, grad, s.v, a.tile_rows, gradient, a.value_dim_padded, k0, k1)
    drop(lanes, a, s, p, grad, n0, k0, k1)
    lse, rest, slack = s.lane_lse + lane, s.lane_lse_rest + lane, s.lane_slack + lane
    gradient_pass(lanes, score, grad, k0, k1, a.score_scale, lse, rest, slack, s.lane_delta + lane)
    if a.dslopes != 0:
        slope_pass(lanes, grad, n0, k0, k1, s.lane_m + lane, s.lane_dslope + lane)
    if a.dbias != 0:
        rows, known = s.lane_dbias + p * columns * 8, min(k1, n1 - n0)
        if a.dbias_m == 0 and (a.dbias_h == 0 or a.pack == 1):
            add_lane_sums(lanes, grad, get_i64(rows, 0) + n0 * a.dbias_n, a.dbias_n, k0, known)
        else:
            scatter_add_panel(lanes, grad, rows, n0 * a.dbias_n, a.dbias_n, k0, known)
    if a.cap != 0.0:
        multiply_panel(lanes, grad, s.slope, k0, k1)
    drop(lanes, a, s, p, score, n0, k0, k1)
    keep_weights(lanes, a, s, p, k0, k1)


@njit
def backward_tile(lanes, a, s, b, head_kv, n0, n1, chunk_start, panels, use_keep):
    """One key tile [n0, n1) against all panels of the block."""
    size, width, n = element_bytes(lanes), 2 * vector_width(lanes), n1 - n0
    padded = (n + grad_step(lanes) - 1) // grad_step(lanes) * grad_step(lanes)
    k_bad, _ = hold_tile(lanes, a, s, b, head_kv, n0, place_for_backward, pack_for_backward)
    for p in range(panels):
        gradient_panel(lanes, a, s, p, n0, n1, padded, use_keep)
    if a.dq != 0:
        if k_bad:  # 0 * NaN must not reach the rows that do not see the key; the others have NaN in dS already
            step = key_step(lanes)
            set_bad_keys_aside(lanes, a, s, (n + step - 1) // step * step)
        for p in range(panels):
            add_query_gradient(lanes, a, s, p)
    at = (n0 - chunk_start) * width * size
    if a.dv != 0:
        add_value_gradient(lanes, a, s, panels, padded, s.dv + at)
    if a.dk != 0:
        add_key_gradient(lanes, a, s, panels, padded, s.dk + at)
