"""Sequences and rows: where they start, how long they are, which keys a row sees."""

import triton
import triton.language as tl

from .descriptors import tma_start
from .portable import (
    chunk_interval,
    prefix_first_row,
    prefix_high,
    window_end_row,
    window_first_row,
    window_high,
    window_low,
)
from .structs import Boxed

NO_KEY = tl.constexpr(2**31 - 1)  # larger than every key position


@triton.jit
def _bounds(b, cu, used, longest, total):
    """(start, length) of sequence b: never outside the tensor, whatever cu_seqlens holds."""
    if cu is None:
        return 0, longest
    else:
        start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total).to(tl.int32)
        length = tl.load(cu + b + 1).to(tl.int32) - start if used is None else tl.load(used + b).to(tl.int32)
        return start, tl.maximum(tl.minimum(tl.minimum(length, longest), total - start), 0)


@triton.jit
def sequence(lengths, b):
    """(q_start, q_len, k_start, k_len, shift) of sequence b; a row's position is m = row + shift."""
    q_start, q_len = _bounds(b, lengths.cu_q, lengths.used_q, lengths.max_q, lengths.total_q)
    k_start, k_len = _bounds(b, lengths.cu_k, lengths.used_k, lengths.max_k, lengths.total_k)
    return q_start, q_len, k_start, k_len, (k_len - q_len) * lengths.aligned


@triton.jit
def row_interval(interval, b, m, token, valid, k_len):
    """Keys [lo, hi) that each row sees: proper, within the sequence, empty where the row is not `valid`."""
    lo = m * 0
    hi = lo + k_len
    if interval.left is not None:
        lo = tl.maximum(lo, window_low(m, interval.left))
    if interval.right is not None:
        hi = tl.minimum(hi, window_high(m, interval.right))
    if interval.prefix is not None:
        hi = tl.minimum(hi, prefix_high(m, interval.prefix))
    if interval.chunk is not None:
        first, end = chunk_interval(m, interval.chunk)
        lo, hi = tl.maximum(lo, first), tl.minimum(hi, end)
    if interval.low is not None:
        at = tl.cast(b, tl.int64) * interval.batch + token
        lo = tl.maximum(lo, tl.load(interval.low + at, mask=valid, other=0))
        hi = tl.minimum(hi, tl.load(interval.high + at, mask=valid, other=0))
    lo = tl.minimum(lo, k_len)
    return lo, tl.where(valid, tl.maximum(hi, lo), lo)


@triton.jit
def key_interval(interval, b, n, valid, shift, q_len):
    """Rows [first, end) that see each key: the bounds of `row_interval` turned round."""
    first = n * 0
    end = first + q_len
    if interval.left is not None:
        end = tl.minimum(end, window_end_row(n, interval.left) - shift)
    if interval.right is not None:
        first = tl.maximum(first, window_first_row(n, interval.right) - shift)
    if interval.prefix is not None:
        first = tl.maximum(first, prefix_first_row(n, interval.prefix) - shift)
    if interval.chunk is not None:
        low, high = chunk_interval(n, interval.chunk)
        first, end = tl.maximum(first, low - shift), tl.minimum(end, high - shift)
    if interval.first is not None:
        at = tl.cast(b, tl.int64) * interval.key_batch + n
        first = tl.maximum(first, tl.load(interval.first + at, mask=valid, other=0))
        end = tl.minimum(end, tl.load(interval.end + at, mask=valid, other=0))
    first = tl.minimum(first, q_len)
    return first, tl.where(valid, tl.maximum(end, first), first)


@triton.jit
def extremes(lo, hi, valid):
    """(lo_min, lo_max, hi_min, hi_max) over the rows of a tile, for `kv_tile_range`; empty rows are never "full"."""
    seen = lo < hi
    return (
        tl.min(tl.where(seen, lo, NO_KEY), 0),
        tl.max(tl.where(valid, lo, 0), 0),
        tl.min(tl.where(valid, hi, NO_KEY), 0),
        tl.max(tl.where(seen, hi, 0), 0),
    )


@triton.jit
def rows_at(x, b, h, start):
    """Address of row `start` of (b, h)."""
    return x.data + tl.cast(b, tl.int64) * x.batch + tl.cast(h, tl.int64) * x.head + tl.cast(start, tl.int64) * x.row


@triton.jit
def matrix(x, boxes, b, h, start):
    """The rows of one sequence and head for `load_rows`: in boxes where there are any, else the address of the first row."""
    if boxes is None:
        return rows_at(x, b, h, start)
    else:
        return Boxed(boxes, b, h, start)


@triton.jit
def load_rows(source, stride, first, length, row, column, WIDTH: tl.constexpr, BOXED: tl.constexpr):
    """Rows first + row of a `matrix`; beyond `length` and beyond column WIDTH it is 0."""
    COLUMNS: tl.constexpr = column.shape[0]
    if BOXED:
        box = source.boxes.load(tma_start(source.boxes, source.b, source.h, source.start, length, first))
        return tl.reshape(box, [row.shape[0], COLUMNS])
    else:
        # The offsets inside the tile do not change from tile to tile: only the address of its first row does.
        address = source + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
        if COLUMNS == WIDTH:
            return tl.load(address, mask=(first + row < length)[:, None], other=0.0)
        else:
            return tl.load(address, mask=(first + row < length)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(base, stride, x, row, column, valid, WIDTH: tl.constexpr):
    """Write the valid rows of a tile, columns below WIDTH, in the dtype of the target."""
    address = base + tl.cast(row, tl.int64)[:, None] * stride + column[None, :]
    tl.store(address, x.to(base.dtype.element_ty), mask=valid[:, None] & (column < WIDTH)[None, :])


@triton.jit
def not_finite(x):
    """1 where a tile holds an Inf or NaN, else 0."""
    return tl.max(tl.where(x * 0.0 == 0.0, 0, 1))  # over all at once: Triton 3.6 fails on two reductions on Blackwell
