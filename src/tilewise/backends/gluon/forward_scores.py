"""From a product q k^T to the scores of a consumer of the forward pass: modified, and -inf where a row does not see a key."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.device.rows import down
from tilewise.backends.device.scoremods import in_pattern, scores
from tilewise.backends.device.seqinfo import row_interval
from tilewise.backends.device.structs import Rows

from .forward_producer import K_LEN, Q_LEN, Q_START, ROW, ROWS, SHIFT, SPAN, WORDS, B, H, key_tile
from .registers import columns_from, keep_columns


@gluon.jit
def own_rows(GROUP: gl.constexpr, queue, item, interval, LINE: gl.constexpr):
    """The query rows of this consumer. What is told of the item stays in shared memory till it is needed."""
    index = queue.word(item, ROW) + GROUP * ROWS + gl.arange(0, ROWS, LINE)
    valid = index < queue.word(item, Q_LEN)
    b, m = queue.word(item, B), index + queue.word(item, SHIFT)
    token = 0
    if interval.low is not None:
        token = queue.word(item, Q_START) + index
    lo, hi = row_interval(interval, b, m, token, valid, queue.word(item, K_LEN))
    return Rows(b, queue.word(item, H), index, m, valid, lo, hi, index, index)


@gluon.jit
def first_key(GROUPS: gl.constexpr, j, queue, item, visit, BLOCK_N: gl.constexpr):
    """The first key of tile j, which for a list is an entry in it."""
    if visit is None:
        return j * BLOCK_N
    else:
        return key_tile(visit, queue.word(item, WORDS + SPAN * GROUPS), j, BLOCK_N)


@gluon.jit
def hide(GROUP: gl.constexpr, s, start, queue, item, interval, scoring):
    """The scores with -inf where a row of this consumer does not see a key, of the tile that begins at key `start`."""
    rows = own_rows(GROUP, queue, item, interval, gl.SliceLayout(1, s.type.layout))
    hi = rows.hi
    if scoring.pattern is not None:  # no tile has keys of two blocks
        seen = in_pattern(scoring, rows, start, rows.valid & (start < queue.word(item, K_LEN)))
        hi = gl.where(seen, hi, rows.lo)
    if interval.left is None and interval.chunk is None and interval.low is None:
        return keep_columns(s, None, hi - start)
    else:
        return keep_columns(s, rows.lo - start, hi - start)


@gluon.jit
def tile_scores(GROUP: gl.constexpr, product, j, masked, queue, item, interval, visit, scoring, CFG: gl.constexpr):
    """The scores of this consumer's rows and key tile j."""
    rows = own_rows(GROUP, queue, item, interval, gl.SliceLayout(1, product.type.layout))
    start = first_key(CFG.groups, j, queue, item, visit, CFG.block_n)
    s, _ = scores(product, scoring, down(rows), columns_from(start, product), 0)
    if scoring.cap is not None:  # beside a tanh selecting costs nothing, and a branch costs registers
        s = hide(GROUP, s, start, queue, item, interval, scoring)
    else:
        if masked:
            start = first_key(CFG.groups, j, queue, item, visit, CFG.block_n)
            s = hide(GROUP, s, start, queue, item, interval, scoring)
    return s
