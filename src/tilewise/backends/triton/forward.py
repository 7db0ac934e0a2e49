"""The forward pass (FlashAttention-2, algorithm 1): one program per tile of query rows walks the key tiles it sees."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import Lowered, per_row, strided, visit
from tilewise.backends.device.order import heads_together
from tilewise.backends.device.portable import work_order
from tilewise.backends.device.rows import down, is_partial, key_tiles, query_rows, row_offsets, tile_of
from tilewise.backends.device.scoremods import drop, hide, scores
from tilewise.backends.device.seqinfo import load_rows, matrix, not_finite, rows_at, sequence, store_rows
from tilewise.backends.device.softmax import LN2, finish_softmax, update_softmax
from tilewise.backends.device.structs import Keys
from tilewise.tiles import cdiv

from .configs import Config, forward_config, options, owned, padded, precision, streamed, traits

SUMS = tl.constexpr(8)  # of a row, see `update_softmax`: matrix units deal out the keys of a row in eights
_launcher = Launcher()


@triton.jit
def forward_sweep(
    walk, visit, acc, q, keys, rows, scoring, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Key tiles: s = q k^T, p = 2^(s - max), acc = alpha acc + p v; returns acc, max and sum p of each row."""
    n = tl.arange(0, BLOCK_N)
    top = tl.full([q.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([q.shape[0], SUMS], tl.float32)
    for entry in tl.range(walk.first, walk.last):
        j = tile_of(entry, walk, visit)
        key = (j * BLOCK_N + n)[None, :]
        k = load_rows(keys.k, keys.k_row, j * BLOCK_N, keys.length, n, tl.arange(0, q.shape[1]), D, BOXED)
        s, _ = scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scoring, rows, key, keys.length)
        if is_partial(entry, walk):
            s = hide(s, scoring, rows, key, keys.length)
        p, top, total, alpha = update_softmax(s, top, total, scoring.factor)
        if scoring.seed is not None:
            p = drop(p, scoring, rows, key)
        v = load_rows(keys.v, keys.v_row, j * BLOCK_N, keys.length, n, tl.arange(0, acc.shape[1]), DV, BOXED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, top, tl.sum(total, 1)


@triton.jit
def repair_rows(
    o, offset, v_base, walk, visit, q, keys, rows, scoring, top, norm, scale, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Write the rows' outputs again, at o + offset, with every value taken only by the rows that see it.

    In a product p v an Inf or NaN in v reaches rows with p = 0, too. Where outputs are not finite, this slow pass
    multiplies finite values only, and counts the others for the rows that see them. p is that of the sweep, off the same
    `top`, times `norm`: 2^(s - lse) would be wrong by the roundings of lse, which grow with the scores.
    """
    n = tl.arange(0, BLOCK_N)
    shift = tl.where(top == -float("inf"), 0.0, top)  # of a row that has seen no key
    for c in tl.range(0, DV, COLUMNS, num_stages=1):
        column = c + tl.arange(0, COLUMNS)
        acc = tl.zeros([q.shape[0], COLUMNS], tl.float32)
        above, below = acc, acc
        for entry in tl.range(walk.first, walk.last, num_stages=1):
            j = tile_of(entry, walk, visit)
            key = (j * BLOCK_N + n)[None, :]
            k = load_rows(keys.k, keys.k_row, j * BLOCK_N, keys.length, n, tl.arange(0, q.shape[1]), D, BOXED)
            s, _ = scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scoring, rows, key, keys.length)
            s = hide(s, scoring, rows, key, keys.length)
            p = tl.math.exp2(s * scoring.factor - shift[:, None]) * norm[:, None]
            if scoring.seed is not None:
                p = drop(p, scoring, rows, key)
            v = load_rows(v_base, keys.v_row, j * BLOCK_N, keys.length, n, column, DV, False)
            finite = v.to(tl.float32) * 0.0 == 0.0
            seen = tl.where(s == -float("inf"), 0.0, 1.0).to(v.dtype)
            acc = tl.dot(p.to(v.dtype), tl.where(finite, v, 0.0).to(v.dtype), acc, input_precision=PRECISION)
            above = tl.dot(seen, tl.where(finite | (v < 0), 0.0, 1.0).to(v.dtype), above, input_precision=PRECISION)
            below = tl.dot(seen, tl.where(finite | (v > 0), 0.0, 1.0).to(v.dtype), below, input_precision=PRECISION)
        acc += tl.where(above > 0, float("inf"), 0.0) + tl.where(below > 0, -float("inf"), 0.0)
        store_rows(o, 1, acc * scale, offset, column, tl.reshape(rows.valid, [q.shape[0]]), DV)


@triton.jit
def write_rows(o, lse, sinks, acc, top, total, rows, q_start, scoring, DV: tl.constexpr):
    """From sums over the keys to o and lse; returns o, and its two factors: what normalises it, what dropout leaves to do."""
    if sinks is not None:
        row_lse, norm = finish_softmax(top, total, tl.load(sinks + rows.h))
    else:
        row_lse, norm = finish_softmax(top, total, None)
    scale = 1.0
    if scoring.seed is not None:
        scale = scoring.drop_scale
    tl.store(rows_at(lse, rows.b, rows.h, q_start) + rows.index, row_lse, mask=rows.valid)
    acc = acc * (norm * scale)[:, None]
    column = tl.arange(0, acc.shape[1])
    store_rows(rows_at(o, rows.b, 0, q_start), 1, acc, row_offsets(o, rows), column, rows.valid, DV)
    return acc, norm, scale


@triton.jit(do_not_specialize=["heads", "group", "tiles", "batch_heads", "together"])
def forward_kernel(
    q, k, v, q_boxes, k_boxes, v_boxes, o, lse, max_logit, lengths, interval, scoring, visit, sinks, heads, group, tiles,
    batch_heads, together, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = softmax(scores(q k^T)) v, lse = log sum exp(scores), max_logit = max(scores)."""
    rank, head = work_order(tl.program_id(0), tiles, batch_heads, together)
    i, h, b = tiles - 1 - rank, head % heads, head // heads  # under a causal mask the last tiles are the longest
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    if i * BLOCK_M >= q_len:
        return
    rows = query_rows(i, b, h, q_start, q_len, k_len, shift, interval, scoring, BLOCK_M)
    t = tl.arange(0, BLOCK_M)
    queries = matrix(q, q_boxes, b, h, q_start)
    q_tile = load_rows(queries, q.row, i * BLOCK_M, q_len, t, tl.arange(0, BLOCK_D), D, q_boxes is not None)
    hkv = h // group
    BOXED: tl.constexpr = k_boxes is not None
    keys = Keys(matrix(k, k_boxes, b, hkv, k_start), matrix(v, v_boxes, b, hkv, k_start), k.row, v.row, k_len)
    last = tl.minimum((i + 1) * BLOCK_M, q_len) - 1
    walk = key_tiles(rows, h, i, i * BLOCK_M, last, k_len, shift, interval, visit, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, top, total = forward_sweep(
        walk, visit, acc, q_tile, keys, down(rows), scoring, D, DV, BLOCK_N, PRECISION, BOXED
    )
    if max_logit is not None:
        highest = tl.max(tl.where(rows.valid, top, -float("inf")), 0) * LN2
        tl.atomic_max(max_logit + h, highest)
    acc, norm, scale = write_rows(o, lse, sinks, acc, top, total, rows, q_start, scoring, DV)
    if not_finite(acc) > 0:
        repair_rows(
            rows_at(o, b, 0, q_start), row_offsets(o, rows), rows_at(v, b, hkv, k_start), walk, visit, q_tile, keys,
            down(rows), scoring, top, norm, scale, D, DV, BLOCK_N, min(32, BLOCK_DV), PRECISION, BOXED,
        )  # fmt: skip


def new_outputs(q: Tensor, v: Tensor, call: Lowered) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse and max_logit, to be written by kernels; what these leave out is there already."""
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(call.lse_shape, dtype=torch.float32)
    if call.varlen:  # rows between sequences belong to no program
        o.zero_()
        lse.fill_(-float("inf"))
    asked = call.bound.spec.max_logit
    return o, lse, lse.new_full((call.H,), -float("inf")) if asked else lse.new_empty(0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Lowered, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        q, k, v: (B, S, H, D) or packed (total, H, D), any strides but a dense last dim; q, k share D, v has its own.
        call: the lowered call.
        config: tile sizes; the measured ones where None.

    Returns:
        o, lse (natural logarithm), max_logit (H,): the largest visible score of each head; (0,) where not asked for.
    """
    D, DV = q.shape[-1], v.shape[-1]
    config = config or forward_config(D, DV, q.dtype, q.device, *traits(call))
    o, lse, max_logit = new_outputs(q, v, call)
    tiles, heads, group = cdiv(call.lengths.max_q, config.block_m), call.B * call.H, call.H // k.shape[-2]
    if tiles * call.B == 0:
        return o, lse, max_logit
    listed = visit(call, config.block_m, config.block_n)
    constants = D, DV, config.block_m, config.block_n, padded(D), padded(DV), precision(q.dtype)
    args = (
        strided(q), strided(k), strided(v), *owned(config, config.block_m, q),
        *streamed(config, config.block_n, k, v), strided(o),
        per_row(lse), max_logit if len(max_logit) else None, call.lengths,
        call.interval, call.scoring, listed, call.sinks, call.H, group, tiles, heads,
        heads_together(call, call.lengths.max_k, k, v, group), *constants,
    )  # fmt: skip
    key = (call.kind, layout_key(q, k, v), constants, config)
    _launcher.start(forward_kernel, key, tiles * heads, args, options(config))
    return o, lse, max_logit
