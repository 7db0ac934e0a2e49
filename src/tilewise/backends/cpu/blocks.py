"""A block of query rows: which rows, where they live, which keys they may see."""

from numba import njit
from numba.extending import register_jitable

from tilewise import predicates

from .memory import U8, get_i32, get_i64, get_real, load_scalar, put_i32, put_i64, put_real, record_at
from .simd import inlined, key_step, panel_width
from .structs import SCRATCH, SCRATCH_FIELDS

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
NO_KEY = 2**31 - 1  # larger than every key position

SCRATCH_COUNT = len(SCRATCH_FIELDS)
Q_START, Q_LEN, K_START, K_LEN, SHIFT = range(5)  # columns of Plan.seq
SEQ_COLUMNS = 5

_DROPOUT = (predicates._mix32, predicates._absorb, predicates.dropout_row_keys, predicates.dropout_bits)
for _formula in (*_DROPOUT, predicates.keep_interval):
    register_jitable(_formula)  # kernels call the formulas that every backend shares, on scalars and on vectors


@inlined
def bind_scratch(a, slot):
    """This thread's scratch record: the layout's offsets made addresses. The record heads the thread's region."""
    base = a.scratch + slot * a.scratch_bytes
    for i in range(SCRATCH_COUNT):
        put_i64(base, i, base + get_i64(a.layout, i))
    return record_at(base, SCRATCH)


@inlined
def block_rows(a, i, total):
    """(first row, rows) of block i. Blocks of `block_m` rows restart at every multiple of `span`."""
    span = i // a.blocks_per_span
    first = span * a.span + i % a.blocks_per_span * a.block_m
    return first, min(first + a.block_m, (span + 1) * a.span, total) - first


@inlined
def tile_entries(a, b, head, i):
    """The range of tile-list entries that block i visits; one pseudo-entry where there are no lists."""
    if a.tile_offsets == 0:
        return 0, 1
    row = a.tile_offsets + b * a.tile_b + head * a.tile_h + i // a.blocks_per_span * 8
    return get_i64(row, 0), get_i64(row, 1)


@inlined
def tile_entry(lanes, a, entry, low, high):
    """(start, end, whole) of an entry, clipped to [low, high); whole: `keep` holds all over it."""
    if a.tile_offsets == 0:
        return low, high, False
    start, end = get_i32(a.tile_starts, entry), get_i32(a.tile_ends, entry)
    whole = load_scalar(lanes, a.tile_full + entry, U8) != 0.0
    return max(low, start), min(high, end), whole


@njit
def set_lane(lanes, a, s, b, t, row, head, present):
    """Lane t of the block is query row `row` of sequence b, head `head`. An absent lane repeats a row, unwritten,
    and sees no key: whatever a key holds that no row sees, no lane may carry it into a gradient."""
    token = get_i64(a.seq, b * SEQ_COLUMNS + Q_START) + row
    m = row + get_i64(a.seq, b * SEQ_COLUMNS + SHIFT)
    bounds = b * a.bounds_stride + token
    put_i64(s.lane_q, t, a.q + b * a.q_b + token * a.q_s + head * a.q_h)
    put_i64(s.lane_o, t, a.o + b * a.o_b + token * a.o_s + head * a.o_h if present else s.trash)
    put_i32(s.lane_lo, t, get_i32(a.lo, bounds) if present else 0)
    put_i32(s.lane_hi, t, get_i32(a.hi, bounds) if present else 0)
    put_real(lanes, s.lane_m, t, m)
    put_i64(s.lane_index, t, b * a.lse_b + head * a.lse_h + token)
    put_i64(s.lane_head, t, head)
    if a.slopes != 0:
        slope = get_real(lanes, a.slopes + b * a.slopes_b + head * a.slopes_h, 0)
        put_real(lanes, s.lane_slope, t, slope * LOG2E)
    if a.bias != 0:
        put_i64(s.lane_bias, t, a.bias + b * a.bias_b + head * a.bias_h + row * a.bias_m)
    if a.keep != 0:
        put_i64(s.lane_keep, t, a.keep + b * a.keep_b + head * a.keep_h + row * a.keep_m)
    if a.drop_threshold != 0:
        first, second = predicates.dropout_row_keys(a.seed, b, head, row)
        put_i32(s.lane_first, t, first)
        put_i32(s.lane_second, t, second)


@inlined
def summarise_panel(lanes, s, panel, first, count):
    """Keys that some row of the panel sees, [lo, hi), and keys that all its rows see, [all_lo, all_hi)."""
    low, high, all_low, all_high = NO_KEY, 0, 0, NO_KEY
    for t in range(first, min(first + panel_width(lanes), count)):
        lo, hi = get_i32(s.lane_lo, t), get_i32(s.lane_hi, t)
        if lo < hi:
            low, high = min(low, lo), max(high, hi)
        all_low, all_high = max(all_low, lo), min(all_high, hi)
    put_i64(s.panel_lo, panel, low)
    put_i64(s.panel_hi, panel, high)
    put_i64(s.panel_all_lo, panel, all_low)
    put_i64(s.panel_all_hi, panel, all_high)
    return low, high


@inlined
def set_block(lanes, a, s, b, first_head, first, count):
    """Set up the lanes of a block; returns (panels, lowest key seen, end of the keys seen).

    Row t of the block is query row (first + t) // pack of head first_head + (first + t) % pack.
    """
    columns = panel_width(lanes)
    panels = (count + columns - 1) // columns
    for t in range(panels * columns):
        packed = first + min(t, count - 1)
        set_lane(lanes, a, s, b, t, packed // a.pack, first_head + packed % a.pack, t < count)
    low, high = NO_KEY, 0
    for panel in range(panels):
        panel_low, panel_high = summarise_panel(lanes, s, panel, panel * columns, count)
        low, high = min(low, panel_low), max(high, panel_high)
    return panels, low, high


@inlined
def panel_keys(lanes, s, panel, n0, n1):
    """(k0, k1, masked): rows of the key tile [n0, n1) that the panel needs, and whether some must be masked."""
    step = key_step(lanes)
    k0 = max(get_i64(s.panel_lo, panel) - n0, 0) // step * step
    k1 = (min(get_i64(s.panel_hi, panel), n1) - n0 + step - 1) // step * step
    masked = n0 + k1 > n1 or n0 + k0 < get_i64(s.panel_all_lo, panel) or n0 + k1 > get_i64(s.panel_all_hi, panel)
    return k0, k1, masked


@inlined
def panels_of_keys(s, panels, k0, k1):
    """The range of panels that need one of the rows [k0, k1) of the key tile."""
    first, end = panels, 0
    for p in range(panels):
        if get_i64(s.panel_k0, p) < k1 and get_i64(s.panel_k1, p) > k0:
            first, end = min(first, p), p + 1
    return first, end
