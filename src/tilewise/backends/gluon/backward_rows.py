"""What comes before and after the backward kernel: one pass each over the rows, as fast as memory."""

import triton
import triton.language as tl

from tilewise.backends.device.seqinfo import load_rows, not_finite, rows_at, sequence, store_rows

from .backward_parts import ALIGNED, UNSPECIALIZED, Shape, sum_row

ROWS = 64  # of one program


@triton.jit
def place_of(place, tiles, heads):
    """(tile, b, h) of a program: heads first, whose rows are neighbours in memory."""
    return place // heads % tiles, place // heads // tiles, place % heads


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prepare_kernel(
    o, do, dlse, lse, start, delta, dq_sum, lengths, unit, row_tiles, heads, heads_kv, group, tiles, together, all_heads,
    batch_rows, head_rows, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """start = unit lse and -delta = dlse - rowsum(do * o), with which products begin; dq_sum = 0.

    A row that sees no key, or is none, starts at -inf or, as `unit` has it, at inf: its p is 0.
    """
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    i, b, h = place_of(tl.program_id(0), row_tiles, heads)
    q_start, q_len, _, _, _ = sequence(lengths, b)
    if i * ROWS >= tl.cdiv(q_len, ALIGNED) * ALIGNED:
        return
    t, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_DV)
    row = i * ROWS + t
    x = load_rows(rows_at(o, b, h, q_start), o.row, i * ROWS, q_len, t, column, DV, False, True).to(tl.float32)
    y = load_rows(rows_at(do, b, h, q_start), do.row, i * ROWS, q_len, t, column, DV, False, True).to(tl.float32)
    less = -tl.sum(x * y, 1)
    if dlse is not None:
        less += tl.load(rows_at(dlse, b, h, q_start) + tl.cast(row, tl.int64) * dlse.row, mask=row < q_len, other=0.0)
    row_lse = tl.load(rows_at(lse, b, h, q_start) + row, mask=row < q_len, other=-float("inf"))
    at = tl.cast(sum_row(lengths, b, h, q_start, call), tl.int64) + row
    tl.store(delta + at, less)
    tl.store(start + at, tl.where(row_lse == -float("inf"), unit * float("inf"), row_lse * unit))
    zero = tl.zeros([ROWS, BLOCK_D], tl.float32)
    store_rows(dq_sum, D, zero, at, tl.arange(0, BLOCK_D), row >= 0, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def finish_kernel(
    dq_sum, dq, broken, lengths, softmax_scale, row_tiles, heads, heads_kv, group, tiles, together, all_heads, batch_rows,
    head_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq = scale dq_sum, in the dtype of dq; notes whether it is finite."""
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    i, b, h = place_of(tl.program_id(0), row_tiles, heads)
    q_start, q_len, _, _, _ = sequence(lengths, b)
    if i * ROWS >= q_len:
        tl.store(broken + tl.program_id(0), 0)
        return
    t, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    first = tl.cast(sum_row(lengths, b, h, q_start, call), tl.int64)
    x = load_rows(dq_sum + first * D, D, i * ROWS, q_len, t, column, D, False, True)
    tl.store(broken + tl.program_id(0), not_finite(x))
    row = i * ROWS + t
    store_rows(rows_at(dq, b, h, q_start), dq.row, x * softmax_scale, row, column, row < q_len, D)
