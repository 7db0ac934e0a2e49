"""Gradients that are not finite, summed again: a NaN reaches only gradients of rows and keys that see each other.

A product with ds = 0 carries an Inf or NaN over to them, too. So what finds a sum broken notes its tile, and those tiles
are summed here a second time, without what does not belong: slowly, but NaNs behind the mask are rare.
"""

import triton
import triton.language as tl

from tilewise.backends.device.gradients import finite, score_gradients, weighed_rows
from tilewise.backends.device.rows import across, down, key_tiles, query_rows, row_tiles
from tilewise.backends.device.seqinfo import load_rows, rows_at, sequence, store_rows

from .backward_rows import UNSPECIALIZED, Shape, await_kernel, place_of, sum_row


@triton.jit
def statistics_of(minus_lse, minus_delta, lengths, scoring, b, h, q_start, rows, call):
    """(lse in units of log2, delta) of the rows; lse is inf, which makes p 0, where a row sees no key."""
    at = tl.cast(sum_row(lengths, b, h, q_start, call), tl.int64) + rows.index
    return -tl.load(minus_lse + at) * scoring.factor, -tl.load(minus_delta + at)


@triton.jit
def repair_dq(
    i, b, h, q, k, v, do, minus_lse, minus_delta, dq, lengths, interval, scoring, softmax_scale, call, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k of a row tile."""
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    t, column, v_column = tl.arange(0, TILE), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, TILE)
    q_tile = load_rows(rows_at(q, b, h, q_start), q.row, i * TILE, q_len, t, column, D, False)
    do_tile = load_rows(rows_at(do, b, h, q_start), do.row, i * TILE, q_len, t, v_column, DV, False)
    lse2, row_delta = statistics_of(minus_lse, minus_delta, lengths, scoring, b, h, q_start, rows, call)
    keys, values = rows_at(k, b, h // call.group, k_start), rows_at(v, b, h // call.group, k_start)
    last = tl.minimum((i + 1) * TILE, q_len) - 1
    walk = key_tiles(rows, h, i, i * TILE, last, k_len, shift, interval, None, TILE)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for j in range(walk.first, walk.last):
        k_tile = load_rows(keys, k.row, j * TILE, k_len, t, column, D, False)
        v_tile = load_rows(values, v.row, j * TILE, k_len, t, v_column, DV, False)
        s, dp = tl.dot(q_tile, tl.trans(k_tile)), tl.dot(do_tile, tl.trans(v_tile))
        key = (j * TILE + t)[None, :]
        _weight, ds, slope = score_gradients(
            s, dp, scoring, down(rows), key, k_len, lse2[:, None], row_delta[:, None], True, True
        )
        acc = tl.dot((ds * slope).to(k_tile.dtype), finite(k_tile), acc)
    store_rows(rows_at(dq, b, h, q_start), dq.row, acc * softmax_scale, rows.index, column, rows.valid, D)


@triton.jit
def repair_dkdv(
    j, b, hkv, q, k, v, do, minus_lse, minus_delta, dk, dv, lengths, interval, scoring, softmax_scale, call, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dk = scale ds^T q and dv = p^T do of a key tile."""
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    t, column, v_column = tl.arange(0, TILE), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    key = j * TILE + t
    k_tile = load_rows(rows_at(k, b, hkv, k_start), k.row, j * TILE, k_len, t, column, D, False)
    v_tile = load_rows(rows_at(v, b, hkv, k_start), v.row, j * TILE, k_len, t, v_column, DV, False)
    dk_sum, dv_sum = tl.zeros([TILE, BLOCK_D], tl.float32), tl.zeros([TILE, BLOCK_DV], tl.float32)
    walk = row_tiles(j, b, hkv, q_len, k_len, shift, interval, None, TILE, TILE)
    for h in range(hkv * call.group, (hkv + 1) * call.group):
        for i in range(walk.first, walk.last):
            rows = query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, TILE)
            q_tile = load_rows(rows_at(q, b, h, q_start), q.row, i * TILE, q_len, t, column, D, False)
            do_tile = load_rows(rows_at(do, b, h, q_start), do.row, i * TILE, q_len, t, v_column, DV, False)
            lse2, row_delta = statistics_of(minus_lse, minus_delta, lengths, scoring, b, h, q_start, rows, call)
            s, dp = tl.dot(k_tile, tl.trans(q_tile)), tl.dot(v_tile, tl.trans(do_tile))
            p, ds, slope = score_gradients(
                s, dp, scoring, across(rows), key[:, None], k_len, lse2[None, :], row_delta[None, :], True, True
            )
            dv_sum = tl.dot(p.to(do_tile.dtype), weighed_rows(do_tile, p), dv_sum)
            dk_sum = tl.dot((ds * slope).to(q_tile.dtype), finite(q_tile), dk_sum)
    store_rows(rows_at(dk, b, hkv, k_start), dk.row, dk_sum * softmax_scale, key, column, key < k_len, D)
    store_rows(rows_at(dv, b, hkv, k_start), dv.row, dv_sum, key, v_column, key < k_len, DV)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def repair_kernel(
    q, k, v, do, minus_lse, minus_delta, dq, dk, dv, broken_rows, broken_keys, lengths, interval, scoring, softmax_scale,
    note_tiles, heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr, SCAN: tl.constexpr,
    NOTES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Sums the tiles that are noted again; NOTES notes belong to one key tile."""
    if CHAIN:
        await_kernel()
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    row_notes, key_notes = note_tiles * heads * (all_heads // heads_kv), tiles * all_heads * 2
    # Notes are looked at many at a time: one after the other would take longer than the rest of the kernel.
    scan = tl.arange(0, SCAN)
    for first in range(tl.program_id(0) * SCAN, row_notes, tl.num_programs(0) * SCAN):
        last = tl.minimum(first + SCAN, row_notes)
        if tl.max(tl.load(broken_rows + first + scan, mask=first + scan < last, other=0), 0) > 0:
            for note in range(first, last):
                if tl.load(broken_rows + note) > 0:
                    i, b, h = place_of(note, note_tiles, heads)
                    repair_dq(
                        i, b, h, q, k, v, do, minus_lse, minus_delta, dq, lengths, interval, scoring, softmax_scale, call,
                        D, DV, BLOCK_D, BLOCK_DV, TILE,
                    )  # fmt: skip
    for first in range(tl.program_id(0) * SCAN, key_notes, tl.num_programs(0) * SCAN):
        last = tl.minimum(first + SCAN, key_notes)
        if tl.max(tl.load(broken_keys + first + scan, mask=first + scan < last, other=0), 0) > 0:
            for note in range(first, last):
                if tl.load(broken_keys + note) > 0:
                    j, head = note // NOTES % (tiles * 2 // NOTES), note // (tiles * 2)
                    repair_dkdv(
                        j, head // heads_kv, head % heads_kv, q, k, v, do, minus_lse, minus_delta, dk, dv, lengths,
                        interval, scoring, softmax_scale, call, D, DV, BLOCK_D, BLOCK_DV, TILE,
                    )  # fmt: skip
