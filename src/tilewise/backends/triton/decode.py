"""The forward pass for few query rows over many keys: the keys are divided among programs, partial results merged.

All query heads that share a kv head are rows of one tile, so that its keys and values are read once (Flash-Decoding, Dao
et al. 2023).
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import Lowered, packed_visit, per_row, strided
from tilewise.backends.device.rows import down, key_tiles, packed_rows, part_of, row_offsets
from tilewise.backends.device.seqinfo import not_finite, rows_at, sequence
from tilewise.backends.device.softmax import LN2
from tilewise.backends.device.structs import Keys
from tilewise.tiles import cdiv

from .configs import DecodeConfig, decode_config, options, padded, precision
from .forward import forward_sweep, new_outputs, repair_rows, write_rows

PARTS = tl.constexpr(16)  # partial results that are read at one time
_decode, _merge = Launcher(), Launcher()


@triton.jit
def part_statistics(parts, part_rows, row, BLOCK_DV: tl.constexpr):
    """Where the top and the total of a row of `parts` lie: behind the sums, BLOCK_DV for each row."""
    top = parts + tl.cast(part_rows, tl.int64) * BLOCK_DV + row
    return top, top + part_rows


@triton.jit(do_not_specialize=["part_rows", "heads_kv", "group", "tiles", "splits"])
def decode_kernel(
    q, k, v, o, lse, max_logit, parts, lengths, interval, scoring, part_rows, heads_kv, group, tiles, splits, visit, sinks,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys: sums = sum p v, totals = sum p, p = 2^(score - top). Where there is but one: o, lse."""
    place = tl.program_id(0)
    i, split, head = place % tiles, place // tiles % splits, place // tiles // splits
    hkv, b = head % heads_kv, head // heads_kv
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    if i * BLOCK_M >= q_len * group:
        return
    rows = packed_rows(i, b, hkv, group, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    at = rows_at(q, b, 0, q_start) + row_offsets(q, rows)[:, None] + column[None, :]
    q_tile = tl.load(at, mask=rows.valid[:, None] & (column < D)[None, :], other=0.0)
    keys = Keys(rows_at(k, b, hkv, k_start), rows_at(v, b, hkv, k_start), k.row, v.row, k_len)
    last = (tl.minimum((i + 1) * BLOCK_M, q_len * group) - 1) // group
    walk = key_tiles(rows, hkv, i, i * BLOCK_M // group, last, k_len, shift, interval, visit, BLOCK_N)
    walk = part_of(walk, split, splits)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, top, total = forward_sweep(
        walk, visit, acc, q_tile, keys, down(rows), scoring, D, DV, BLOCK_N, PRECISION, False
    )
    if parts is None:
        if max_logit is not None:
            tl.atomic_max(max_logit + rows.h, top * LN2, mask=rows.valid)
        acc, norm, scale = write_rows(o, lse, sinks, acc, top, total, rows, q_start, scoring, DV)
        target, offset = rows_at(o, b, 0, q_start), row_offsets(o, rows)
    else:
        row = place * BLOCK_M + tl.arange(0, BLOCK_M)
        top_at, total_at = part_statistics(parts, part_rows, row, BLOCK_DV)
        tl.store(top_at, top)
        tl.store(total_at, total)
        target, offset = parts, tl.cast(row, tl.int64) * BLOCK_DV
        tl.store(target + offset[:, None] + tl.arange(0, BLOCK_DV)[None, :], acc)
        norm, scale = tl.full([BLOCK_M], 1.0, tl.float32), 1.0
    if not_finite(acc) > 0:
        repair_rows(
            target, offset, rows_at(v, b, hkv, k_start), walk, visit, q_tile, keys, down(rows), scoring, top, norm, scale,
            D, DV, BLOCK_N, min(32, BLOCK_DV), PRECISION, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["part_rows", "heads_kv", "group", "tiles", "splits", "count"])
def merge_kernel(
    o, lse, max_logit, parts, lengths, interval, scoring, part_rows, heads_kv, group, tiles, splits, sinks, count,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One row: sums and totals of its parts, each times 2^(its top - the largest top); then o, lse."""
    row, head = tl.program_id(0) % count, tl.program_id(0) // count
    hkv, b = head % heads_kv, head // heads_kv
    q_start, q_len, _, k_len, shift = sequence(lengths, b)
    if row >= q_len * group:
        return
    rows = packed_rows(row, b, hkv, group, q_start, q_len, k_len, shift, interval, scoring, 1)
    column = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    top, total = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        there = part < splits
        at = ((head * splits + part) * tiles + row // BLOCK_M) * BLOCK_M + row % BLOCK_M
        top_at, total_at = part_statistics(parts, part_rows, at, BLOCK_DV)
        part_top = tl.load(top_at, mask=there, other=-float("inf"))
        part_total = tl.load(total_at, mask=there, other=0.0)
        address = parts + tl.cast(at, tl.int64)[:, None] * BLOCK_DV + column[None, :]
        part_sum = tl.load(address, mask=there[:, None], other=0.0)
        highest = tl.maximum(top, tl.max(part_top, 0))
        shift2 = tl.where(highest == -float("inf"), 0.0, highest)  # of a row that has seen no key
        weight, alpha = tl.math.exp2(part_top - shift2), tl.math.exp2(top - shift2)
        acc = acc * alpha[:, None] + tl.sum(part_sum * weight[:, None], 0)[None, :]
        total = total * alpha + tl.sum(part_total * weight, 0)
        top = highest
    if max_logit is not None:
        tl.atomic_max(max_logit + rows.h, top * LN2, mask=rows.valid)
    write_rows(o, lse, sinks, acc, top, total, rows, q_start, scoring, DV)


def decode(
    q: Tensor, k: Tensor, v: Tensor, call: Lowered, config: DecodeConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels for few query rows: arguments and results as those of `forward.forward`."""
    D, DV, heads_kv = q.shape[-1], v.shape[-1], k.shape[-2]
    group, heads = call.H // heads_kv, call.B * heads_kv
    rows = call.lengths.max_q * group
    config = config or decode_config(D, DV, q.dtype, q.device, rows, heads, call.reach)
    o, lse, max_logit = new_outputs(q, v, call)
    tiles = cdiv(rows, config.block_m)
    programs = tiles * heads * config.splits
    if programs == 0:
        return o, lse, max_logit
    part_rows = programs * config.block_m
    parts = None if config.splits == 1 else lse.new_empty(part_rows * (padded(DV) + 2))
    shared = (
        strided(o), per_row(lse), max_logit if len(max_logit) else None, parts, call.lengths, call.interval, call.scoring,
        part_rows, heads_kv, group, tiles, config.splits,
    )  # fmt: skip
    constants = D, DV, config.block_m, config.block_n, padded(D), padded(DV), precision(q.dtype)
    key = (call.kind, layout_key(q, k, v), constants, config)
    listed = packed_visit(call, config.block_m, config.block_n, group)
    sinks = call.sinks if parts is None else None  # they join where all parts are together
    args = (strided(q), strided(k), strided(v), *shared, listed, sinks, *constants)
    _decode.start(decode_kernel, key, programs, args, options(config))
    if parts is not None:
        args = (*shared, call.sinks, rows, DV, config.block_m, padded(DV))
        _merge.start(merge_kernel, key, rows * heads, args, {"num_warps": 4})
    return o, lse, max_logit
