"""The query rows of a tile: what forward and backward know about them, and which key tiles they visit."""

import triton
import triton.language as tl

from .portable import kv_tile_range
from .scoremods import dropout_keys
from .seqinfo import extremes, key_interval, row_interval
from .structs import Rows


@triton.jit
def query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M: tl.constexpr):
    """The rows of tile i."""
    index = i * BLOCK_M + tl.arange(0, BLOCK_M)
    m, valid = index + shift, index < q_len
    lo, hi = row_interval(interval, b, m, q_start + index, valid, k_len)
    first_key, second_key = index, index
    if scoring.seed is not None:
        first_key, second_key = dropout_keys(scoring, b, h, index)
    return Rows(b, h, index, m, valid, lo, hi, first_key, second_key)


@triton.jit
def down(rows):
    """The rows as (rows, 1) vectors, for scores with one row per query."""
    return Rows(
        rows.b, rows.h, rows.index[:, None], rows.m[:, None], rows.valid[:, None], rows.lo[:, None], rows.hi[:, None],
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
def _listed(visit, b, h, i):
    at = tl.cast(b, tl.int64) * visit.batch + h * visit.head + i
    partial = tl.load(visit.partial + at)
    return partial, partial + tl.load(visit.full + at), visit.tiles + at * visit.columns


@triton.jit
def key_tiles(rows, visit, i, BLOCK_N: tl.constexpr):
    """(first, full_first, full_last, last, list): entries to visit, those between full_* without masking.

    An entry is a key tile, or a place in the list of key tiles where there is one.
    """
    if visit is None:
        lo_min, lo_max, hi_min, hi_max = extremes(rows.lo, rows.hi, rows.valid)
        span = kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_N)
        return span.first, span.full_first, span.full_last, span.last, 0
    else:
        partial, last, listed = _listed(visit, rows.b, rows.h, i)
        return 0, partial, last, last, listed


@triton.jit
def row_tiles(key, b, h, j, q_len, k_len, shift, interval, visit, BLOCK_M: tl.constexpr):
    """The same for key tile j: the row tiles that see it."""
    if visit is None:
        valid = key < k_len
        first_row, end_row = key_interval(interval, key, valid, shift, q_len)
        lo_min, lo_max, hi_min, hi_max = extremes(first_row, end_row, valid)
        span = kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_M)
        return span.first, span.full_first, span.full_last, span.last, 0
    else:
        partial, last, listed = _listed(visit, b, h, j)
        return 0, partial, last, last, listed


@triton.jit
def tile_of(entry, listed, visit):
    """The tile that an entry stands for."""
    if visit is None:
        return entry
    else:
        return tl.load(listed + entry)


@triton.jit
def has_low(interval, visit):
    """Whether key tiles before the full ones may need masking: known at compile time."""
    return interval.left is not None or interval.chunk is not None or interval.low is not None or visit is not None


@triton.jit
def has_high(interval, visit):
    """Whether row tiles before the full ones may need masking: known at compile time."""
    return (
        interval.right is not None
        or interval.prefix is not None
        or interval.chunk is not None
        or interval.low is not None
        or visit is not None
    )
