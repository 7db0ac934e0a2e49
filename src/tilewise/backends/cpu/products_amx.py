"""What the kernels do with packed operands where AMX multiplies bfloat16: one function beside each of `products_fma`.

Scores, sums and gradients have the same layouts as there. Operands are *rows* `[row][c]`, *columns* `[c][row]`, or
*pairs* `[k / 2][c]` of what is summed over (see `amx`). Weights (P and dS) are rounded to bfloat16 here.
"""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

import math

from numba import njit

from .amx import (
    ROW_BYTES,
    STEP,
    add_product,
    configure_tiles,
    dot_halves,
    even_halves,
    exp2,
    load_halves,
    load_rows_halves,
    odd_halves,
    release_tiles,
    round_words,
    set_product,
    stay_awake,
    widen_low,
    zip_high,
    zip_low,
    zip_odd,
)
from .blocks import panels_of_keys
from .memory import get_half, get_i64, load, put_half, put_i64, store
from .panels import fill_vectors
from .rows import store_block, transpose
from .simd import any_true, fma, inlined, select, splat

LINE = 64  # bytes of a vector: 32 bfloat16, or 16 fp32
HALF_STEP = STEP // 2
AWAKE = 8  # vectors of exponentials between two products, see `stay_awake`
EXPONENT = 0x7F80  # of a bfloat16; all ones: Inf or NaN


@inlined
def start_products(lanes):
    """Prepare this thread."""
    configure_tiles(lanes)


@inlined
def end_products(lanes):
    """Leave nothing behind."""
    release_tiles(lanes)


# ---- operands --------------------------------------------------------------------------------------------------------


@njit
def copy_rows(lanes, rows, addresses, count, padded, dim, dim_padded):
    """rows[row][c], zero beyond `count` rows and `dim` columns."""
    for row in range(padded):
        target, columns = rows + row * 2 * dim_padded, dim if row < count else 0
        source = get_i64(addresses, row) if row < count else 0
        for c in range(0, dim_padded, STEP):
            store(lanes, target + 2 * c, load_halves(lanes, source + 2 * c, columns - c))


@njit
def copy_columns(lanes, columns, tile_rows, addresses, padded, dim, dim_padded):
    """columns[c][row], zero beyond `dim`; returns whether an Inf or NaN is among the values."""
    zero, row_bytes = splat(lanes, 0.0), 2 * tile_rows
    check = zero
    for c in range(0, dim_padded, STEP):
        for row in range(0, padded, STEP):
            target, where = columns + c * row_bytes + 2 * row, addresses + 8 * row
            first = transpose(load_rows_halves(lanes, where, 2 * c, dim - c))
            second = transpose(load_rows_halves(lanes, where + 8 * HALF_STEP, 2 * c, dim - c))
            for i in range(HALF_STEP):  # vector i: columns c + 2 i and c + 2 i + 1 of 16 rows
                low, high = even_halves(first[i], second[i]), odd_halves(first[i], second[i])
                store(lanes, target + 2 * i * row_bytes, low)
                store(lanes, target + (2 * i + 1) * row_bytes, high)
                for x in (low, high):  # as words, too: what is finite stays so with a longer mantissa
                    check = fma(x, zero, fma(widen_low(x), zero, check))
    return any_true(check != zero)


@inlined
def place_for_forward(lanes, a, s, slot, row):
    """s.k (rows) and s.v (columns) are the rows from `row` on of the key tile in a slot."""
    s.k = s.k_slots + 2 * (slot * a.tile_rows + row) * a.dim_padded
    s.v = s.v_slots + 2 * (slot * a.tile_rows * a.value_dim_padded + row)


@inlined
def place_for_backward(lanes, a, s, slot, row):
    """The same of s.k and s.v, both rows, and of s.k_t, the columns of K."""
    s.k = s.k_slots + 2 * (slot * a.tile_rows + row) * a.dim_padded
    s.v = s.v_slots + 2 * (slot * a.tile_rows + row) * a.value_dim_padded
    s.k_t = s.k_t_slots + 2 * (slot * a.tile_rows * a.dim_padded + row)


@inlined
def padded_addresses(a, addresses, count):
    """Let addresses of zeros follow; returns how many there are now. A panel's key range is rounded up to whole steps."""
    padded = (count + STEP - 1) // STEP * STEP + STEP
    for row in range(count, padded):
        put_i64(addresses, row, a.zeros)
    return padded


@inlined
def pack_for_forward(lanes, a, s, count):
    """Fill the tile that has been placed; returns whether an Inf or NaN matters: of K none, of V any."""
    padded = padded_addresses(a, s.v_rows, count)
    copy_rows(lanes, s.k, s.k_rows, count, count + STEP, a.dim, a.dim_padded)
    return False, copy_columns(lanes, s.v, a.tile_rows, s.v_rows, padded, a.value_dim, a.value_dim_padded)


@inlined
def pack_for_backward(lanes, a, s, count):
    """Fill the tile that has been placed; returns whether an Inf or NaN matters: of K any, of V none."""
    padded = padded_addresses(a, s.k_rows, count)
    copy_rows(lanes, s.k, s.k_rows, count, count + STEP, a.dim, a.dim_padded)
    copy_rows(lanes, s.v, s.v_rows, count, count + STEP, a.value_dim, a.value_dim_padded)
    return copy_columns(lanes, s.k_t, a.tile_rows, s.k_rows, padded, a.dim, a.dim_padded), False


@njit
def pack_query_panel(lanes, panel, addresses, code, dim, dim_padded, scale):
    """panel[d / 2][lane], zero beyond dim. A pair is a word of the row: words are transposed, and not scaled."""
    for strip in range(0, STEP, HALF_STEP):
        for d in range(0, dim_padded, STEP):
            block = transpose(load_rows_halves(lanes, addresses + 8 * strip, 2 * d, dim - d))
            store_block(lanes, panel + d // 2 * ROW_BYTES + 4 * strip, ROW_BYTES, block)


@njit
def pack_rows(lanes, rows, tile_rows, addresses, count, code, dim, dim_padded):
    """rows[c / 32][row / 2][32], zero beyond dim: query rows as pairs, for dK and dV."""
    for row in range(0, count, 2):
        one, two = get_i64(addresses, row), get_i64(addresses, row + 1)
        for c in range(0, dim_padded, STEP):
            x, y = load_halves(lanes, one + 2 * c, dim - c), load_halves(lanes, two + 2 * c, dim - c)
            target = rows + (c // STEP * tile_rows + row) // 2 * ROW_BYTES
            store(lanes, target, zip_low(x, y))
            store(lanes, target + LINE, zip_high(x, y))


@njit
def set_bad_columns_aside(columns, tile_rows, count, dim_padded, bad):
    """Zero the rows that hold an Inf or NaN, here columns, and list them in `bad`; returns how many."""
    found = 0
    for row in range(count):
        largest = 0
        for c in range(dim_padded):
            largest = max(largest, get_half(columns, c * tile_rows + row) & EXPONENT)
        if largest == EXPONENT:
            put_i64(bad, found, row)
            found += 1
            for c in range(dim_padded):
                put_half(columns, c * tile_rows + row, 0)
    return found


@inlined
def set_bad_values_aside(lanes, a, s, count):
    """Zero the values of keys that hold an Inf or NaN, list them in s.v_bad, return how many."""
    return set_bad_columns_aside(s.v, a.tile_rows, count, a.value_dim_padded, s.v_bad)


@inlined
def set_bad_keys_aside(lanes, a, s, count):
    """The same for the columns of K."""
    return set_bad_columns_aside(s.k_t, a.tile_rows, count, a.dim_padded, s.k_bad)


# ---- forward ---------------------------------------------------------------------------------------------------------


@inlined
def dot_panel(lanes, panel, tile, tile_rows, query, dim_padded, k0, k1):
    """panel[n][lane] = sum over d of tile[n][d] * query[d][lane], for k0 <= n < k1, not empty."""
    stride = 2 * dim_padded
    target, rows = panel + k0 * ROW_BYTES, tile + k0 * stride
    set_product(target, rows, stride, LINE, query, dim_padded // STEP, (k1 - k0) // STEP)


@inlined
def raise_maxima(lanes, panel, k0, k1, maxima):
    """The running maximum of each lane. Two rows at once: one chain of maxima would wait for itself."""
    first, second = load(lanes, maxima), load(lanes, maxima + LINE)
    third, fourth = first, second
    for at in range(panel + k0 * ROW_BYTES, panel + k1 * ROW_BYTES, 2 * ROW_BYTES):
        s, t = load(lanes, at), load(lanes, at + LINE)
        u, v = load(lanes, at + ROW_BYTES), load(lanes, at + ROW_BYTES + LINE)
        first = select(s > first, s, first)  # NaN does not win here; it reaches the sum through p
        second = select(t > second, t, second)
        third = select(u > third, u, third)
        fourth = select(v > fourth, v, fourth)
    store(lanes, maxima, select(third > first, third, first))
    store(lanes, maxima + LINE, select(fourth > second, fourth, second))


@njit
def round_key_pairs(lanes, pairs, panel, k0, k1):
    """pairs[n / 2][lane] of the weights [k0, k1) of a panel."""
    for n in range(k0, k1, 2):
        at = panel + n * ROW_BYTES
        for strip in range(0, ROW_BYTES, LINE):
            even, odd = load(lanes, at + strip), load(lanes, at + ROW_BYTES + strip)
            store(lanes, pairs + n // 2 * ROW_BYTES + strip, zip_odd(round_words(even), round_words(odd)))


@njit
def add_rescaled(lanes, out, alphas, mixed, rows):
    """out[row][lane] = alpha[lane] * out[row][lane] + mixed[row][lane]."""
    for strip in range(0, ROW_BYTES, LINE):
        alpha = load(lanes, alphas + strip)
        for at in range(strip, rows * ROW_BYTES, ROW_BYTES):
            store(lanes, out + at, fma(load(lanes, out + at), alpha, load(lanes, mixed + at)))


@njit
def softmax_panel(lanes, panel, pairs, k0, k1, scale, maxima, sums, alphas):
    """As in `products_fma`, and the weights rounded as `pairs`: free here, while the exponentials take their time."""
    zero, empty, factor = splat(lanes, 0.0), splat(lanes, -math.inf), splat(lanes, scale)
    for strip in range(0, ROW_BYTES, LINE):  # `alphas` keeps the old maxima
        store(lanes, alphas + strip, load(lanes, maxima + strip))
    raise_maxima(lanes, panel, k0, k1, maxima)
    for strip in range(0, ROW_BYTES, LINE):
        top = load(lanes, maxima + strip)
        shift = select(top == empty, zero, top)
        alpha = exp2((load(lanes, alphas + strip) - shift) * factor)
        even_sum, odd_sum = zero, zero
        for first in range(k0, k1, AWAKE):
            stay_awake(lanes)
            for n in range(first, first + AWAKE, 2):
                at = panel + n * ROW_BYTES + strip
                even = exp2((load(lanes, at) - shift) * factor)
                odd = exp2((load(lanes, at + ROW_BYTES) - shift) * factor)
                store(lanes, at, even)
                store(lanes, at + ROW_BYTES, odd)
                store(lanes, pairs + n // 2 * ROW_BYTES + strip, zip_odd(round_words(even), round_words(odd)))
                even_sum, odd_sum = even_sum + even, odd_sum + odd
        store(lanes, sums + strip, fma(load(lanes, sums + strip), alpha, even_sum + odd_sum))
        store(lanes, alphas + strip, alpha)


@inlined
def mix_values(lanes, a, s, panel, out, alphas, k0, k1):
    """O^T = alpha O^T + V^T P^T over the keys [k0, k1) of the tile."""
    if a.drop_threshold != 0:  # the weights are no longer those of `softmax_panel`
        round_key_pairs(lanes, s.pairs, panel, k0, k1)
    values, weights = s.v + 2 * k0, s.pairs + k0 // 2 * ROW_BYTES
    chunks, blocks = (k1 - k0) // STEP, a.value_dim_padded // STEP
    set_product(s.mixed, values, 2 * a.tile_rows, LINE, weights, chunks, blocks)
    add_rescaled(lanes, out, alphas, s.mixed, a.value_dim)


@inlined
def exp2_weight(lanes, x):
    """2^x for x <= 0."""
    return exp2(x)


# ---- backward --------------------------------------------------------------------------------------------------------


@njit
def delta_pass(lanes, do, o, dim, deltas):
    """delta = sum over c of do[c] o[c], minus dlse, which `deltas` holds."""
    for strip in range(0, ROW_BYTES, LINE):
        sums = splat(lanes, 0.0)
        for at in range(strip, (dim + 1) // 2 * ROW_BYTES, ROW_BYTES):
            sums = dot_halves(sums, load(lanes, do + at), load(lanes, o + at))
        store(lanes, deltas + strip, sums - load(lanes, deltas + strip))


@inlined
def weight_panels(lanes, a, s, p):
    """Where block panel p has its weights P^T and dS^T in fp32: all panels in one place, which stays in the cache."""
    return s.score, s.grad


@inlined
def clear_weights(lanes, a, s, p, k0, k1, padded):
    """Zero the weights of block panel p for the keys of the tile outside [k0, k1)."""
    words = HALF_STEP  # of a row of 32 weights
    for rows in (s.p_rows + p * a.block_n * LINE, s.ds_rows + p * a.block_n * LINE):
        fill_vectors(lanes, rows, k0 * words, 0.0)
        fill_vectors(lanes, rows + k1 * LINE, (padded - k1) * words, 0.0)


@inlined
def rounded_row(lanes, at):
    """32 weights rounded to bfloat16."""
    return odd_halves(round_words(load(lanes, at)), round_words(load(lanes, at + LINE)))


@njit
def keep_weights(lanes, a, s, p, k0, k1):
    """Round the weights of block panel p: rows of both for dV and dK, pairs of keys of dS for dQ."""
    first = p * a.block_n * LINE
    for n in range(k0, k1, 2):
        weight, grad, target = s.score + n * ROW_BYTES, s.grad + n * ROW_BYTES, first + n * LINE
        store(lanes, s.p_rows + target, rounded_row(lanes, weight))
        store(lanes, s.p_rows + target + LINE, rounded_row(lanes, weight + ROW_BYTES))
        one, two = rounded_row(lanes, grad), rounded_row(lanes, grad + ROW_BYTES)
        store(lanes, s.ds_rows + target, one)
        store(lanes, s.ds_rows + target + LINE, two)
        store(lanes, s.ds_pairs + target, zip_low(one, two))
        store(lanes, s.ds_pairs + target + LINE, zip_high(one, two))


@inlined
def add_query_gradient(lanes, a, s, p):
    """dQ^T += K^T dS^T of block panel p, over the keys it needs."""
    k0, k1 = get_i64(s.panel_k0, p), get_i64(s.panel_k1, p)
    if k0 == k1:
        return
    out, weights = s.dq_t + p * a.dim_padded * ROW_BYTES, s.ds_pairs + (p * a.block_n + k0) * LINE
    chunks, blocks = (k1 - k0) // STEP, a.dim_padded // STEP
    add_product(out, s.k_t + 2 * k0, 2 * a.tile_rows, LINE, weights, chunks, blocks)


@njit
def add_rows(lanes, a, s, panels, padded, weights, rows, out, dim):
    """out[n] += sum over m of weights[n][m] rows[m]. Keys that the same panels need are taken together."""
    n = 0
    while n < padded:
        first, end = panels_of_keys(s, panels, n, n + STEP)
        stop = n + STEP
        while stop < padded and panels_of_keys(s, panels, stop, stop + STEP) == (first, end):
            stop += STEP
        for c in range(0, dim if first < end else 0, STEP):
            target = out + (c // STEP * a.chunk_rows + n) * ROW_BYTES
            pairs = rows + (c // STEP * a.block_m + first * STEP) // 2 * ROW_BYTES
            scalars = weights + (first * a.block_n + n) * LINE
            add_product(target, scalars, LINE, a.block_n * LINE, pairs, end - first, (stop - n) // STEP)
        n = stop


@inlined
def add_value_gradient(lanes, a, s, panels, padded, out):
    """dV += P^T dO of all panels of the block."""
    add_rows(lanes, a, s, panels, padded, s.p_rows, s.do, out, a.value_dim)


@inlined
def add_key_gradient(lanes, a, s, panels, padded, out):
    """dK += dS^T Q of all panels of the block."""
    add_rows(lanes, a, s, panels, padded, s.ds_rows, s.q, out, a.dim)
