"""The gradient of the bias: one program per piece of the result recomputes the tiles that it is the sum of."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.device.gradients import load_statistics, score_gradients
from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import Lowered
from tilewise.backends.device.rows import down, query_rows
from tilewise.backends.device.seqinfo import extremes, load_rows, rows_at, sequence
from tilewise.backends.device.structs import Elements
from tilewise.masks import as_4d
from tilewise.tiles import cdiv

from .configs import Config, options

_launcher = Launcher()


@triton.jit
def tile_ds(
    i, j, b, h, q, k, v, do, minus_lse, minus_delta, lengths, interval, scoring, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ds of one tile, 0 where nothing is seen."""
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    rows = query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M)
    ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    lowest, _, _, highest = extremes(rows.lo, rows.hi, rows.valid)
    if (lowest < (j + 1) * BLOCK_N) & (highest > j * BLOCK_N):
        t, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        row_lse, row_delta = load_statistics(minus_lse, minus_delta, b, h, q_start, q_len, i, BLOCK_M)
        hkv = h // group
        column, value_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        q_tile = load_rows(rows_at(q, b, h, q_start), q.row, i * BLOCK_M, q_len, t, column, D, False)
        do_tile = load_rows(rows_at(do, b, h, q_start), do.row, i * BLOCK_M, q_len, t, value_column, DV, False)
        k_tile = load_rows(rows_at(k, b, hkv, k_start), k.row, j * BLOCK_N, k_len, n, column, D, False)
        v_tile = load_rows(rows_at(v, b, hkv, k_start), v.row, j * BLOCK_N, k_len, n, value_column, DV, False)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        key = (j * BLOCK_N + n)[None, :]
        lse2, row_delta = -row_lse[:, None] * scoring.factor, -row_delta[:, None]
        _p, ds, _slope = score_gradients(s, dp, scoring, down(rows), key, k_len, lse2, row_delta, True, True)
    return ds


@triton.jit(do_not_specialize=["group"])
def dbias_kernel(
    q, k, v, do, minus_lse, minus_delta, dbias, owners, sums, lengths, interval, scoring, group,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias = ds summed over what the bias is broadcast along: one program per piece of the result.

    `owners` are the grid's sizes and `sums` the numbers of (batches, heads, row tiles, key tiles) that a program adds up.
    """
    place = tl.program_id(0)
    j0, i0 = place % owners.keys, place // owners.keys % owners.rows
    h0, b0 = place // owners.keys // owners.rows % owners.heads, place // owners.keys // owners.rows // owners.heads
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(sums.batches * sums.heads * sums.rows * sums.keys):
        j, i = j0 + at % sums.keys, i0 + at // sums.keys % sums.rows
        rest = at // sums.keys // sums.rows
        h, b = h0 + rest % sums.heads, b0 + rest // sums.heads
        total += tile_ds(
            i, j, b, h, q, k, v, do, minus_lse, minus_delta, lengths, interval, scoring, group, D, DV, BLOCK_M, BLOCK_N,
            BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    row, key = i0 * BLOCK_M + tl.arange(0, BLOCK_M), j0 * BLOCK_N + tl.arange(0, BLOCK_N)
    base = dbias.data + tl.cast(b0, tl.int64) * dbias.batch + tl.cast(h0, tl.int64) * dbias.head
    if dbias.row is None and dbias.key is None:
        tl.store(base + i0, tl.sum(tl.sum(total, 1), 0))
    elif dbias.row is None:
        tl.store(base + key * dbias.key, tl.sum(total, 0), mask=key < lengths.max_k)
    elif dbias.key is None:
        tl.store(base + row * dbias.row, tl.sum(total, 1), mask=row < lengths.max_q)
    else:
        inside = (row < lengths.max_q)[:, None] & (key < lengths.max_k)[None, :]
        tl.store(base + tl.cast(row, tl.int64)[:, None] * dbias.row + key[None, :] * dbias.key, total, mask=inside)


class Owners(NamedTuple):
    """Sizes along batch, head, row tile and key tile."""

    batches: int
    heads: int
    rows: int
    keys: int


def dbias(inputs: tuple, call: Lowered, group: int, config: Config, shape: tuple, key: tuple) -> Tensor:
    """The gradient of the bias in its own shape, padded to four dims; `inputs`, `shape`, `key` as in the other kernels."""
    bias = call.bound.bias
    assert bias is not None
    sizes = as_4d(bias).shape
    tiles = Owners(call.B, call.H, cdiv(call.lengths.max_q, config.block_m), cdiv(call.lengths.max_k, config.block_n))
    per_batch, per_head, per_row_, per_key = (size > 1 for size in sizes)
    # A sum over rows and keys is cut by row tiles, for enough programs.
    owners = Owners(
        tiles.batches if per_batch else 1, tiles.heads if per_head else 1,
        tiles.rows if per_row_ or not per_key else 1, tiles.keys if per_key else 1,
    )  # fmt: skip
    sums = Owners(*(t if own == 1 else 1 for t, own in zip(tiles, owners, strict=True)))
    rows = sizes[2] if per_row_ or per_key else owners.rows
    out = torch.zeros((sizes[0], sizes[1], rows, sizes[3]), dtype=torch.float32, device=call.device)
    if min(tiles) > 0:
        target = Elements(
            out,
            out.stride(0),
            out.stride(1),
            out.stride(2) if per_row_ else None,
            out.stride(3) if per_key else None,
        )
        args = (*inputs, target, owners, sums, call.lengths, call.interval, call.scoring, group, *shape)
        _launcher.start(
            dbias_kernel, (key, shape, owners, sums, layout_key(out)), math.prod(owners), args, options(config)
        )
    return out if rows == sizes[2] else out.sum(2, keepdim=True)
