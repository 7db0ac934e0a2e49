"""The backward pass (FlashAttention-2, algorithm 2): scores recomputed from the saved logsumexp, no atomics.

One kernel per thing that is summed: dk and dv by key tiles, dq (and the slopes' gradient) by row tiles, dbias by tiles
of the bias. So every sum has one owner, and every run the same order.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.base import Grads, Needs
from tilewise.backends.device.gradients import (
    finite,
    load_statistics,
    row_product,
    score_gradients,
    score_start,
    sink_gradient,
    statistics,
    upstream_start,
    weighed_rows,
)
from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import Lowered, per_row, strided, visit
from tilewise.backends.device.order import heads_together
from tilewise.backends.device.portable import work_order
from tilewise.backends.device.rows import (
    across,
    down,
    entry_at,
    is_partial,
    key_tiles,
    pack_keys,
    query_rows,
    row_tiles,
    tile_of,
)
from tilewise.backends.device.seqinfo import load_rows, matrix, not_finite, rows_at, sequence, store_rows
from tilewise.backends.device.structs import Keys, Strided
from tilewise.tiles import cdiv

from .bias_gradient import dbias
from .configs import Config, backward_configs, options, owned, padded, precision, streamed, traits
from .products import product_from

# Of one program of `statistics_kernel`: 39, 40 and 45 us at D64, 128 and 256; with 64 rows, 4 warps 39, 48 and 48.
STATISTICS_ROWS, STATISTICS_WARPS = 32, 2
_statistics, _dq, _dkdv = Launcher(), Launcher(), Launcher()


@triton.jit(do_not_specialize=["heads", "tiles"])
def statistics_kernel(
    o, do, lse, dlse, minus_lse, minus_delta, row_keys, lengths, scoring, heads, tiles, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """-delta = dlse - rowsum(do * o), -lse in the units of `statistics`, and what dropout knows of a row."""
    place = tl.program_id(0)
    i, h, b = place % tiles, place // tiles % heads, place // tiles // heads
    q_start, q_len, _, _, _ = sequence(lengths, b)
    if i * BLOCK_M >= q_len:
        return
    t, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    row = i * BLOCK_M + t
    valid = row < q_len
    x = load_rows(rows_at(o, b, h, q_start), o.row, i * BLOCK_M, q_len, t, column, DV, False).to(tl.float32)
    y = load_rows(rows_at(do, b, h, q_start), do.row, i * BLOCK_M, q_len, t, column, DV, False).to(tl.float32)
    total = -row_product(x, y)
    if dlse is not None:
        total += tl.load(rows_at(dlse, b, h, q_start) + tl.cast(row, tl.int64) * dlse.row, mask=valid, other=0.0)
    tl.store(rows_at(minus_delta, b, h, q_start) + row, total, mask=valid)
    row_lse = tl.load(rows_at(lse, b, h, q_start) + row, mask=valid, other=0.0)
    tl.store(rows_at(minus_lse, b, h, q_start) + row, statistics(row_lse, scoring), mask=valid)
    if row_keys is not None:
        tl.store(rows_at(row_keys, b, h, q_start) + row, pack_keys(scoring, b, h, row), mask=valid)


@triton.jit
def dq_sweep(
    walk, visit, dq, dslope, q, do, keys, rows, scoring, lse2, delta, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, BOXED: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """Key tiles: dq += ds k, and the slopes' share of each row. CLEAN: what no row sees is kept out."""
    n = tl.arange(0, BLOCK_N)
    for entry in tl.range(walk.first, walk.last):
        j = tile_of(entry, walk, visit)
        key = (j * BLOCK_N + n)[None, :]
        k = load_rows(keys.k, keys.k_row, j * BLOCK_N, keys.length, n, tl.arange(0, q.shape[1]), D, BOXED)
        v = load_rows(keys.v, keys.v_row, j * BLOCK_N, keys.length, n, tl.arange(0, do.shape[1]), DV, BOXED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        _, ds, slope = score_gradients(
            s, dp, scoring, rows, key, keys.length, lse2, delta, is_partial(entry, walk) | CLEAN, CLEAN
        )
        if scoring.slopes is not None:
            dslope -= tl.sum(ds * tl.abs(rows.m - key).to(tl.float32), 1)
        if CLEAN:  # 0 times the NaN of a key that no row sees
            k = finite(k)
        dq = tl.dot((ds * slope).to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dslope


@triton.jit(do_not_specialize=["heads", "group", "tiles", "batch_heads", "together"])
def dq_kernel(
    q, k, v, do, minus_lse, minus_delta, q_boxes, do_boxes, k_boxes, v_boxes, dq, dslopes, lengths, interval, scoring, visit,
    softmax_scale, heads, group, tiles, batch_heads, together, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k with ds = p (dp - delta), dp = do v^T, p = exp(s - lse)."""
    rank, head = work_order(tl.program_id(0), tiles, batch_heads, together)
    i, h, b = tiles - 1 - rank, head % heads, head // heads
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    if i * BLOCK_M >= q_len:
        return
    rows = query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M)
    t = tl.arange(0, BLOCK_M)
    queries, upstream = matrix(q, q_boxes, b, h, q_start), matrix(do, do_boxes, b, h, q_start)
    q_tile = load_rows(queries, q.row, i * BLOCK_M, q_len, t, tl.arange(0, BLOCK_D), D, q_boxes is not None)
    do_tile = load_rows(upstream, do.row, i * BLOCK_M, q_len, t, tl.arange(0, BLOCK_DV), DV, do_boxes is not None)
    row_lse, row_delta = load_statistics(minus_lse, minus_delta, b, h, q_start, q_len, i, BLOCK_M)
    hkv = h // group
    BOXED: tl.constexpr = k_boxes is not None
    keys = Keys(matrix(k, k_boxes, b, hkv, k_start), matrix(v, v_boxes, b, hkv, k_start), k.row, v.row, k_len)
    lse2, delta = -row_lse[:, None] * scoring.factor, -row_delta[:, None]
    last = tl.minimum((i + 1) * BLOCK_M, q_len) - 1
    walk = key_tiles(rows, h, i, i * BLOCK_M, last, k_len, shift, interval, visit, BLOCK_N)
    acc, dslope = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc, dslope = dq_sweep(
        walk, visit, acc, dslope, q_tile, do_tile, keys, down(rows), scoring, lse2, delta, D, DV, BLOCK_N,
        PRECISION, BOXED, False,
    )  # fmt: skip
    if not_finite(acc) > 0:
        acc, dslope = dq_sweep(
            walk, visit, tl.zeros_like(acc), tl.zeros_like(dslope), q_tile, do_tile, keys, down(rows), scoring,
            lse2, delta, D, DV, BLOCK_N, PRECISION, BOXED, True,
        )  # fmt: skip
    if dq is not None:
        target = rows_at(dq, b, h, q_start)
        store_rows(target, dq.row, acc * softmax_scale, rows.index, tl.arange(0, BLOCK_D), rows.valid, D)
    if dslopes is not None:
        tl.store(dslopes + head * tiles + i, tl.sum(dslope, 0))


@triton.jit
def dkdv_sweep(
    walk, visit, dk_sum, dv_sum, dk, dv, k, v, q, do, q_boxes, do_boxes, minus_lse, minus_delta, row_keys, b, h, j, q_start,
    q_len, k_len, shift, interval, scoring, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    CLEAN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Row tiles of one head: dv += p^T do, dk += ds^T q. CLEAN: what sees no key, or is not seen, is kept out.

    TURNED: each key tile begins at row tiles of its own.
    """
    BLOCK_N: tl.constexpr = k.shape[0]
    BOXED: tl.constexpr = q_boxes is not None
    queries, upstream = matrix(q, q_boxes, b, h, q_start), matrix(do, do_boxes, b, h, q_start)
    key = (j * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    t = tl.arange(0, BLOCK_M)
    begin = None
    if TURNED:
        begin = walk.first + j * BLOCK_N // BLOCK_M % tl.maximum(walk.last - walk.first, 1)
    next_lse, next_delta = load_statistics(
        minus_lse, minus_delta, b, h, q_start, q_len, tile_of(entry_at(walk.first, walk, begin), walk, visit), BLOCK_M
    )
    for place in tl.range(walk.first, walk.last):
        entry = entry_at(place, walk, begin)
        i = tile_of(entry, walk, visit)
        rows = query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M, row_keys)
        row_lse, row_delta = next_lse, next_delta
        q_tile = load_rows(queries, q.row, i * BLOCK_M, q_len, t, tl.arange(0, k.shape[1]), D, BOXED)
        do_tile = load_rows(upstream, do.row, i * BLOCK_M, q_len, t, tl.arange(0, v.shape[1]), DV, BOXED)
        start, lse2 = score_start(scoring, row_lse[None, :])
        dp_start, delta = upstream_start(scoring, row_delta[None, :])
        s = product_from(start, k, q_tile, PRECISION)
        dp = s
        if dk is not None:
            dp = product_from(dp_start, v, do_tile, PRECISION)
        weight, ds, slope = score_gradients(
            s, dp, scoring, across(rows), key, k_len, lse2, delta, is_partial(entry, walk) | CLEAN, CLEAN
        )
        if CLEAN:  # 0 times the NaN of a row that does not see the key; where it does, ds is NaN
            q_tile, do_tile = finite(q_tile), weighed_rows(do_tile, weight)
        if dv is not None:
            dv_sum = tl.dot(weight.to(do_tile.dtype), do_tile, dv_sum, input_precision=PRECISION)
        if dk is not None:
            dk_sum = tl.dot((ds * slope).to(q_tile.dtype), q_tile, dk_sum, input_precision=PRECISION)
        # The next tile's products start from these: loaded there, they would be waited for.
        following = tile_of(entry_at(place + 1, walk, begin), walk, visit)
        next_lse, next_delta = load_statistics(minus_lse, minus_delta, b, h, q_start, q_len, following, BLOCK_M)
    return dk_sum, dv_sum


@triton.jit(do_not_specialize=["heads_kv", "group", "tiles", "batch_heads", "together"])
def dkdv_kernel(
    q, k, v, do, minus_lse, minus_delta, row_keys, k_boxes, v_boxes, q_boxes, do_boxes, dk, dv, lengths, interval, scoring,
    visit, softmax_scale, heads_kv, group, tiles, batch_heads, together, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """dv = p^T do, dk = scale ds^T q, summed over the query heads of the group in fp32."""
    j, head = work_order(tl.program_id(0), tiles, batch_heads, together)
    hkv, b = head % heads_kv, head // heads_kv
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    if j * BLOCK_N >= k_len:
        return
    n = tl.arange(0, BLOCK_N)
    key = j * BLOCK_N + n
    keys, values = matrix(k, k_boxes, b, hkv, k_start), matrix(v, v_boxes, b, hkv, k_start)
    k_tile = load_rows(keys, k.row, j * BLOCK_N, k_len, n, tl.arange(0, BLOCK_D), D, k_boxes is not None)
    v_tile = load_rows(values, v.row, j * BLOCK_N, k_len, n, tl.arange(0, BLOCK_DV), DV, v_boxes is not None)
    dk_sum, dv_sum = 0.0, 0.0  # of what is not asked for
    if dk is not None:
        dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if dv is not None:
        dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(hkv * group, (hkv + 1) * group):
        walk = row_tiles(j, b, h, q_len, k_len, shift, interval, visit, BLOCK_M, BLOCK_N)
        dk_sum, dv_sum = dkdv_sweep(
            walk, visit, dk_sum, dv_sum, dk, dv, k_tile, v_tile, q, do, q_boxes, do_boxes, minus_lse, minus_delta, row_keys,
            b, h, j, q_start, q_len, k_len, shift, interval, scoring, D, DV, BLOCK_M, PRECISION, False, TURNED,
        )  # fmt: skip
    broken = 0
    if dk is not None:
        broken += not_finite(dk_sum)
    if dv is not None:
        broken += not_finite(dv_sum)
    if broken > 0:
        dk_sum, dv_sum = dk_sum * 0.0, dv_sum * 0.0
        if dk is not None:
            dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if dv is not None:
            dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for h in range(hkv * group, (hkv + 1) * group):
            walk = row_tiles(j, b, h, q_len, k_len, shift, interval, visit, BLOCK_M, BLOCK_N)
            dk_sum, dv_sum = dkdv_sweep(
                walk, visit, dk_sum, dv_sum, dk, dv, k_tile, v_tile, q, do, q_boxes, do_boxes, minus_lse, minus_delta,
                row_keys, b, h, j, q_start, q_len, k_len, shift, interval, scoring, D, DV, BLOCK_M, PRECISION, True, TURNED,
            )  # fmt: skip
    valid = key < k_len
    if dk is not None:
        target = rows_at(dk, b, hkv, k_start)
        store_rows(target, dk.row, dk_sum * softmax_scale, key, tl.arange(0, BLOCK_D), valid, D)
    if dv is not None:
        store_rows(rows_at(dv, b, hkv, k_start), dv.row, dv_sum, key, tl.arange(0, BLOCK_DV), valid, DV)


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Lowered,
    needs: Needs, configs: tuple[Config, Config, Config] | None = None,
) -> Grads:  # fmt: skip
    """Run the backward kernels: shapes as in `forward`, `do` like o and `dlse` like lse, absent where they are zero."""
    by_rows, of_dk, of_dv = configs or backward_configs(q.shape[-1], v.shape[-1], q.dtype, q.device, *traits(call))
    do = torch.zeros_like(o) if do is None else do
    # Rows between packed sequences belong to no program.
    new = torch.zeros_like if call.varlen else torch.empty_like
    minus_lse, minus_delta = new(lse), new(lse)
    row_keys = None if call.bound.seed is None else new(lse, dtype=torch.int64)
    dq, dk, dv = (
        new(x, memory_format=torch.contiguous_format) if needed else None
        for x, needed in ((q, needs.dq), (k, needs.dk), (v, needs.dv))
    )
    row_tiles = cdiv(call.lengths.max_q, by_rows.block_m)
    dslopes = lse.new_zeros((call.B, call.H, row_tiles)) if needs.dslopes else None
    launch = _Launch(q, k, v, do, minus_lse, minus_delta, row_keys, call)
    if call.B * call.lengths.max_q:
        launch.statistics(o, lse, dlse)
        if needs.dq or needs.dslopes:
            launch.dq(dq, dslopes, by_rows)
    if call.B * call.lengths.max_k:
        if of_dk == of_dv and (needs.dk or needs.dv):
            launch.dkdv(dk, dv, of_dk)
        else:
            if needs.dk:
                launch.dkdv(dk, None, of_dk)
            if needs.dv:
                launch.dkdv(None, dv, of_dv)
    bias_gradient = None
    if needs.dbias:
        bias_gradient = dbias(launch.inputs(), call, launch.group, by_rows, launch.shape(by_rows), launch.key(by_rows))
    sinks = sink_gradient(call.sinks, lse, minus_delta) if needs.dsinks else None
    return Grads(dq, dk, dv, bias_gradient, None if dslopes is None else dslopes.sum(2), sinks)


@dataclass(frozen=True)
class _Launch:
    """The kernels of one backward call, each with what they share."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    minus_lse: Tensor
    minus_delta: Tensor
    row_keys: Tensor | None  # of dropout: each row's keys, which take longer to compute than to load
    call: Lowered

    def inputs(self) -> tuple:
        rows = (per_row(self.minus_lse), per_row(self.minus_delta))
        return (*map(strided, (self.q, self.k, self.v, self.do)), *rows)

    def _row_keys(self) -> Strided | None:
        return None if self.row_keys is None else per_row(self.row_keys)

    def shape(self, config: Config) -> tuple:
        D, DV = self.q.shape[-1], self.v.shape[-1]
        return D, DV, config.block_m, config.block_n, padded(D), padded(DV), precision(self.q.dtype)

    @property
    def group(self) -> int:
        return self.call.H // self.k.shape[-2]

    def key(self, config: Config | None, *rest: Hashable) -> tuple:
        return self.call.kind, layout_key(self.q, self.k, self.v, self.do), config, rest

    def statistics(self, o: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        call, DV = self.call, self.v.shape[-1]
        tiles = cdiv(call.lengths.max_q, STATISTICS_ROWS)
        args = (
            strided(o), strided(self.do), per_row(lse), None if dlse is None else per_row(dlse), per_row(self.minus_lse),
            per_row(self.minus_delta), self._row_keys(), call.lengths, call.scoring, call.H, tiles, DV, STATISTICS_ROWS,
            padded(DV),
        )  # fmt: skip
        key = self.key(None, layout_key(o, dlse))
        _statistics.start(statistics_kernel, key, tiles * call.H * call.B, args, {"num_warps": STATISTICS_WARPS})

    def dq(self, dq: Tensor | None, dslopes: Tensor | None, config: Config) -> None:
        call = self.call
        tiles, heads = cdiv(call.lengths.max_q, config.block_m), call.B * call.H
        constants = self.shape(config)
        args = (
            *self.inputs(), *owned(config, config.block_m, self.q, self.do),
            *streamed(config, config.block_n, self.k, self.v),
            None if dq is None else strided(dq), dslopes, call.lengths, call.interval, call.scoring,
            visit(call, config.block_m, config.block_n), call.bound.softmax_scale, call.H, self.group, tiles, heads,
            heads_together(call, call.lengths.max_k, self.k, self.v, self.group), *constants,
        )  # fmt: skip
        key = self.key(config, constants, dq is None, dslopes is None)
        _dq.start(dq_kernel, key, tiles * heads, args, options(config))

    def dkdv(self, dk: Tensor | None, dv: Tensor | None, config: Config) -> None:
        call, heads_kv = self.call, self.k.shape[-2]
        tiles, heads = cdiv(call.lengths.max_k, config.block_n), call.B * heads_kv
        constants = self.shape(config)
        args = (
            *self.inputs(), self._row_keys(), *owned(config, config.block_n, self.k, self.v),
            *streamed(config, config.block_m, self.q, self.do),
            *(None if x is None else strided(x) for x in (dk, dv)), call.lengths, call.interval,
            call.scoring, visit(call, config.block_m, config.block_n, transposed=True), call.bound.softmax_scale,
            heads_kv, self.group, tiles, heads,
            heads_together(call, call.lengths.max_q, self.q, self.do), *constants, config.turned,
        )  # fmt: skip
        key = self.key(config, constants, dk is None, dv is None)
        _dkdv.start(dkdv_kernel, key, tiles * heads, args, options(config))
