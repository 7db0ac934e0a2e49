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


TERMS = tl.constexpr(3)  # 16-bit numbers that add up to a float32: each holds 8 of its 24 bits
STARTS = tl.constexpr(16)  # columns of `starts`: the fewest of a product
DELTA = tl.constexpr(8)  # the first one that -delta has
LEAST = tl.constexpr(-3e38)  # instead of -inf, whose product with 0 is NaN
#: Options of kernels that are set up while the one before them runs (programmatic dependent launch).
CHAINED = {"launch_pdl": True}
UNSPECIALIZED = (
    *(name for name in Shape._fields if name != "group"),
    "note_tiles",
)  # a group of 1 needs no loop over heads


@triton.jit
def let_next_start():
    """The kernel after this one may begin as soon as all programs of this one have, and wait (`await_kernel`)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_kernel():
    """Until the kernel before this one has ended and what it wrote is there: see `CHAINED`."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_row(lengths, b, h, q_start, call):
    """The first row of a sequence and head in tensors of our own: there sequences begin at multiples of ALIGNED rows."""
    row = b * call.batch_rows + h * call.head_rows
    if lengths.cu_q is not None:
        row += (q_start // ALIGNED + b) * ALIGNED
    return row


@triton.jit
def as_terms(x, number):
    """Term `number` of those that add up to x."""
    first = x.to(tl.bfloat16).to(tl.float32)
    second = (x - first).to(tl.bfloat16).to(tl.float32)
    return tl.where(number == 0, first, tl.where(number == 1, second, x - first - second))


@triton.jit
def store_starts(starts, at, minus_lse, minus_delta):
    """The terms of -lse, from column DELTA on those of -delta: for products that add them to s and dp."""
    column = tl.arange(0, STARTS)[None, :]
    row_lse = tl.maximum(minus_lse, LEAST, propagate_nan=tl.PropagateNan.ALL)
    x = as_terms(tl.where(column < DELTA, row_lse[:, None], minus_delta[:, None]), column % DELTA)
    x = tl.where(column % DELTA < TERMS, x, 0.0)
    tl.store(starts + at[:, None] * STARTS + column, x.to(tl.bfloat16))


@triton.jit
def as_rows(shares, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """64 rows of dq's sum from consumers' shares, PART columns after PART columns, each as threads hold it.

    That is eight columns after eight columns, warp by warp (16 rows), thread by thread (8 rows, 4 pairs of columns), and
    of each thread two pairs, eight rows apart: 16 bytes that lie next to the 16 of the next thread.
    """
    x = tl.reshape(shares, [COLUMNS // PART, PART // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, (2, 5, 3, 0, 1, 4, 6)), [64, COLUMNS])


@triton.jit
def place_of(place, tiles, heads):
    """(tile, b, h) of a program: heads first, whose rows are neighbours in memory."""
    return place // heads % tiles, place // heads // tiles, place % heads


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prepare_kernel(
    o, do, dlse, lse, minus_lse, minus_delta, starts, dq_sum, lengths, scoring, note_tiles, heads, heads_kv, group, tiles,
    together, all_heads, batch_rows, head_rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """-lse (see `statistics`) and -delta = dlse - rowsum(do * o), also as `store_starts` has them; dq_sum = 0."""
    if CHAIN:
        let_next_start()
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
    minus_row_lse = statistics(row_lse, scoring)
    tl.store(minus_delta + at, row_delta)
    tl.store(minus_lse + at, minus_row_lse)
    if starts is not None:
        store_starts(starts, at, minus_row_lse, row_delta)
    first = tl.cast(sum_row(lengths, b, h, q_start, call) + i * ROWS, tl.int64) * COLUMNS
    tl.store(dq_sum + first + tl.arange(0, ROWS * COLUMNS), tl.zeros([ROWS * COLUMNS], tl.float32))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def finish_kernel(
    dq_sum, dq, broken, lengths, softmax_scale, note_tiles, heads, heads_kv, group, tiles, together, all_heads, batch_rows,
    head_rows, D: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """dq = scale dq_sum, in the dtype of dq; notes whether it is finite."""
    if CHAIN:
        await_kernel()
        let_next_start()
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    i, b, h = place_of(tl.program_id(0), note_tiles, heads)
    q_start, q_len, _, _, _ = sequence(lengths, b)
    if i * ROWS >= q_len:
        tl.store(broken + tl.program_id(0), 0)
        return
    first = tl.cast(sum_row(lengths, b, h, q_start, call) + i * ROWS, tl.int64) * COLUMNS
    x = as_rows(tl.load(dq_sum + first + tl.arange(0, ROWS * COLUMNS)), COLUMNS, PART)
    row, column = i * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.where((row < q_len)[:, None] & (column < D)[None, :], x, 0.0)
    tl.store(broken + tl.program_id(0), not_finite(x))
    store_rows(rows_at(dq, b, h, q_start), dq.row, x * softmax_scale, row, column, row < q_len, D)
