"""The producer of the forward pass: one warp that finds out what is to do and starts the copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.device.portable import kv_tile_range, work_order
from tilewise.backends.device.rows import listed
from tilewise.backends.device.seqinfo import NO_KEY, extremes, row_interval, sequence

from .pipeline import next_place

ROWS = gl.constexpr(64)  # of one consumer: those of one warpgroup's products

# The words of a work item: first query row (-1: no more work), batch, head, what `sequence` tells, key tiles from FIRST to
# LAST, and where the numbers of the row tile begin in `lse`.
ROW, B, H, Q_START, Q_LEN, K_LEN, SHIFT, FIRST, LAST, LSE = (gl.constexpr(i) for i in range(10))
WORDS = gl.constexpr(10)
# Where formulas do not say what a consumer visits, four more words for each: see `own_tiles`. And with tile lists one more.
SPAN = gl.constexpr(4)


@gluon.constexpr_function
def words(groups, told, listed):
    """Words of an item."""
    return WORDS.value + SPAN.value * groups * told + listed


@gluon.jit
def tile_range(interval, row, end, shift, k_len, BLOCK_N: gl.constexpr):
    """The key tiles of rows [row, end): no bound ever decreases from row to row, so the first and the last say all."""
    lo_min, hi_min = row_interval(interval, 0, row + shift, 0, row < end, k_len)
    lo_max, hi_max = row_interval(interval, 0, gl.maximum(end - 1, row) + shift, 0, row < end, k_len)
    return kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_N)


@gluon.jit
def rows_tiles(interval, b, row, q_start, q_len, k_len, shift, BLOCK_N: gl.constexpr):
    """The same of one consumer's rows, from `row` on, by the bounds of each; nothing follows from the order of rows."""
    index = row + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    valid = index < q_len
    lo, hi = row_interval(interval, b, index + shift, q_start + index, valid, k_len)
    lo_min, lo_max, hi_min, hi_max = extremes(lo, hi, valid)
    return kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_N)


@gluon.jit
def told_tiles(interval, visit, i, b, h, q_start, q_len, k_len, shift, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first, last, list, further words) of an item: its tiles, or entries of its list; what each consumer visits."""
    if visit is not None:
        at, partial, last = listed(visit, b, h, i)
        span = (0, partial, last, last)
        further = span
        for _ in gl.static_range(GROUPS - 1):
            further = further + span
        at = at.to(gl.int32)
        return 0, last, at, further + (at,)  # noqa: RUF005  no stars in kernels
    else:
        first, last, further = NO_KEY, 0, ()
        for g in gl.static_range(GROUPS):
            span = rows_tiles(interval, b, (i * GROUPS + g) * ROWS, q_start, q_len, k_len, shift, BLOCK_N)
            some = span.first < span.last
            first = gl.minimum(first, gl.where(some, span.first, NO_KEY))
            last = gl.maximum(last, gl.where(some, span.last, 0))
            further = further + (span.first, span.full_first, span.full_last, span.last)  # noqa: RUF005
        return gl.minimum(first, last), last, 0, further


@gluon.jit
def key_tile(visit, at, entry, BLOCK_N: gl.constexpr):
    """The first key of a tile: an entry stands for itself, or for one in list number `at`."""
    if visit is None:
        return entry * BLOCK_N
    else:
        return gl.load(visit.tiles + at.to(gl.int64) * visit.columns + entry) * BLOCK_N


@gluon.jit
def row_tile(place, tiles, heads, together, all_heads):
    """(i, b, h) of a place in the work order: under a causal mask the last rows take longest, they go first."""
    rank, head = work_order(place, tiles, all_heads, together)
    return tiles - 1 - rank, head // heads, head % heads


@gluon.jit
def produce(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, lse, counter, lengths, interval, visit, shared, heads, group, tiles,
    together, all_heads, CFG: gl.constexpr,
):  # fmt: skip
    """Find out what is to do, and start the copies: of keys and values the last tile first.

    Consumers may be an item behind. What they wait for first comes first: keys, then queries; and the next item is drawn
    while they are busy with the last tiles of this one.
    """
    GROUPS: gl.constexpr = CFG.groups
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = CFG.block_n
    place = gl.program_id(0)
    item = 0
    at = 0
    last_place = -1
    while place < tiles * all_heads:
        i, b, h = row_tile(place, tiles, heads, together, all_heads)
        q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
        row = i * BLOCK_M
        if row < q_len:
            if visit is not None or interval.low is not None:
                first, last, at_list, further = told_tiles(
                    interval, visit, i, b, h, q_start, q_len, k_len, shift, GROUPS, BLOCK_N
                )
            else:
                span = tile_range(interval, row, gl.minimum(row + BLOCK_M, q_len), shift, k_len, BLOCK_N)
                first, last, at_list, further = span.first, span.last, 0, ()
            last = gl.maximum(last, first + 1)  # consumers count on one tile, be it masked
            lse_start = b * lse.batch + h * lse.head + q_start + row
            known = (row, b, h, q_start, q_len, k_len, shift, first, last, lse_start)
            shared.queue.put(item, known + further)
            if counter is not None:
                gl.store(counter + 1 + place, last_place)
                last_place = place
            for n in range(last - first):
                key = key_tile(visit, at_list, last - 1 - n, BLOCK_N)
                shared.keys.fill(at, k_desc, k_tail, b, h // group, k_start, k_len, key)
                if n == 0:
                    for g in gl.static_range(GROUPS):
                        shared.queries.fill(item * GROUPS + g, q_desc, q_tail, b, h, q_start, q_len, row + g * ROWS)
                if n == last - first - 1:
                    place = next_place(counter, place)
                shared.values.fill(at, v_desc, v_tail, b, h // group, k_start, k_len, key)
                at += 1
            item += 1
        else:
            place = next_place(counter, place)
    if counter is not None:
        shared.noted.index(GROUPS).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + last_place)
    shared.queue.put(item, (-1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
