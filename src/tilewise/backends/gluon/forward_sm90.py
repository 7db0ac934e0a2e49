"""The forward pass on Hopper (FlashAttention-3, algorithms 1 and 2): a producer warp, two or three consumer warpgroups.

Programs stay and draw tiles of query rows from a counter. Each consumer owns 64 rows of a tile. It issues the scores of a
key tile before the product of the previous tile's p with v, and exponentiates while the tensor cores work on that; the
consumers issue in turns, so that one computes products while another exponentiates.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from tilewise.backends.device.portable import kv_tile_range
from tilewise.backends.device.rows import down
from tilewise.backends.device.scoremods import scores
from tilewise.backends.device.seqinfo import row_interval, rows_at, sequence
from tilewise.backends.device.softmax import LN2, finish_softmax
from tilewise.backends.device.structs import Rows

from .pipeline import Queue, Ring, await_turn, barriers_ready, draw, give_turn, make_queue, make_ring, tma_start
from .registers import exp2_early, halves, joined, packed, rescale, thread_sums, unpacked

ROWS = gl.constexpr(64)  # of one consumer: those of one warpgroup's products
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

    @gluon.constexpr_function
    def __init__(self, queue, queries, keys, values, out):
        self.queue = queue
        self.queries = queries
        self.keys = keys
        self.values = values
        self.out = out


@gluon.jit
def tile_range(interval, row, end, shift, k_len, BLOCK_N: gl.constexpr):
    """The key tiles of rows [row, end): no bound ever decreases from row to row, so the first and the last say all."""
    lo_min, hi_min = row_interval(interval, 0, row + shift, 0, row < end, k_len)
    lo_max, hi_max = row_interval(interval, 0, gl.maximum(end - 1, row) + shift, 0, row < end, k_len)
    return kv_tile_range(lo_min, lo_max, hi_min, hi_max, BLOCK_N)


@gluon.jit
def work(place, tiles, heads, together, all_heads):
    """(row tile, b, h) of a work item: in groups of `together` heads, whose keys fit in the L2 cache, the last rows first."""
    begin = place // (together * tiles) * together
    within = place - begin * tiles
    count = gl.minimum(together, all_heads - begin)
    head = begin + within % count
    return tiles - 1 - within // count, head // heads, head % heads


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, counter, lengths, interval, shared, heads, group, tiles, together, all_heads, CFG: gl.constexpr
):  # fmt: skip
    """Find out what is to do, and start the copies: queries, then keys and values, the last tile first."""
    GROUPS: gl.constexpr = CFG.groups
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = CFG.block_n
    place = gl.program_id(0)
    item = 0
    at = 0
    while place < tiles * all_heads:
        i, b, h = work(place, tiles, heads, together, all_heads)
        q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
        row = i * BLOCK_M
        if row < q_len:
            span = tile_range(interval, row, gl.minimum(row + BLOCK_M, q_len), shift, k_len, BLOCK_N)
            first = span.first
            last = gl.maximum(span.last, first + 1)  # consumers count on one tile, be it masked
            shared.queue.put(item, (row, b, h, q_start, q_len, k_len, shift, first, last))
            for g in gl.static_range(GROUPS):
                shared.queries.fill(
                    item * GROUPS + g, q_desc, tma_start(q_desc, b, h, q_start, q_len, row + g * ROWS)
                )
            for n in range(last - first):
                key = (last - 1 - n) * BLOCK_N
                shared.keys.fill(at, k_desc, tma_start(k_desc, b, h // group, k_start, k_len, key))
                shared.values.fill(at, v_desc, tma_start(v_desc, b, h // group, k_start, k_len, key))
                at += 1
            item += 1
        place = draw(counter)
    shared.queue.put(item, (-1, 0, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def rows_of(interval, b, h, row, q_len, k_len, shift, LAYOUT: gl.constexpr):
    """The query rows of a consumer."""
    index = row + gl.arange(0, ROWS, LAYOUT)
    valid = index < q_len
    lo, hi = row_interval(interval, b, index + shift, 0, valid, k_len)
    return down(Rows(b, h, index, index + shift, valid, lo, hi, index, index))


@gluon.jit
def tile_scores(product, interval, scoring, b, h, row, q_len, k_len, shift, j, MASKED: gl.constexpr):
    """The scores of this consumer's rows and key tile j."""
    BLOCK_N: gl.constexpr = product.type.shape[1]
    rows = rows_of(interval, b, h, row, q_len, k_len, shift, gl.SliceLayout(1, product.type.layout))
    key = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, product.type.layout))
    s, _ = scores(product, scoring, rows, key[None, :], k_len, MASKED)
    return s


@gluon.jit
def sweep_step(
    GROUP: gl.constexpr, shared, at, q, acc, p, base, total, top, zero, interval, scoring, b, h, row, q_len, k_len, shift, j,
    CFG: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Key tile j: s = q k^T, and acc += p v of the tile before it; then p = 2^(s - base), acc and total rescaled."""
    DTYPE: gl.constexpr = shared.keys.tiles.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    keys, values = shared.keys, shared.values
    keys.wait(at + 1)
    await_turn(GROUP)
    s = warpgroup_mma(q, keys.tile(at + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    values.wait(at)
    operand = unpacked(p, DTYPE, OPERAND)
    acc = warpgroup_mma(operand, values.tile(at), acc, is_async=True)
    give_turn((GROUP + 1) % CFG.groups)
    s = warpgroup_mma_wait(1, [s])
    keys.free(at + 1)
    s = tile_scores(s, interval, scoring, b, h, row, q_len, k_len, shift, j, MASKED)
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
    return acc, packed(weights, DTYPE), grown, total * factor[:, None] + sums, top


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
def own_tiles(interval, row, q_len, shift, k_len, first, last, BLOCK_N: gl.constexpr):
    """(first, full_first, full_last, last) of this consumer, within those of all; one masked tile if it needs none."""
    span = tile_range(interval, row, gl.minimum(row + ROWS, q_len), shift, k_len, BLOCK_N)
    some = span.first < span.last
    own_last = gl.where(some, span.last, gl.minimum(gl.maximum(span.last, first + 1), last))
    own_first = gl.where(some, span.first, own_last - 1)
    full_first = gl.where(some, span.full_first, own_first)
    return own_first, full_first, gl.where(some, span.full_last, own_first), own_last


@gluon.jit
def consume(
    GROUP: gl.constexpr, o_desc, lse, max_logit, interval, scoring, sinks, shared, CFG: gl.constexpr
):  # fmt: skip
    """64 rows of every tile: o = softmax(scores(q k^T)) v."""
    DTYPE: gl.constexpr = shared.keys.tiles.dtype
    BLOCK_N: gl.constexpr = CFG.block_n
    BLOCK_DV: gl.constexpr = shared.out.shape[len(shared.out.shape) - 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    queue, queries, keys, values = shared.queue, shared.queries, shared.keys, shared.values
    q = queries.tile(GROUP)
    out = shared.out.index(GROUP)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if GROUP == CFG.groups - 1:
        give_turn(0)
    item = 0
    at = 0
    queue.wait(item)
    row = queue.word(item, 0)
    while row >= 0:
        row += GROUP * ROWS
        b, h, q_start, q_len = queue.word(item, 1), queue.word(item, 2), queue.word(item, 3), queue.word(item, 4)
        k_len, shift, first, last = queue.word(item, 5), queue.word(item, 6), queue.word(item, 7), queue.word(item, 8)
        queue.free(item)
        own_first, full_first, full_last, own_last = own_tiles(
            interval, row, q_len, shift, k_len, first, last, BLOCK_N
        )
        at = skip(GROUP, shared, at, last - own_last, CFG)
        queries.wait(item * CFG.groups + GROUP)
        keys.wait(at)
        await_turn(GROUP)
        s = warpgroup_mma(q, keys.tile(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        give_turn((GROUP + 1) % CFG.groups)
        s = warpgroup_mma_wait(0, [s])
        keys.free(at)
        j = own_last - 1
        if own_last > full_last:
            s = tile_scores(s, interval, scoring, b, h, row, q_len, k_len, shift, j, True)
        else:
            s = tile_scores(s, interval, scoring, b, h, row, q_len, k_len, shift, j, False)
        top = gl.max(s, 1) * scoring.factor
        base = gl.maximum(top, LOWEST)
        weights = gl.exp2(s * scoring.factor - base[:, None])
        total = thread_sums(weights)
        p = packed(weights, DTYPE)
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, O_LAYOUT)
        j -= 1
        while j >= full_last:
            acc, p, base, total, top = sweep_step(
                GROUP, shared, at, q, acc, p, base, total, top, zero, interval, scoring, b, h, row, q_len, k_len, shift, j,
                CFG, True,
            )  # fmt: skip
            at += 1
            j -= 1
        while j >= full_first:
            acc, p, base, total, top = sweep_step(
                GROUP, shared, at, q, acc, p, base, total, top, zero, interval, scoring, b, h, row, q_len, k_len, shift, j,
                CFG, False,
            )  # fmt: skip
            at += 1
            j -= 1
        while j >= own_first:
            acc, p, base, total, top = sweep_step(
                GROUP, shared, at, q, acc, p, base, total, top, zero, interval, scoring, b, h, row, q_len, k_len, shift, j,
                CFG, True,
            )  # fmt: skip
            at += 1
            j -= 1
        if not CFG.shares_out:
            queries.free(item * CFG.groups + GROUP)
        values.wait(at)
        operand = unpacked(p, DTYPE, OPERAND)
        acc = warpgroup_mma(operand, values.tile(at), acc, is_async=True)
        sums = gl.convert_layout(gl.sum(total, 1), ROW)
        if sinks is not None:
            row_lse, norm = finish_softmax(base, sums, gl.load(sinks + h))
        else:
            row_lse, norm = finish_softmax(base, sums, None)
        norm = gl.convert_layout(norm, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        queue.wait(item + 1)
        following = queue.word(item + 1, 0)
        tma.store_wait(0)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        values.free(at)
        at = skip(GROUP, shared, at + 1, own_first - first, CFG)
        out.reshape([ROWS, BLOCK_DV]).store((acc * norm[:, None]).to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(o_desc, tma_start(o_desc, b, h, q_start, q_len, row), out)
        index = row + gl.arange(0, ROWS, ROW)
        gl.store(rows_at(lse, b, h, q_start) + index, row_lse, mask=index < q_len)
        gl.atomic_max(max_logit + h, gl.max(gl.where(index < q_len, top, float("-inf")), 0) * LN2)
        if CFG.shares_out:
            tma.store_wait(0)
            queries.free(item * CFG.groups + GROUP)
        item += 1
        row = following
    tma.store_wait(0)
    if GROUP == 0:
        await_turn(0)


@gluon.jit(do_not_specialize=["heads", "group", "tiles", "together", "all_heads"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, max_logit, lengths, interval, scoring, sinks, heads, group, tiles, together,
    all_heads, CFG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """o = softmax(scores(q k^T)) v, lse = log sum exp(scores), max_logit = max(scores); behind max_logit the counter."""
    queries = make_ring(q_desc, CFG.groups, 1)
    keys = make_ring(k_desc, CFG.stages, CFG.groups)
    values = make_ring(v_desc, CFG.stages, CFG.groups)
    if CFG.shares_out:
        out = queries.tiles
    else:
        out = gl.allocate_shared_memory(o_desc.dtype, [CFG.groups] + o_desc.block_type.shape, o_desc.layout)
    shared = Shared(make_queue(9, CFG.groups), queries, keys, values, out)
    barriers_ready()
    counter = (max_logit + heads).to(gl.pointer_type(gl.int32))
    if CFG.groups == 2:
        gl.warp_specialize([
            (consume, (0, o_desc, lse, max_logit, interval, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, lse, max_logit, interval, scoring, sinks, shared, CFG)),
            (produce, (q_desc, k_desc, v_desc, counter, lengths, interval, shared, heads, group, tiles, together, all_heads,
                       CFG)),
        ], [4, 1], [CFG.registers, CFG.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, o_desc, lse, max_logit, interval, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, lse, max_logit, interval, scoring, sinks, shared, CFG)),
            (consume, (2, o_desc, lse, max_logit, interval, scoring, sinks, shared, CFG)),
            (produce, (q_desc, k_desc, v_desc, counter, lengths, interval, shared, heads, group, tiles, together, all_heads,
                       CFG)),
        ], [4, 4, 1], [CFG.registers, CFG.registers, CFG.producer_registers])  # fmt: skip
