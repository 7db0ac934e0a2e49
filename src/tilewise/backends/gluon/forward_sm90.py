"""The forward pass on Hopper (FlashAttention-3, algorithms 1 and 2): a producer warp, two or three consumer warpgroups.

Programs stay and draw tiles of query rows from a counter. Each consumer owns 64 rows of a tile. It issues the scores of a
key tile before the product of the previous tile's p with v, and exponentiates while the tensor cores work on that; the
consumers issue in turns, so that one computes products while another exponentiates.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import Lowered, per_row, strided
from tilewise.backends.device.order import heads_together, multiprocessors
from tilewise.backends.device.rows import down
from tilewise.backends.device.scoremods import scores
from tilewise.backends.device.seqinfo import row_interval
from tilewise.backends.device.softmax import LN2, finish_softmax
from tilewise.backends.device.structs import Rows
from tilewise.tiles import cdiv

from .configs import ForwardConfig, forward_config, options, padded
from .descriptors import boxes
from .forward_producer import (
    FIRST,
    K_LEN,
    LAST,
    LSE,
    NOTE,
    Q_LEN,
    Q_START,
    ROW,
    ROWS,
    SHIFT,
    WORDS,
    B,
    H,
    produce,
    tile_range,
)
from .pipeline import Queue, Ring, await_turn, barriers_ready, give_turn, make_queue, make_ring, tma_start
from .registers import columns_from, exp2_early, halves, joined, keep_columns, packed, rescale, thread_sums, unpacked
from .repair import repair_noted

_launcher = Launcher()

LOWEST = gl.constexpr(-3.0e38)  # a finite start of the maximum: differences with it are never NaN
SLACK = gl.constexpr(8.0)  # p may grow to 2^8 before the sums are rescaled


@aggregate
class Shared:
    """What producer and consumers share."""

    queue: Queue
    queries: Ring
    keys: Ring
    values: Ring
    out: gl.shared_memory_descriptor
    noted: gl.shared_memory_descriptor  # 1 where some rows need `repair`

    @gluon.constexpr_function
    def __init__(self, queue, queries, keys, values, out, noted):
        self.queue = queue
        self.queries = queries
        self.keys = keys
        self.values = values
        self.out = out
        self.noted = noted


@gluon.constexpr_function
def product_layout(columns):
    """Where a warpgroup's products of 64 rows lie in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def has_low(interval):
    """Whether key tiles before the full ones may need masking: known at compile time."""
    return interval.left is not None or interval.chunk is not None


@gluon.jit
def has_high(interval):
    """Whether more than the last of the key tiles behind the full ones may need it."""
    return interval.right is not None or interval.prefix is not None or interval.chunk is not None


@gluon.jit
def tile_scores(GROUP: gl.constexpr, product, j, queue, item, interval, scoring, MASKED: gl.constexpr):
    """The scores of this consumer's rows and key tile j. What is told of the item stays in shared memory till here."""
    BLOCK_N: gl.constexpr = product.type.shape[1]
    b, k_len, shift = queue.word(item, B), queue.word(item, K_LEN), queue.word(item, SHIFT)
    index = queue.word(item, ROW) + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, product.type.layout))
    valid = index < queue.word(item, Q_LEN)
    lo, hi = row_interval(interval, b, index + shift, 0, valid, k_len)
    start = j * BLOCK_N
    rows = down(Rows(b, queue.word(item, H), index, index + shift, valid, lo, hi, index, index))
    s, _ = scores(product, scoring, rows, columns_from(start, product), k_len)
    if MASKED:
        if has_low(interval):  # noqa: SIM108  known at compile time, which a conditional expression does not see
            s = keep_columns(s, lo - start, hi - start)
        else:
            s = keep_columns(s, None, hi - start)
    return s


@gluon.jit
def first_tile(GROUP: gl.constexpr, shared, at, item, j, masked, q, interval, scoring, CFG: gl.constexpr):
    """(p, base, total, top) of key tile j alone."""
    BLOCK_N: gl.constexpr = CFG.block_n
    keys = shared.keys
    keys.wait(at)
    await_turn(GROUP)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
    s = warpgroup_mma(q, keys.tile(at).permute((1, 0)), zero, use_acc=False, is_async=True)
    give_turn((GROUP + 1) % CFG.groups)
    s = warpgroup_mma_wait(0, [s])
    keys.free(at)
    if masked:
        s = tile_scores(GROUP, s, j, shared.queue, item, interval, scoring, True)
    else:
        s = tile_scores(GROUP, s, j, shared.queue, item, interval, scoring, False)
    top = gl.max(s, 1) * scoring.factor
    base = gl.maximum(top, LOWEST)
    weights = gl.exp2(s * scoring.factor - base[:, None])
    return packed(weights, keys.tiles.dtype), base, thread_sums(weights), top


@gluon.jit
def sweep(
    GROUP: gl.constexpr, shared, at, item, j, end, q, acc, p, base, total, top, interval, scoring, CFG: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Key tiles j down to `end`: s = q k^T, and acc += p v of the tile before; p = 2^(s - base), acc and total rescaled."""
    BLOCK_N: gl.constexpr = CFG.block_n
    DTYPE: gl.constexpr = shared.keys.tiles.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    keys, values = shared.keys, shared.values
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
    while j >= end:
        keys.wait(at + 1)
        await_turn(GROUP)
        s = warpgroup_mma(q, keys.tile(at + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        values.wait(at)
        operand = unpacked(p, DTYPE, OPERAND)
        acc = warpgroup_mma(operand, values.tile(at), acc, is_async=True)
        give_turn((GROUP + 1) % CFG.groups)
        s = warpgroup_mma_wait(1, [s])
        keys.free(at + 1)
        s = tile_scores(GROUP, s, j, shared.queue, item, interval, scoring, MASKED)
        highest = gl.max(s, 1) * scoring.factor
        top = gl.maximum(top, highest)
        grown = gl.where(highest > base + SLACK, highest, base)
        alpha = gl.exp2(base - grown)
        left, right = halves(s * scoring.factor - grown[:, None])
        if CFG.early:
            left = exp2_early(left)
        values.wait(at)  # it is there: without this the compiler waits for the product above, and nothing overlaps
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        values.free(at)
        acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True))
        if not CFG.early:
            left = gl.exp2(left)
        weights = joined(left, gl.exp2(right), s)
        sums = thread_sums(weights)
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
        total = total * factor[:, None] + sums
        p = packed(weights, DTYPE)
        base = grown
        at += 1
        j -= 1
    return at, j, acc, p, base, total, top


@gluon.jit
def skip(GROUP: gl.constexpr, shared, at, number, CFG: gl.constexpr):
    """Let tiles pass that other consumers need."""
    for _ in range(number):
        shared.keys.wait(at)
        await_turn(GROUP)
        give_turn((GROUP + 1) % CFG.groups)
        shared.keys.free(at)
        shared.values.wait(at)
        shared.values.free(at)
        at += 1
    return at


@gluon.jit
def own_tiles(GROUP: gl.constexpr, queue, item, interval, BLOCK_N: gl.constexpr):
    """(first, full_first, full_last, last) of this consumer, within those of all; one masked tile if it needs none."""
    row = queue.word(item, ROW) + GROUP * ROWS
    end = gl.minimum(row + ROWS, queue.word(item, Q_LEN))
    span = tile_range(interval, row, end, queue.word(item, SHIFT), queue.word(item, K_LEN), BLOCK_N)
    some = span.first < span.last
    lowest, highest = queue.word(item, FIRST) + 1, queue.word(item, LAST)
    last = gl.where(some, span.last, gl.minimum(gl.maximum(span.last, lowest), highest))
    first = gl.where(some, span.first, last - 1)
    return first, gl.where(some, span.full_first, first), gl.where(some, span.full_last, first), last


@gluon.jit
def write(GROUP: gl.constexpr, o_desc, lse, record, shared, item, acc, norm, row_lse, top):
    """o = norm acc, lse and the largest score; rows whose o is not finite are noted, they need `repair`."""
    queue = shared.queue
    LINE: gl.constexpr = row_lse.type.layout
    b, h, q_start, q_len = queue.word(item, B), queue.word(item, H), queue.word(item, Q_START), queue.word(item, Q_LEN)
    row = queue.word(item, ROW) + GROUP * ROWS
    index = gl.arange(0, ROWS, LINE)
    broken = gl.convert_layout(gl.sum(acc * 0.0, 1), LINE, assert_trivial=True)  # NaN where acc is not finite
    whole = (broken == 0.0) | (row_lse != row_lse)
    seen = gl.where(row + index < q_len, top, float("-inf"))
    highest = gl.max(gl.where(whole, seen, float("inf")), 0)  # one maximum over the rows tells both
    if highest == float("inf"):
        highest = gl.max(seen, 0)
        gl.store((record + queue.word(item, NOTE) + GROUP).to(gl.pointer_type(gl.int32)), gl.program_id(0))
        shared.noted.store(gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    else:
        out = shared.out.index(GROUP)
        factor = gl.convert_layout(norm, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
        out.reshape(acc.type.shape).store((acc * factor[:, None]).to(out.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(o_desc, tma_start(o_desc, b, h, q_start, q_len, row), out)
    gl.store(lse + queue.word(item, LSE) + GROUP * ROWS + index, row_lse, mask=row + index < q_len)
    gl.atomic_max(record + h, highest * LN2)


@gluon.jit
def consume(
    GROUP: gl.constexpr, o_desc, lse, record, interval, scoring, sinks, shared, CFG: gl.constexpr
):  # fmt: skip
    """64 rows of every tile: o = softmax(scores(q k^T)) v."""
    BLOCK_DV: gl.constexpr = shared.out.shape[len(shared.out.shape) - 1]
    O_LAYOUT: gl.constexpr = product_layout(BLOCK_DV)
    LINE: gl.constexpr = gl.SliceLayout(1, product_layout(CFG.block_n))
    queue, queries, values = shared.queue, shared.queries, shared.values
    q = queries.tile(GROUP)
    if GROUP == CFG.groups - 1:
        give_turn(0)
    item = 0
    at = 0
    queue.wait(item)
    while queue.word(item, ROW) >= 0:
        first, full_first, full_last, last = own_tiles(GROUP, queue, item, interval, CFG.block_n)
        at = skip(GROUP, shared, at, queue.word(item, LAST) - last, CFG)
        queries.wait(item * CFG.groups + GROUP)
        j = last - 1
        masked = (j >= full_last) | (j < full_first)
        p, base, total, top = first_tile(GROUP, shared, at, item, j, masked, q, interval, scoring, CFG)
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, O_LAYOUT)
        j -= 1
        if has_high(interval):
            at, j, acc, p, base, total, top = sweep(
                GROUP, shared, at, item, j, full_last, q, acc, p, base, total, top, interval, scoring, CFG, True
            )
        at, j, acc, p, base, total, top = sweep(
            GROUP, shared, at, item, j, full_first, q, acc, p, base, total, top, interval, scoring, CFG, False
        )
        if has_low(interval):
            at, j, acc, p, base, total, top = sweep(
                GROUP, shared, at, item, j, first, q, acc, p, base, total, top, interval, scoring, CFG, True
            )
        if not CFG.shares_out:
            queries.free(item * CFG.groups + GROUP)
        values.wait(at)
        operand = unpacked(p, values.tiles.dtype, gl.DotOperandLayout(0, O_LAYOUT, 2))
        acc = warpgroup_mma(operand, values.tile(at), acc, is_async=True)
        sums = gl.convert_layout(gl.sum(total, 1), LINE)
        if sinks is not None:
            row_lse, norm = finish_softmax(base, sums, gl.load(sinks + queue.word(item, H)))
        else:
            row_lse, norm = finish_softmax(base, sums, None)
        tma.store_wait(0)  # the output before this one has left its place in shared memory
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        values.free(at)
        at = skip(GROUP, shared, at + 1, first - queue.word(item, FIRST), CFG)
        write(GROUP, o_desc, lse, record, shared, item, acc, norm, row_lse, top)
        if CFG.shares_out:
            tma.store_wait(0)
            queries.free(item * CFG.groups + GROUP)
        queue.free(item)
        item += 1
        queue.wait(item)
    tma.store_wait(0)
    if GROUP == 0:
        await_turn(0)


@gluon.jit(do_not_specialize=["heads", "group", "tiles", "together", "all_heads", "D", "DV"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q, k, v, o, lse, record, lengths, interval, scoring, sinks, heads, group, tiles, together,
    all_heads, D, DV, CFG: gl.constexpr,
):  # fmt: skip
    """o = softmax(scores(q k^T)) v, lse = log sum exp(scores).

    `record` begins as -inf: the largest score of each head, the counter from which programs draw their work, and for each
    row tile and consumer the number of the program that has to repair it.
    """
    GROUPS: gl.constexpr = CFG.groups
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    queries = make_ring(q_desc, GROUPS, 1)
    keys = make_ring(k_desc, CFG.stages, GROUPS)
    values = make_ring(v_desc, CFG.stages, GROUPS)
    if CFG.shares_out:
        out = queries.tiles
    else:
        out = gl.allocate_shared_memory(o_desc.dtype, [GROUPS] + o_desc.block_type.shape, o_desc.layout)  # noqa: RUF005
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    noted = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    noted.store(gl.full([1], 0, gl.int32, ONE))
    shared = Shared(make_queue(WORDS, GROUPS), queries, keys, values, out, noted)
    barriers_ready()
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, o_desc, lse.data, record, interval, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, lse.data, record, interval, scoring, sinks, shared, CFG)),
            (produce, (q_desc, k_desc, v_desc, lse, record, lengths, interval, shared, heads, group, tiles, together,
                       all_heads, CFG)),
        ], [4, 1], [CFG.registers, CFG.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, o_desc, lse.data, record, interval, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, lse.data, record, interval, scoring, sinks, shared, CFG)),
            (consume, (2, o_desc, lse.data, record, interval, scoring, sinks, shared, CFG)),
            (produce, (q_desc, k_desc, v_desc, lse, record, lengths, interval, shared, heads, group, tiles, together,
                       all_heads, CFG)),
        ], [4, 4, 1], [CFG.registers, CFG.registers, CFG.producer_registers])  # fmt: skip
    if gl.max(noted.load(ONE), 0) > 0:
        repair_noted(
            q, k, v, o, lse, record, lengths, interval, scoring, heads, group, tiles, together, all_heads, D, DV,
            q_desc.block_type.shape[RANK - 1], v_desc.block_type.shape[RANK - 1], GROUPS,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Lowered, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        q, k, v: (B, S, H, D) or packed (total, H, D), as `descriptors.as_boxes` makes them; q, k share D, v has its own.
        call: the lowered call.
        config: the measured one where None.

    Returns:
        o, lse (natural logarithm), max_logit (H,): the largest visible score of each head; (0,) where not asked for.
    """
    D, DV, G = q.shape[-1], v.shape[-1], call.H // k.shape[-2]
    config = config or forward_config(D, DV)
    o = q.new_empty((*q.shape[:-1], DV))
    lse = q.new_empty(call.lse_shape, dtype=torch.float32)
    if call.varlen:  # rows between sequences belong to no program
        o.zero_()
        lse.fill_(-float("inf"))
    tiles = cdiv(call.lengths.max_q, config.block_m)
    items = tiles * call.B * call.H
    record = torch.full((call.H + 1 + items * config.groups,), -float("inf"), device=q.device)
    descriptors = (
        boxes(q, ROWS.value, padded(D)),
        boxes(k, config.block_n, padded(D)),
        boxes(v, config.block_n, padded(DV)),
        boxes(o, ROWS.value, padded(DV)),
    )
    args = (
        *descriptors, strided(q), strided(k), strided(v), strided(o), per_row(lse), record, call.lengths, call.interval,
        call.scoring, call.sinks, call.H, G, tiles, heads_together(call, call.lengths.max_k, k, v, G),
        call.B * call.H, D, DV, config,
    )  # fmt: skip
    key = (call.kind, layout_key(q, k, v), config)
    _launcher.start(forward_kernel, key, min(items, multiprocessors(q.device)), args, options(config))
    return o, lse, record[: call.H if call.bound.spec.max_logit else 0]
