"""A consumer of the forward pass: one warpgroup that computes 64 rows of every tile (FlashAttention-3, algorithm 2).

It issues the scores of a key tile before the product of the previous tile's p with v, and exponentiates while the tensor
cores work on that. Consumers issue in turns, so that one computes products while another exponentiates.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from tilewise.backends.device.descriptors import tma_start
from tilewise.backends.device.softmax import LN2, finish_softmax
from tilewise.tiles import TileRange

from .forward_first import either, first_keys, first_tile
from .forward_producer import FIRST, K_LEN, LAST, LSE, Q_LEN, Q_START, ROW, ROWS, SHIFT, SPAN, WORDS, B, H, tile_range
from .forward_products import await_output, by_rows_of, no_sums, product_layout, start_output, start_scores
from .forward_scores import tile_scores
from .pipeline import Queue, Ring, all_written, await_turn, give_turn
from .registers import exp2_early, halves, joined, packed, rescale, row_tops, thread_sums, widened
from .versions import copy_out, thread_barrier


@aggregate
class Shared:
    """What producer and consumers share."""

    queue: Queue
    queries: Ring
    keys: Ring
    values: Ring
    out: gl.shared_memory_descriptor
    out_tails: gl.shared_memory_descriptor | gl.constexpr
    # Of each consumer whether there is something to `repair`; the producer's last item.
    noted: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queue, queries, keys, values, out, out_tails, noted):
        self.queue = queue
        self.queries = queries
        self.keys = keys
        self.values = values
        self.out = out
        self.out_tails = gl.constexpr(None) if out_tails is None else out_tails
        self.noted = noted


@gluon.constexpr_function
def begins_early(no_low, no_high, no_list, config):
    """Whether the first product of an item is issued before the output of the one before it is written.

    Not where output leaves through the place of those queries; nor where consumers let tiles of others pass in between:
    the output would have to wait for these. Of a list all consumers visit all.
    """
    lets_pass = no_list and not (no_low and (config.block_m <= config.block_n or no_high))
    return not (config.shares_out or lets_pass)


@gluon.jit
def begin(GROUP: gl.constexpr, shared, at, item, more, last, CFG: gl.constexpr):
    """Issue the first product of an item, q k^T of the key tile before `last`: (at, scores that are being computed).

    After the last item (not `more`) it is of what is left in shared memory, and for nothing.
    """
    keys = shared.keys
    copy = item * CFG.groups + GROUP
    if more:
        at = skip(GROUP, shared, at, shared.queue.word(item, LAST) - last, CFG)
        keys.wait(at)
        shared.queries.wait(copy)
    if either(CFG):
        return at, 0
    else:
        await_turn(GROUP)
        s = start_scores(shared.queries, copy, keys, at, first_keys(GROUP, CFG))
        give_turn((GROUP + 1) % CFG.groups)
        return at, s


@gluon.jit
def step(
    GROUP: gl.constexpr, shared, at, item, j, full_first, full_last, acc, tail, p, base, total, top, interval, visit,
    scoring, CFG: gl.constexpr,
):  # fmt: skip
    """Key tile j: s = q k^T, and acc += p v of the tile before; p = 2^(s - base), acc and total rescaled.

    `tail`: the last columns of acc, where values have tails.
    """
    DTYPE: gl.constexpr = shared.keys.tiles.dtype
    PARTS: gl.constexpr = 1 if shared.values.tails is None else 2
    PLAIN: gl.constexpr = visit is None and interval.left is None and interval.chunk is None and interval.low is None
    ALL: gl.constexpr = interval.right is None or CFG.aligned
    FULL: gl.constexpr = PLAIN and ALL and interval.prefix is None  # but for the last tile
    keys, values = shared.keys, shared.values
    copy = item * CFG.groups + GROUP
    keys.wait(at + 1)
    await_turn(GROUP)
    s = start_scores(shared.queries, copy, keys, at + 1, CFG.block_n)
    values.wait(at)
    acc, tail, operand, tail_operand = start_output(p, values, at, acc, tail)
    give_turn((GROUP + 1) % CFG.groups)
    s = warpgroup_mma_wait(PARTS, [s])
    keys.free(at + 1)
    masked = False if FULL else (j >= full_last) | (j < full_first)
    s = tile_scores(GROUP, s, j, masked, shared.queue, item, interval, visit, scoring, CFG)
    highest = row_tops(s) * scoring.factor
    top = gl.maximum(top, highest)
    grown = gl.where(highest > base + CFG.slack, highest, base)
    alpha = gl.exp2(base - grown)
    left, right = halves(s * scoring.factor - grown[:, None])
    if CFG.early:
        left = exp2_early(left)
    values.wait(at)  # it is there: without this the compiler waits for the product above, and nothing overlaps
    acc, tail = await_output(values, acc, tail, operand, tail_operand)
    values.free(at)
    acc = rescale(acc, by_rows_of(alpha, acc))
    if PARTS == 2:
        tail = rescale(tail, by_rows_of(alpha, tail))
    if not CFG.early:
        left = gl.exp2(left)
    weights = joined(left, gl.exp2(right), s)
    sums = thread_sums(weights)
    total = total * by_rows_of(alpha, sums)[:, None] + sums
    return acc, tail, packed(weights, DTYPE), grown, total, top


@gluon.jit
def sweep(
    GROUP: gl.constexpr, shared, at, item, j, first, full_first, full_last, acc, tail, p, base, total, top, interval,
    visit, scoring, CFG: gl.constexpr,
):  # fmt: skip
    """Key tiles j down to `first`."""
    while j >= first:
        acc, tail, p, base, total, top = step(
            GROUP, shared, at, item, j, full_first, full_last, acc, tail, p, base, total, top, interval, visit,
            scoring, CFG,
        )  # fmt: skip
        at += 1
        j -= 1
    return at, acc, tail, p, base, total, top


@gluon.jit
def first_step(
    GROUP: gl.constexpr, shared, at, item, j, first, full_first, full_last, acc, tail, p, base, total, top, interval,
    visit, scoring, CFG: gl.constexpr,
):  # fmt: skip
    """After half a tile: the next tile, if any, so that p is of a whole one."""
    if first_keys(GROUP, CFG) == CFG.block_n:
        return at, j, acc, tail, p, base, total, top
    else:
        BLOCK_N: gl.constexpr = CFG.block_n
        like = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
        base, top = by_rows_of(base, like), by_rows_of(top, like)
        total = gl.convert_layout(total, thread_sums(like).type.layout, assert_trivial=True)
        if j >= first:
            acc, tail, whole, base, total, top = step(
                GROUP, shared, at, item, j, full_first, full_last, acc, tail, p, base, total, top, interval,
                visit, scoring, CFG,
            )  # fmt: skip
            at += 1
            j -= 1
        else:
            whole = widened(p, like, shared.keys.tiles.dtype)
        return at, j, acc, tail, whole, base, total, top


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
def needed_tiles(GROUP: gl.constexpr, queue, item, interval, visit, BLOCK_N: gl.constexpr):
    """The tiles that this consumer's rows see."""
    if visit is not None or interval.low is not None:
        FROM: gl.constexpr = WORDS + SPAN * GROUP
        return TileRange(
            queue.word(item, FROM), queue.word(item, FROM + 1), queue.word(item, FROM + 2), queue.word(item, FROM + 3)
        )
    else:
        row = queue.word(item, ROW) + GROUP * ROWS
        end = gl.minimum(row + ROWS, queue.word(item, Q_LEN))
        return tile_range(interval, row, end, queue.word(item, SHIFT), queue.word(item, K_LEN), BLOCK_N)


@gluon.jit
def own_tiles(GROUP: gl.constexpr, queue, item, interval, visit, BLOCK_N: gl.constexpr):
    """(first, full_first, full_last, last) of this consumer, within those of all; one masked tile if it needs none."""
    span = needed_tiles(GROUP, queue, item, interval, visit, BLOCK_N)
    some = span.first < span.last
    lowest, highest = queue.word(item, FIRST) + 1, queue.word(item, LAST)
    last = gl.where(some, span.last, gl.minimum(gl.maximum(span.last, lowest), highest))
    first = gl.where(some, span.first, last - 1)
    return first, gl.where(some, span.full_first, first), gl.where(some, span.full_last, first), last


@gluon.jit
def finish(base, total, sinks, h):
    """(lse, what normalises the output) of each row."""
    sums = gl.convert_layout(gl.sum(total, 1), base.type.layout)
    if sinks is not None:
        return finish_softmax(base, sums, gl.load(sinks + h))
    else:
        return finish_softmax(base, sums, None)


@gluon.jit
def thread_faults(acc, row_lse):
    """NaN where what a thread holds of a row is not finite, though its lse is a number; else 0."""
    faults = thread_sums(acc * 0.0)
    known = by_rows_of(row_lse, faults)
    return gl.where((known == known)[:, None], faults, 0.0)


@gluon.jit
def hand_out(desc, out, acc, norm, b, h, start, length, row, column):
    """Have the copy engine write normalised sums."""
    out.reshape(acc.type.shape).store((acc * by_rows_of(norm, acc)[:, None]).to(out.dtype))
    fence_async_shared()
    thread_barrier()
    copy_out(desc, tma_start(desc, b, h, start, length, row, column), out)


@gluon.jit
def report(GROUP: gl.constexpr, faults, shared):
    """After the last item: tell `repair` whether there were faults, and have all of the output be there."""
    if gl.max(gl.max(gl.where(faults == 0.0, 0, 1), 1), 0) > 0:
        all_written()
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        shared.noted.index(GROUP).store(gl.full([1], 1, gl.int32, ONE))


@gluon.jit
def write(
    GROUP: gl.constexpr, o_desc, o_tail, lse, max_logit, sinks, shared, item, acc, tail, base, total, top,
    CFG: gl.constexpr,
):  # fmt: skip
    """Write o, through shared memory, lse and the largest score; be done with the item. Returns its `thread_faults`."""
    queue = shared.queue
    row_lse, norm = finish(base, total, sinks, queue.word(item, H))
    faults = thread_faults(acc, row_lse)
    if o_tail is not None:
        faults += gl.convert_layout(thread_faults(tail, row_lse), faults.type.layout, assert_trivial=True)
    copy = item * CFG.groups + GROUP
    LINE: gl.constexpr = row_lse.type.layout
    b, h, q_start, q_len = queue.word(item, B), queue.word(item, H), queue.word(item, Q_START), queue.word(item, Q_LEN)
    row = queue.word(item, ROW) + GROUP * ROWS
    hand_out(o_desc, shared.out.index(copy % shared.out.shape[0]), acc, norm, b, h, q_start, q_len, row, 0)
    if o_tail is not None:
        out = shared.out_tails.index(copy % shared.out.shape[0])
        hand_out(o_tail, out, tail, norm, b, h, q_start, q_len, row, acc.type.shape[1])
    index = gl.arange(0, ROWS, LINE)
    valid = row + index < q_len
    gl.store(lse + queue.word(item, LSE) + GROUP * ROWS + index, row_lse, mask=valid)
    if max_logit is not None:
        gl.atomic_max(max_logit + h, gl.max(gl.where(valid, top, float("-inf")), 0) * LN2)
    if CFG.shares_out:
        tma.store_wait(0)
        shared.queries.free(copy)
    queue.free(item)
    return faults


@gluon.jit
def await_item(GROUP: gl.constexpr, queue, item, interval, visit, CFG: gl.constexpr):
    """(whether there is such an item, first, full_first, full_last, last of the key tiles that this consumer visits)."""
    queue.wait(item)
    more = queue.word(item, ROW) >= 0
    first, full_first, full_last, last = own_tiles(GROUP, queue, item, interval, visit, CFG.block_n)
    return more, first, full_first, full_last, last


@gluon.jit
def consume(
    GROUP: gl.constexpr, o_desc, o_tail, lse, max_logit, interval, visit, scoring, sinks, shared, CFG: gl.constexpr
):  # fmt: skip
    """64 rows of every tile: o = softmax(scores(q k^T)) v."""
    NO_LOW: gl.constexpr = interval.left is None and interval.chunk is None and interval.low is None
    NO_HIGH: gl.constexpr = interval.right is None and interval.prefix is None
    EARLY: gl.constexpr = begins_early(NO_LOW, NO_HIGH, visit is None, CFG)
    queue, queries, values = shared.queue, shared.queries, shared.values
    if GROUP == CFG.groups - 1:
        give_turn(0)
    item = 0
    at = 0
    faults = thread_sums(no_sums(shared.out))
    more, first, full_first, full_last, last = await_item(GROUP, queue, item, interval, visit, CFG)
    at, s = begin(GROUP, shared, at, item, more, last, CFG)
    if not either(CFG):
        s = warpgroup_mma_wait(0, [s])
    while more:
        j = last - 1
        masked = True if CFG.aligned else (j >= full_last) | (j < full_first)
        p, base, total, top = first_tile(GROUP, s, masked, shared, at, item, j, interval, visit, scoring, CFG)
        acc, tail = no_sums(shared.out), no_sums(shared.out_tails)
        j -= 1
        at, j, acc, tail, whole, base, total, top = first_step(
            GROUP, shared, at, item, j, first, full_first, full_last, acc, tail, p, base, total, top, interval, visit,
            scoring, CFG,
        )  # fmt: skip
        at, acc, tail, whole, base, total, top = sweep(
            GROUP, shared, at, item, j, first, full_first, full_last, acc, tail, whole, base, total, top, interval, visit,
            scoring, CFG,
        )  # fmt: skip
        if not CFG.shares_out:
            queries.free(item * CFG.groups + GROUP)
        values.wait(at)
        acc, tail, operand, tail_operand = start_output(whole, values, at, acc, tail)
        if EARLY:
            # Between this product and the next one only what the next one needs; waits for what is there keep it so.
            more, first, full_first, full_last, last = await_item(GROUP, queue, item + 1, interval, visit, CFG)
            tma.store_wait(0)  # the output before this one has left its place in shared memory
            values.wait(at)
            acc, tail = await_output(values, acc, tail, operand, tail_operand)
            values.free(at)
            at, s = begin(GROUP, shared, at + 1, item + 1, more, last, CFG)
            queue.wait(item + 1)
            faults += write(
                GROUP, o_desc, o_tail, lse, max_logit, sinks, shared, item, acc, tail, base, total, top, CFG
            )
        else:
            tma.store_wait(0)
            acc, tail = await_output(values, acc, tail, operand, tail_operand)
            values.free(at)
            at = skip(GROUP, shared, at + 1, first - queue.word(item, FIRST), CFG)
            faults += write(
                GROUP, o_desc, o_tail, lse, max_logit, sinks, shared, item, acc, tail, base, total, top, CFG
            )
            more, first, full_first, full_last, last = await_item(GROUP, queue, item + 1, interval, visit, CFG)
            at, s = begin(GROUP, shared, at, item + 1, more, last, CFG)
        item += 1
        if not either(CFG):
            s = warpgroup_mma_wait(0, [s])
    tma.store_wait(0)
    report(GROUP, faults, shared)
    if GROUP == 0:
        await_turn(0)
