"""The products of a consumer of the forward pass, s = q k^T and acc += p v, and where they lie in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .forward_producer import ROWS
from .registers import unpacked


@gluon.constexpr_function
def product_layout(columns):
    """Where a warpgroup's products of 64 rows lie in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def no_sums(tiles):
    """Zeros, for sums that leave through memory like `tiles`; 0 where there are none."""
    if tiles is None:
        return 0
    else:
        COLUMNS: gl.constexpr = tiles.shape[len(tiles.shape) - 1]
        return gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))


@gluon.jit
def start_scores(queries, copy, keys, at, KEYS: gl.constexpr):
    """Start q k^T of the first KEYS keys of a tile, in one commit group for each part."""
    zero = gl.zeros([ROWS, KEYS], gl.float32, product_layout(KEYS))
    k = first_rows(keys.tile(at), KEYS).permute((1, 0))
    s = warpgroup_mma(queries.tile(copy), k, zero, use_acc=False, is_async=True)
    if queries.tails is not None:
        s = warpgroup_mma(queries.tail(copy), first_rows(keys.tail(at), KEYS).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def first_rows(tile, NUMBER: gl.constexpr):
    """The first rows of a tile in shared memory."""
    if tile.shape[0] == NUMBER:
        return tile
    else:
        return tile.slice(0, NUMBER)


@gluon.jit
def start_output(p, values, at, acc, tail):
    """Start acc += p v, in one commit group for each part: (acc, tail, the operands, which are in use until it is done)."""
    KEYS: gl.constexpr = 2 * p.shape[1]
    operand = left_operand(p, values.tiles.dtype, acc)
    acc = warpgroup_mma(operand, first_rows(values.tile(at), KEYS), acc, is_async=True)
    if values.tails is None:
        return acc, tail, operand, operand
    else:
        tail_operand = left_operand(p, values.tiles.dtype, tail)
        v = first_rows(values.tail(at), KEYS)
        return acc, warpgroup_mma(tail_operand, v, tail, is_async=True), operand, tail_operand


@gluon.jit
def await_output(values, acc, tail, operand, tail_operand):
    """The sums of `start_output`, when they are there."""
    if values.tails is None:
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
    else:
        acc, tail, operand, tail_operand = warpgroup_mma_wait(0, [acc, tail, operand, tail_operand])
    return acc, tail


@gluon.jit
def left_operand(p, DTYPE: gl.constexpr, acc):
    """p as the left operand of a product that is added to `acc`."""
    return unpacked(p, DTYPE, gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def by_rows_of(x, like):
    """One number for each row, as the rows of `like` lie in registers."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)
