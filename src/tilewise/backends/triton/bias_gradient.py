"""The gradient of the bias: one program per piece of the result recomputes the tiles that it is the sum of."""

import math

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


@triton.jit
def _owned(stride, tiles):
    """(programs, tiles that each adds up) along a dim of the bias: its stride, absent where it is broadcast."""
    if stride is None:
        return 1, tiles
    else:
        return tiles, 1


@triton.jit(do_not_specialize=["group", "batches", "heads", "rows", "keys"])
def dbias_kernel(
    q, k, v, do, minus_lse, minus_delta, dbias, lengths, interval, scoring, group, batches, heads, rows, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias = ds summed over what the bias is broadcast along: one program per piece of the result.

    There are `rows` row tiles and `keys` key tiles of each of `batches` x `heads`.
    """
    _, sum_batches = _owned(dbias.batch, batches)
    own_heads, sum_heads = _owned(dbias.head, heads)
    own_rows, sum_rows = _owned(dbias.row, rows)
    own_keys, sum_keys = _owned(dbias.key, keys)
    if dbias.row is None and dbias.key is None:  # cut by row tiles, for enough programs
        own_rows, sum_rows = rows, 1
    place = tl.program_id(0)
    j0, i0 = place % own_keys, place // own_keys % own_rows
    h0, b0 = place // own_keys // own_rows % own_heads, place // own_keys // own_rows // own_heads
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(sum_batches * sum_heads * sum_rows * sum_keys):
        j, i = j0 + at % sum_keys, i0 + at // sum_keys % sum_rows
        rest = at // sum_keys // sum_rows
        h, b = h0 + rest % sum_heads, b0 + rest // sum_heads
        total += tile_ds(
            i, j, b, h, q, k, v, do, minus_lse, minus_delta, lengths, interval, scoring, group, D, DV, BLOCK_M, BLOCK_N,
            BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    row, key = i0 * BLOCK_M + tl.arange(0, BLOCK_M), j0 * BLOCK_N + tl.arange(0, BLOCK_N)
    base = dbias.data
    if dbias.batch is not None:
        base += tl.cast(b0, tl.int64) * dbias.batch
    if dbias.head is not None:
        base += tl.cast(h0, tl.int64) * dbias.head
    if dbias.row is None and dbias.key is None:
        tl.store(base + i0, tl.sum(tl.sum(total, 1), 0))
    elif dbias.row is None:
        tl.store(base + key * dbias.key, tl.sum(total, 0), mask=key < lengths.max_k)
    elif dbias.key is None:
        tl.store(base + row * dbias.row, tl.sum(total, 1), mask=row < lengths.max_q)
    else:
        inside = (row < lengths.max_q)[:, None] & (key < lengths.max_k)[None, :]
        tl.store(base + tl.cast(row, tl.int64)[:, None] * dbias.row + key[None, :] * dbias.key, total, mask=inside)


def dbias(inputs: tuple, call: Lowered, group: int, config: Config, shape: tuple, key: tuple) -> Tensor:
    """The gradient of the bias in its own shape, padded to four dims; `inputs`, `shape`, `key` as in the other kernels."""
    bias = call.bound.bias
    assert bias is not None
    sizes = as_4d(bias).shape
    row_tiles, key_tiles = cdiv(call.lengths.max_q, config.block_m), cdiv(call.lengths.max_k, config.block_n)
    tiles = (call.B, call.H, row_tiles, key_tiles)
    owned = [size > 1 for size in sizes]
    cut = sizes[2:] == (1, 1)  # a sum over rows and keys: each row tile's is a number of its own
    rows = row_tiles if cut else sizes[2]
    out = torch.zeros((sizes[0], sizes[1], rows, sizes[3]), dtype=torch.float32, device=call.device)
    if min(tiles) > 0:
        target = Elements(out, *(stride if own else None for stride, own in zip(out.stride(), owned, strict=True)))
        programs = math.prod(t for t, own in zip(tiles, (*owned[:2], owned[2] or cut, owned[3]), strict=True) if own)
        args = (*inputs, target, call.lengths, call.interval, call.scoring, group, *tiles, *shape)
        _launcher.start(dbias_kernel, (key, shape, layout_key(out)), programs, args, options(config))
    return out.sum(2, keepdim=True) if cut else out
