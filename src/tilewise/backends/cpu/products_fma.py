"""What the kernels do with packed operands where vector FMA multiplies: layouts as in `gemm` and `panels`."""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

import math

from numba import njit

from .blocks import panels_of_keys
from .gemm import GRAD_ROWS, SCORE_ROWS, dot_tile, mix_add_tile, mix_rescale_tile, outer_tile
from .memory import get_i64, load, store
from .panels import fill_vectors, pack_tile, set_bad_rows_aside
from .simd import element_bytes, exp2, exp2_scaled, fma, inlined, panel_width, select, splat, vector_width


@inlined
def start_products(lanes):
    """Prepare this thread: nothing to do."""


@inlined
def end_products(lanes):
    """Leave nothing behind."""


@inlined
def place_tile(lanes, a, s, slot, row):
    """s.k and s.v are the rows from `row` on of the key tile in a slot."""
    size, row_bytes = element_bytes(lanes), 2 * vector_width(lanes) * element_bytes(lanes)
    s.k = s.k_slots + slot * a.tile_rows * a.dim_padded * size + row * row_bytes
    s.v = s.v_slots + slot * a.tile_rows * a.value_dim_padded * size + row * row_bytes


@inlined
def pack_key_tile(lanes, a, s, count):
    """Fill the tile that has been placed; returns whether an Inf or NaN is among K and among V."""
    padded = count + SCORE_ROWS  # a panel's key range is rounded up
    k_bad = pack_tile(lanes, s.k, a.tile_rows, s.k_rows, count, padded, a.code, a.dim, a.dim_padded)
    v_bad = pack_tile(lanes, s.v, a.tile_rows, s.v_rows, count, padded, a.code, a.value_dim, a.value_dim_padded)
    return k_bad, v_bad


@njit
def pack_rows(lanes, rows, tile_rows, addresses, count, code, dim, dim_padded):
    """Rows whose index is summed over: query rows for dK and dV."""
    pack_tile(lanes, rows, tile_rows, addresses, count, count, code, dim, dim_padded)


@inlined
def set_bad_values_aside(lanes, a, s, count):
    """Zero the values of keys that hold an Inf or NaN, list them in s.v_bad, return how many."""
    return set_bad_rows_aside(lanes, s.v, a.tile_rows, count, a.value_dim_padded, s.v_bad)


@inlined
def set_bad_keys_aside(lanes, a, s, count):
    """The same for keys, which then no longer serve for scores."""
    return set_bad_rows_aside(lanes, s.k, a.tile_rows, count, a.dim_padded, s.k_bad)


@inlined
def dot_panel(lanes, panel, tile, tile_rows, query, dim_padded, k0, k1):
    """panel[n][lane] = sum over d of tile[n][d] * query[d][lane], for k0 <= n < k1, not empty."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), 2 * vector_width(lanes)
    rows, tiles = tile + k0 * width * size, (k1 - k0) // SCORE_ROWS
    target = panel + k0 * columns * size
    dot_tile(lanes, target, rows, tile_rows * width * size, query, dim_padded // width, 0, tiles)


@inlined
def raise_maxima(lanes, panel, k0, k1, maxima):
    """The running maximum of each lane, over all its vectors at once: one at a time is half as fast."""
    strip = vector_width(lanes) * element_bytes(lanes)
    first, second, third = load(lanes, maxima), load(lanes, maxima + strip), load(lanes, maxima + 2 * strip)
    for n in range(k0, k1):
        at = panel + n * 3 * strip
        s, t, u = load(lanes, at), load(lanes, at + strip), load(lanes, at + 2 * strip)
        first = select(s > first, s, first)  # NaN does not win here; it reaches the sum through p
        second = select(t > second, t, second)
        third = select(u > third, u, third)
    store(lanes, maxima, first)
    store(lanes, maxima + strip, second)
    store(lanes, maxima + 2 * strip, third)


@njit
def softmax_panel(lanes, panel, pairs, k0, k1, scale, maxima, sums, alphas):
    """p = 2^(scale (s - max)), in place, with the running maximum and sum of each lane; alpha rescales earlier sums.

    The difference comes before the scale, so that the largest entry has p = 1 exactly, whatever its size.
    """
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    zero, empty, factor = splat(lanes, 0.0), splat(lanes, -math.inf), splat(lanes, scale)
    for strip in range(0, columns, width):  # `alphas` keeps the old maxima
        store(lanes, alphas + strip * size, load(lanes, maxima + strip * size))
    raise_maxima(lanes, panel, k0, k1, maxima)
    for strip in range(0, columns, width):
        at = strip * size
        top = load(lanes, maxima + at)
        shift = select(top == empty, zero, top)
        alpha = exp2_scaled(load(lanes, alphas + at) - shift, factor)
        total = zero  # of this tile: one sum over a long row would lose bits
        for n in range(k0, k1):
            p = exp2_scaled(load(lanes, panel + n * columns * size + at) - shift, factor)
            store(lanes, panel + n * columns * size + at, p)
            total = total + p
        store(lanes, sums + at, fma(load(lanes, sums + at), alpha, total))
        store(lanes, alphas + at, alpha)


@inlined
def exp2_weight(lanes, x):
    """2^x for x <= 0."""
    return exp2(x)


@inlined
def mix_values(lanes, a, s, panel, out, alphas, k0, k1):
    """O^T = alpha O^T + V^T P^T over the keys [k0, k1) of the tile."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), 2 * vector_width(lanes)
    weights = panel + k0 * columns * size
    for c in range(0, a.value_dim, width):
        values = s.v + (c // width * a.tile_rows + k0) * width * size
        tiles = (min(width, a.value_dim - c) + SCORE_ROWS - 1) // SCORE_ROWS
        target = out + c * columns * size
        mix_rescale_tile(lanes, target, values, 4 * width * size, weights, (k1 - k0) // 4, alphas, tiles)


@njit
def delta_pass(lanes, do, o, dim, deltas):
    """delta = sum over c of do[c] o[c], minus dlse, which `deltas` holds.

    Summed in the order of `dot_panel`: where one key takes all the weight, dp - delta is then exactly dlse.
    """
    columns, size, width = panel_width(lanes), element_bytes(lanes), vector_width(lanes)
    for strip in range(0, columns * size, width * size):
        sums = splat(lanes, 0.0)
        for c in range(dim):
            at = c * columns * size + strip
            sums = fma(load(lanes, do + at), load(lanes, o + at), sums)
        store(lanes, deltas + strip, sums - load(lanes, deltas + strip))


@inlined
def weight_panels(lanes, a, s, p):
    """Where block panel p has its weights P^T and dS^T."""
    at = p * a.block_n * panel_width(lanes) * element_bytes(lanes)
    return s.score + at, s.grad + at


@inlined
def clear_weights(lanes, a, s, p, k0, k1, padded):
    """Zero the weights of block panel p for the keys of the tile outside [k0, k1)."""
    columns, size = panel_width(lanes), element_bytes(lanes)
    for panel in weight_panels(lanes, a, s, p):
        fill_vectors(lanes, panel, k0 * columns, 0.0)
        fill_vectors(lanes, panel + k1 * columns * size, (padded - k1) * columns, 0.0)


@inlined
def keep_weights(lanes, a, s, p, k0, k1):
    """Put the weights where the products want them: they are there."""


@inlined
def add_query_gradient(lanes, a, s, p):
    """dQ^T += K^T dS^T of block panel p, over the keys it needs."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), 2 * vector_width(lanes)
    k0, k1 = get_i64(s.panel_k0, p), get_i64(s.panel_k1, p)
    if k0 == k1:
        return
    out = s.dq_t + p * columns * a.dim_padded * size
    weights = s.grad + (p * a.block_n + k0) * columns * size
    for c in range(0, a.dim, width):
        keys = s.k + (c // width * a.tile_rows + k0) * width * size
        tiles = (min(width, a.dim - c) + SCORE_ROWS - 1) // SCORE_ROWS
        mix_add_tile(lanes, out + c * columns * size, keys, 4 * width * size, weights, (k1 - k0) // 4, 0, tiles)


@njit
def add_rows(lanes, a, s, panels, padded, weights, rows, out, dim):
    """out[n] += sum over m of weights[n][m] rows[m]."""
    columns, size, width = panel_width(lanes), element_bytes(lanes), 2 * vector_width(lanes)
    panel_bytes = a.block_n * columns * size
    for n in range(0, padded, GRAD_ROWS):
        first, end = panels_of_keys(s, panels, n, n + GRAD_ROWS)
        if first >= end:
            continue
        scalars = weights + first * panel_bytes + n * columns * size
        for c in range(0, dim, width):
            vectors = rows + (c // width * a.block_m + first * columns) * width * size
            target = out + (c // width * a.chunk_rows + n) * width * size
            outer_tile(lanes, target, scalars, panel_bytes, vectors, end - first, 0, 1)


@inlined
def add_value_gradient(lanes, a, s, panels, padded, out):
    """dV += P^T dO of all panels of the block."""
    add_rows(lanes, a, s, panels, padded, s.score, s.do, out, a.value_dim)


@inlined
def add_key_gradient(lanes, a, s, panels, padded, out):
    """dK += dS^T Q of all panels of the block."""
    add_rows(lanes, a, s, panels, padded, s.grad, s.q, out, a.dim)
