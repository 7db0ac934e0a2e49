"""Rows whose sums are not finite, summed again: an Inf or NaN among the values reaches only rows that see its key.

In a product p v it reaches rows with p = 0, too. Consumers write such rows as they are; when all work is done, a program that
has met some looks for them here: slowly, one row at a time, but NaNs behind the mask are rare.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.device.scoremods import hide, scores
from tilewise.backends.device.seqinfo import row_interval, rows_at, sequence
from tilewise.backends.device.softmax import LOG2E
from tilewise.backends.device.structs import Rows

from .forward_producer import ROWS, row_tile
from .pipeline import next_place

ELEMENTS = gl.constexpr(2048)  # of a tile of keys or values here


@gluon.constexpr_function
def _by_rows(columns):
    """A layout of (keys, columns) in which threads hold 8 neighbouring columns."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _load(x, b, h, start, row, count, column, width):
    """Rows of one head, 0 beyond `count` rows and `width` columns, in float32."""
    address = rows_at(x, b, h, start) + row.to(gl.int64)[:, None] * x.row + column[None, :]
    return gl.load(address, mask=(row < count)[:, None] & (column < width)[None, :], other=0.0).to(gl.float32)


@gluon.jit
def repair_row(
    q, k, v, o, lse, lengths, interval, scoring, b, h, hkv, index, D, DV, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr
):  # fmt: skip
    """o = sum of p v over the keys that the row sees."""
    K_LAYOUT: gl.constexpr = _by_rows(BLOCK_D)
    V_LAYOUT: gl.constexpr = _by_rows(BLOCK_DV)
    KEYS: gl.constexpr = ELEMENTS // max(BLOCK_D, BLOCK_DV)
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    lo, hi = row_interval(interval, b, index + shift, q_start + index, index < q_len, k_len)
    rows = Rows(b, h, index, index + shift, index < q_len, lo, hi, index, index)
    row_lse = gl.load(rows_at(lse, b, h, q_start) + index) * LOG2E
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, K_LAYOUT))
    v_column = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, V_LAYOUT))
    q_row = gl.load(rows_at(q, b, h, q_start + index) + column, mask=column < D, other=0.0).to(gl.float32)
    acc = gl.zeros([BLOCK_DV], gl.float32, gl.SliceLayout(0, V_LAYOUT))
    for first in range(lo, hi, KEYS):
        key = first + gl.arange(0, KEYS, gl.SliceLayout(1, K_LAYOUT))
        product = gl.sum(_load(k, b, hkv, k_start, key, hi, column, D) * q_row[None, :], 1)
        s, _ = scores(product, scoring, rows, key, k_len)
        s = gl.convert_layout(hide(s, scoring, rows, key, k_len), gl.SliceLayout(1, V_LAYOUT))
        key = first + gl.arange(0, KEYS, gl.SliceLayout(1, V_LAYOUT))
        weighted = gl.exp2(s * scoring.factor - row_lse)[:, None] * _load(v, b, hkv, k_start, key, hi, v_column, DV)
        acc += gl.sum(gl.where((s == -float("inf"))[:, None], 0.0, weighted), 0)
    acc = gl.where(row_lse == -float("inf"), 0.0, acc)
    gl.store(rows_at(o, b, h, q_start + index) + v_column, acc.to(o.data.dtype.element_ty), mask=v_column < DV)


@gluon.jit
def is_broken(o, lse, b, h, q_start, row, q_len, DV, BLOCK_DV: gl.constexpr):
    """Whether a tile of rows holds one that is not finite, though its lse is a number."""
    LAYOUT: gl.constexpr = _by_rows(BLOCK_DV)
    column = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, LAYOUT))
    index = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    row_lse = gl.load(rows_at(lse, b, h, q_start) + index, mask=index < q_len, other=0.0)
    faults = gl.sum(_load(o, b, h, q_start, index, q_len, column, DV) * 0.0, 1)
    return gl.max(gl.where((faults == 0.0) | (row_lse != row_lse), 0, 1), 0) > 0


@gluon.jit
def repair_noted(
    q, k, v, o, lse, counter, place, consumer, lengths, interval, scoring, heads, group, tiles, together, all_heads, D, DV,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The broken tiles of one consumer among the items of this program, `place` one end of them."""
    while (place >= 0) & (place < tiles * all_heads):
        i, b, h = row_tile(place, tiles, heads, together, all_heads)
        q_start, q_len, _, _, _ = sequence(lengths, b)
        first = (i * GROUPS + consumer) * ROWS
        if is_broken(o, lse, b, h, q_start, first, q_len, DV, BLOCK_DV):
            for index in range(first, gl.minimum(first + ROWS, q_len)):
                repair_row(
                    q, k, v, o, lse, lengths, interval, scoring, b, h, h // group, index, D, DV, BLOCK_D, BLOCK_DV
                )
        place = next_place(None, place) if counter is None else gl.load(counter + 1 + place)
