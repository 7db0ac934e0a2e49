"""The query rows of a tile: what forward and backward know about them, and which key tiles they visit."""

import triton
import triton.language as tl

from .portable import kv_tile_range
from .scoremods import dropout_keys
from .seqinfo import extremes, key_interval, row_interval, rows_at
from .structs import Rows, Walk


@triton.jit
def query_rows(
    i, b, h, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M: tl.constexpr, row_keys=None
):  # fmt: skip
    """The rows of tile i. `row_keys`: their keys of dropout, where they are in memory (see `pack_keys`)."""
    index = i * BLOCK_M + tl.arange(0, BLOCK_M)
    return _rows(b, h, index, q_start, q_len, k_len, shift, interval, scoring, row_keys)


@triton.jit
def packed_rows(i, b, hkv, group, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M: tl.constexpr):
    """The rows of tile i of a kv head: those of all heads that share it, head by head for each query."""
    row = i * BLOCK_M + tl.arange(0, BLOCK_M)
    return _rows(b, hkv * group + row % group, row // group, q_start, q_len, k_len, shift, interval, scoring, None)


@triton.jit
def _rows(b, h, index, q_start, q_len, k_len, shift, interval, scoring, row_keys):
    m, valid = index + shift, index < q_len
    lo, hi = row_interval(interval, b, m, q_start + index, valid, k_len)
    first_key, second_key = index, index
    if row_keys is not None:
        packed = tl.load(rows_at(row_keys, b, h, q_start) + index, mask=valid, other=0)
        first_key, second_key = (packed >> 32).to(tl.uint32), packed.to(tl.uint32)
    elif scoring.seed is not None:
        first_key, second_key = dropout_keys(scoring, b, h, index)
    return Rows(b, h, index, m, valid, lo, hi, first_key, second_key)


@triton.jit
def pack_keys(scoring, b, h, index):
    """The keys of dropout of each row, as one number."""
    first_key, second_key = dropout_keys(scoring, b, h, index)
    return (first_key.to(tl.int64) << 32) | second_key.to(tl.int64)


@triton.jit
def down(rows):
    """The rows as (rows, 1) vectors, for scores with one row per query."""
    h = rows.h
    if len(rows.h.shape) > 0:
        h = rows.h[:, None]
    return Rows(
        rows.b, h, rows.index[:, None], rows.m[:, None], rows.valid[:, None], rows.lo[:, None], rows.hi[:, None],
        rows.first_key[:, None], rows.second_key[:, None],
    )  # fmt: skip


@triton.jit
def across(rows):
    """The rows as (1, rows) vectors, for transposed scores."""
    return Rows(
        rows.b, rows.h, rows.index[None, :], rows.m[None, :], rows.valid[None, :], rows.lo[None, :], rows.hi[None, :],
        rows.first_key[None, :], rows.second_key[None, :],
    )  # fmt: skip


@triton.jit
def listed(visit, b, h, i):
    """(which list, how many of its tiles are partial, how many there are) of tile i."""
    at = tl.cast(b, tl.int64) * visit.batch + h * visit.head + i
    partial = tl.load(visit.partial + at)
    return at, partial, partial + tl.load(visit.full + at)


@triton.jit
def key_tiles(rows, h, i, first, last, k_len, shift, interval, visit, BLOCK_N: tl.constexpr):
    """The key tiles that the rows of tile i visit: `first` to `last` of the sequence; `h` is the head of tile lists."""
    if visit is None:
        if interval.low is None:
            # The bounds of closed formulas never decrease: those of the first and the last row are the extreme ones.
            lo_min, hi_min = row_interval(interval, rows.b, first + shift, 0, first <= last, k_len)
            lo_max, hi_max = row_interval(interval, rows.b, last + shift, 0, first <= last, k_len)
        else:
            lo_min, lo_max, hi_min, hi_max = extremes(rows.lo, rows.hi, rows.valid)
        span = kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_N)
        return Walk(span.first, span.full_first, span.full_last, span.last, 0)
    else:
        at, partial, end = listed(visit, rows.b, h, i)
        return Walk(0, partial, end, end, visit.tiles + at * visit.columns)


@triton.jit
def part_of(walk, part, parts):
    """One of equal parts of a walk."""
    count = walk.last - walk.first
    first, last = walk.first + count * part // parts, walk.first + count * (part + 1) // parts
    return Walk(first, walk.full_first, walk.full_last, last, walk.listed)


@triton.jit
def row_offsets(x, rows):
    """Where the rows lie in `x`, from row 0 of head 0 on."""
    return tl.cast(rows.index, tl.int64) * x.row + tl.cast(rows.h, tl.int64) * x.head


@triton.jit
def row_tiles(
    j, b, h, q_len, k_len, shift, interval, visit, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The row tiles that see key tile j."""
    if visit is None:
        first, last = j * BLOCK_N, tl.minimum((j + 1) * BLOCK_N, k_len) - 1
        lo_min, hi_min = key_interval(interval, b, first, first < k_len, shift, q_len)
        lo_max, hi_max = key_interval(interval, b, last, first < k_len, shift, q_len)
        span = kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_M)
        return Walk(span.first, span.full_first, span.full_last, span.last, 0)
    else:
        at, partial, end = listed(visit, b, h, j)
        return Walk(0, partial, end, end, visit.tiles + at * visit.columns)


@triton.jit
def entry_at(place, walk, begin):
    """Which entry comes at a place of a walk: from entry `begin` on, where there is one, and after the last the first."""
    if begin is None:
        return place
    else:
        entry = place + begin - walk.first
        return tl.where(entry < walk.last, entry, entry - (walk.last - walk.first))


@triton.jit
def tile_of(entry, walk, visit):
    """The tile that an entry stands for; any tile where the walk is over."""
    if visit is None:
        return entry
    else:
        return tl.load(walk.listed + entry, mask=entry < walk.last, other=0)


@triton.jit
def is_partial(entry, walk):
    """Whether some row of the tile does not see some key of it."""
    return (entry < walk.full_first) | (entry >= walk.full_last)
