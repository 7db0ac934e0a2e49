"""The first key tile of an item of a consumer: with the diagonal, of which rows may see no more than the left half."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .forward_producer import ROW, ROWS, SHIFT
from .forward_products import by_rows_of, product_layout, start_scores
from .forward_scores import tile_scores
from .pipeline import await_turn, give_turn
from .registers import packed, row_tops, thread_sums, widened

LOWEST = gl.constexpr(-3.0e38)  # a finite start of the maximum: differences with it are never NaN


@gluon.constexpr_function
def either(config):
    """Whether it depends on the item if a consumer sees more than half of its first tile."""
    return config.halves and config.groups > 2


@gluon.constexpr_function
def first_keys(group, config):
    """Keys that a consumer looks at in the first tile of an item: with `halves` the first one sees no more than half of it."""
    return config.block_n // 2 if config.halves and config.groups == 2 and group == 0 else config.block_n


@gluon.jit
def first_weights(s, scoring, DTYPE: gl.constexpr):
    """(p, base, total, top) of the scores of one tile alone."""
    top = row_tops(s) * scoring.factor
    base = gl.maximum(top, LOWEST)
    weights = gl.exp2(s * scoring.factor - base[:, None])
    return packed(weights, DTYPE), base, thread_sums(weights), top


@gluon.jit
def left_tile(
    GROUP: gl.constexpr, shared, at, item, j, interval, visit, scoring, KEYS: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """(p, base, total, top) of the first KEYS keys of tile j alone; p is 0 for the others."""
    BLOCK_N: gl.constexpr = CFG.block_n
    like = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
    DTYPE: gl.constexpr = shared.keys.tiles.dtype
    await_turn(GROUP)
    s = start_scores(shared.queries, item * CFG.groups + GROUP, shared.keys, at, KEYS)
    give_turn((GROUP + 1) % CFG.groups)
    s = warpgroup_mma_wait(0, [s])
    shared.keys.free(at)
    s = tile_scores(GROUP, s, j, True, shared.queue, item, interval, visit, scoring, CFG)
    p, base, total, top = first_weights(s, scoring, DTYPE)
    base, top = by_rows_of(base, like), by_rows_of(top, like)
    total = gl.convert_layout(total, thread_sums(like).type.layout, assert_trivial=True)
    if KEYS < BLOCK_N:
        p = widened(p, like, DTYPE)
    return p, base, total, top


@gluon.jit
def either_tile(GROUP: gl.constexpr, shared, at, item, j, interval, visit, scoring, CFG: gl.constexpr):
    """The same of the tile with this consumer's diagonal, or of its first half if that is all that the rows see."""
    queue = shared.queue
    seen = queue.word(item, ROW) + (GROUP + 1) * ROWS + queue.word(item, SHIFT) + interval.right
    HALF: gl.constexpr = CFG.block_n // 2
    WHOLE: gl.constexpr = CFG.block_n
    if seen <= j * CFG.block_n + HALF:
        p, base, total, top = left_tile(GROUP, shared, at, item, j, interval, visit, scoring, HALF, CFG)
    else:
        p, base, total, top = left_tile(GROUP, shared, at, item, j, interval, visit, scoring, WHOLE, CFG)
    return p, base, total, top


@gluon.jit
def first_tile(
    GROUP: gl.constexpr, s, masked, shared, at, item, j, interval, visit, scoring, CFG: gl.constexpr
):  # fmt: skip
    """The same of tile j, whose product s is there, unless it depends on the item which that is (`either`)."""
    if either(CFG):
        return either_tile(GROUP, shared, at, item, j, interval, visit, scoring, CFG)
    else:
        shared.keys.free(at)
        s = tile_scores(GROUP, s, j, masked, shared.queue, item, interval, visit, scoring, CFG)
        return first_weights(s, scoring, shared.values.tiles.dtype)
