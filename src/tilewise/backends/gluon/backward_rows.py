"""What comes before and after the backward kernel: one pass each over the rows, as fast as memory."""

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.backends.device.gradients import row_product, statistics
from tilewise.backends.device.seqinfo import load_rows, not_finite, rows_at, sequence, store_rows

ROWS = 64  # of one program
ALIGNED = tl.constexpr(128)  # rows: a multiple of every tile's


class Shape(NamedTuple):
    """Numbers of a call that the kernels need beside the lengths."""

    heads: int
    heads_kv: int
    group: int  # query heads of one kv head
    tiles: int  # key tiles of a sequence
    together: int  # kv heads worked on at one time
    all_heads: int  # kv heads of all sequences
    batch_rows: int  # see `sum_row`
    head_rows: int


UNSPECIALIZED = (
    *(name for name in Shape._fields if name != "group"),
    "note_tiles",
)  # a group of 1 needs no loop over heads


@triton.jit
def sum_row(lengths, b, h, q_start, call):
    """The first row of a sequence and head in tensors of our own: there sequences begin at multiples of ALIGNED rows."""
    row = b * call.batch_rows + h * call.head_rows
    if lengths.cu_q is not None:
        row += (q_start // ALIGNED + b) * ALIGNED
    return row


@triton.jit
def place_of(place, tiles, heads):
    """(tile, b, h) of a program: heads first, whose rows are neighbours in memory."""
    return place // heads % tiles, place // heads // tiles, place % heads


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prepare_kernel(
    o, do, dlse, lse, minus_lse, minus_delta, dq_sum, lengths, scoring, note_tiles, heads, heads_kv, group, tiles, together,
    all_heads, batch_rows, head_rows, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """-lse (see `statistics`) and -delta = dlse - rowsum(do * o), from which products start; dq_sum = 0."""
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    i, b, h = place_of(tl.program_id(0), note_tiles, heads)
    q_start, q_len, _, _, _ = sequence(lengths, b)
    if i * ROWS >= tl.cdiv(q_len, ALIGNED) * ALIGNED:
        return
    t, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_DV)
    row = i * ROWS + t
    x = load_rows(rows_at(o, b, h, q_start), o.row, i * ROWS, q_len, t, column, DV, False).to(tl.float32)
    y = load_rows(rows_at(do, b, h, q_start), do.row, i * ROWS, q_len, t, column, DV, False).to(tl.float32)
    row_delta = -row_product(x, y)
    if dlse is not None:
        row_delta += tl.load(
            rows_at(dlse, b, h, q_start) + tl.cast(row, tl.int64) * dlse.row, mask=row < q_len, other=0.0
        )
    row_lse = tl.load(rows_at(lse, b, h, q_start) + row, mask=row < q_len, other=-float("inf"))
    at = tl.cast(sum_row(lengths, b, h, q_start, call), tl.int64) + row
    tl.store(minus_delta + at, row_delta)
    tl.store(minus_lse + at, statistics(row_lse, scoring))
    zero = tl.zeros([ROWS, BLOCK_D], tl.float32)
    store_rows(dq_sum, D, zero, at, tl.arange(0, BLOCK_D), row >= 0, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def finish_kernel(
    dq_sum, dq, broken, lengths, softmax_scale, note_tiles, heads, heads_kv, group, tiles, together, all_heads, batch_rows,
    head_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq = scale dq_sum, in the dtype of dq; notes whether it is finite."""
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    i, b, h = place_of(tl.program_id(0), note_tiles, heads)
    q_start, q_len, _, _, _ = sequence(lengths, b)
    if i * ROWS >= q_len:
        tl.store(broken + tl.program_id(0), 0)
        return
    t, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    first = tl.cast(sum_row(lengths, b, h, q_start, call), tl.int64)
    x = load_rows(dq_sum + first * D, D, i * ROWS, q_len, t, column, D, False)
    tl.store(broken + tl.program_id(0), not_finite(x))
    row = i * ROWS + t
    store_rows(rows_at(dq, b, h, q_start), dq.row, x * softmax_scale, row, column, row < q_len, D)
