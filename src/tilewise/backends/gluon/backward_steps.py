"""One row tile in the backward kernels for Hopper: in the narrow form for head dims up to 128, and in the wide form.

Narrow: each consumer has 64 keys and all columns; p and ds go to dv and dk through registers. Wide: both consumers have
the same 64 keys; each computes p and ds of half the rows, and all sums of half the columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.device.scoremods import in_pattern, scores
from tilewise.backends.device.seqinfo import key_interval
from tilewise.backends.device.structs import Rows

from .backward_parts import columns_of, meet, unknown_zero
from .backward_rows import DELTA
from .registers import halves, joined, keep_columns
from .versions import add_to, reinterpreted, thread_barrier

NO_ROW = gl.constexpr(2**31 - 1)  # larger than every row
KEYS = gl.constexpr(64)  # of one consumer: the rows of one warpgroup's products


@gluon.jit
def start_products(shared, at, keys, values, zero, scoring, FIRST: gl.constexpr):
    """Start s^T = k q^T and dp^T = v do^T of the rows from FIRST on, from what is subtracted in each row's column on."""
    COUNT: gl.constexpr = zero.type.shape[1]
    shared.q.ring.wait(at)
    q = shared.q.ring.tile(at).slice(FIRST, COUNT).permute((1, 0))
    if scoring.scale is None:
        s = warpgroup_mma(keys, q, shared.q.start(at, FIRST, 0, zero), is_async=True)
    else:
        s = warpgroup_mma(keys, q, zero, use_acc=False, is_async=True)
    shared.do.ring.wait(at)
    do = shared.do.ring.tile(at).slice(FIRST, COUNT).permute((1, 0))
    if scoring.scale is None:
        dp = shared.q.start(at, FIRST, DELTA, zero)
    else:
        dp = columns_of(shared.do.number(at, FIRST, zero.type), zero)
    return s, warpgroup_mma(values, do, dp, is_async=True)


@gluon.jit
def exponents(
    s, shared, at, b, h, row, key, q_len, k_len, shift, interval, scoring, FIRST: gl.constexpr, MASKED: gl.constexpr
):
    """(log2 of p, d score / d product) of the keys from `key` on and the rows from `row` on, transposed."""
    LAYOUT: gl.constexpr = s.type.layout
    n = key + gl.arange(0, s.type.shape[0], gl.SliceLayout(1, LAYOUT))
    index = (row + gl.arange(0, s.type.shape[1], gl.SliceLayout(0, LAYOUT)))[None, :]
    rows = Rows(b, h, index, index + shift, index < q_len, index, index, index, index)
    x, slope = scores(s, scoring, rows, n[:, None], k_len)
    x = x * scoring.factor
    if scoring.scale is not None:
        x = x + shared.q.number(at, FIRST, s.type)[None, :]
    if MASKED:
        x = hide_rows(x, b, h, row, n, q_len, k_len, shift, interval, scoring)
    return x, slope


@gluon.jit
def hide_rows(x, b, h, row, n, q_len, k_len, shift, interval, scoring):
    """-inf where a row does not see a key; rows beyond the sequence have p = 0 in any case."""
    ONE_SIDED: gl.constexpr = interval.chunk is None and interval.first is None
    seen = n < k_len
    first, end = key_interval(interval, b, n, seen, shift, q_len)
    if scoring.pattern is not None:  # no tile has rows of two blocks
        seen = in_pattern(scoring, Rows(b, h, row, row, row, row, row, row, row), n, seen & (row < q_len))
    first, end = gl.where(seen, first, NO_ROW) - row, gl.where(seen, end, 0) - row
    if ONE_SIDED and interval.left is None:
        return keep_columns(x, first, None)
    elif ONE_SIDED and interval.right is None and interval.prefix is None:
        return keep_columns(x, None, end)
    else:
        return keep_columns(x, first, end)


@gluon.jit
def score_gradient(p, dp, MASKED: gl.constexpr):
    """ds = p dp. Where p is 0 it is 0: dp of what is not seen may be NaN."""
    ds = p * dp
    if MASKED:
        ds = gl.where(p == 0.0, 0.0, ds)
    return ds


@gluon.jit
def narrow_step(
    GROUP: gl.constexpr, shared, at, b, h, row, key, q_len, k_len, shift, dq_row, dk, dv, dq_desc, zero, interval, scoring,
    MASKED: gl.constexpr,
):  # fmt: skip
    """The rows from `row` on: dv += p^T do, dk += ds^T q, and their dq += ds k."""
    BLOCK_M: gl.constexpr = zero.type.shape[1]
    D: gl.constexpr = dk.type.shape[1]
    HALF: gl.constexpr = BLOCK_M // 2
    DTYPE: gl.constexpr = shared.q.ring.tiles.dtype
    HALVES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q, do = shared.q.ring.tile(at), shared.do.ring.tile(at)
    zero_at = unknown_zero(at)
    k, v = shared.k.index(zero_at).reshape([2 * KEYS, D]), shared.v.index(zero_at).reshape([2 * KEYS, D])
    s, dp = start_products(shared, at, k.slice(GROUP * KEYS, KEYS), v.slice(GROUP * KEYS, KEYS), zero, scoring, 0)
    s = warpgroup_mma_wait(1, [s])
    x, slope = exponents(
        s, shared, at, b, h, row, key + GROUP * KEYS, q_len, k_len, shift, interval, scoring, 0, MASKED
    )
    left, right = halves(x)
    p_left = gl.exp2(gl.convert_layout(left, HALVES, assert_trivial=True))
    a_left = gl.convert_layout(p_left.to(DTYPE), OPERAND, assert_trivial=True)
    dv = warpgroup_mma(a_left, do.slice(0, HALF), dv, is_async=True)
    p_right = gl.exp2(gl.convert_layout(right, HALVES, assert_trivial=True))
    a_right = gl.convert_layout(p_right.to(DTYPE), OPERAND, assert_trivial=True)
    dv = warpgroup_mma(a_right, do.slice(HALF, HALF), dv, is_async=True)
    dp, a_left = warpgroup_mma_wait(2, [dp, a_left])
    left, right = halves(dp)
    left = score_gradient(p_left, gl.convert_layout(left, HALVES, assert_trivial=True), MASKED)
    right = score_gradient(p_right, gl.convert_layout(right, HALVES, assert_trivial=True), MASKED)
    ds = joined(left, right, s)
    if scoring.scale is not None:
        ds = ds * slope
    ds = ds.to(DTYPE)
    weights = shared.weights.index(at % 2)
    weights.slice(GROUP * KEYS, KEYS).store(ds)
    fence_async_shared()
    ds = gl.convert_layout(ds, OPERAND, assert_trivial=True)
    meet()  # ds of both consumers is there
    if BLOCK_M == 64:
        PART: gl.constexpr = D // 2
        dq = start_share(weights, k.slice(GROUP * PART, PART, dim=1))
    else:
        dq = start_share(weights.slice(GROUP * 64, 64, dim=1), k)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dv, a_right = warpgroup_mma_wait(2, [dv, a_right])
    tma.store_wait(0)  # the share before this one has left its memory
    shared.do.ring.free(at)
    dq = warpgroup_mma_wait(1, [dq])
    hand_in(GROUP, dq, shared.dq.index(GROUP), dq_desc, dq_row * D)
    dk, ds = warpgroup_mma_wait(0, [dk, ds])
    shared.q.ring.free(at)
    return dk, dv


@gluon.jit
def start_share(ds, k):
    """Start a share of dq = ds k, of 64 rows; ds is transposed."""
    COLUMNS: gl.constexpr = k.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def hand_in(GROUP: gl.constexpr, dq, memory, dq_desc, first):
    """Add a share of dq to the sum in global memory, of which number `first` is the row tile's first.

    In the order in which threads hold it, 16 bytes each (see `as_rows`): as rows, banks of shared memory would conflict.
    """
    ROWS: gl.constexpr = dq.type.shape[0]
    COLUMNS: gl.constexpr = dq.type.shape[1]
    BOX: gl.constexpr = dq_desc.block_type.shape
    staging = reinterpreted(memory, gl.float32, BOX, dq_desc.layout)
    parts = dq.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    staging.store(parts.reshape(BOX))
    fence_async_shared()
    thread_barrier()
    add_to(dq_desc, [first // BOX[1] + GROUP * BOX[0], 0], staging)


@gluon.jit
def wide_step(
    GROUP: gl.constexpr, shared, at, b, h, row, key, q_len, k_len, shift, dq_row, dk, dv, dq_desc, zero, interval, scoring,
    MASKED: gl.constexpr,
):  # fmt: skip
    """The same in the wide form."""
    ROWS: gl.constexpr = zero.type.shape[1]
    PART: gl.constexpr = dk.type.shape[1]
    DTYPE: gl.constexpr = shared.q.ring.tiles.dtype
    q, do = shared.q.ring.tile(at), shared.do.ring.tile(at)
    zero_at = unknown_zero(at)
    k, v = shared.k.index(zero_at).reshape([KEYS, 2 * PART]), shared.v.index(zero_at).reshape([KEYS, 2 * PART])
    s, dp = start_products(shared, at, k, v, zero, scoring, GROUP * ROWS)
    s = warpgroup_mma_wait(1, [s])
    x, slope = exponents(
        s, shared, at, b, h, row + GROUP * ROWS, key, q_len, k_len, shift, interval, scoring, GROUP * ROWS, MASKED
    )
    p = gl.exp2(x)
    p_tile, ds_tile = shared.weights.index(0), shared.weights.index(1)
    p_tile.slice(GROUP * ROWS, ROWS, dim=1).store(p.to(DTYPE))
    dp = warpgroup_mma_wait(0, [dp])
    ds = score_gradient(p, dp, MASKED)
    if scoring.scale is not None:
        ds = ds * slope
    ds_tile.slice(GROUP * ROWS, ROWS, dim=1).store(ds.to(DTYPE))
    fence_async_shared()
    meet()  # p and ds of both consumers are there
    dv = warpgroup_mma(p_tile, do.slice(GROUP * PART, PART, dim=1), dv, is_async=True)
    dq = start_share(ds_tile, k.slice(GROUP * PART, PART, dim=1))
    dk = warpgroup_mma(ds_tile, q.slice(GROUP * PART, PART, dim=1), dk, is_async=True)
    tma.store_wait(0)  # the share before this one has left its memory: that of the rows before these
    if at > 0:
        if GROUP == 0:
            shared.q.ring.free(at - 1)
        else:
            shared.do.ring.free(at - 1)
    dv, dq, dk = warpgroup_mma_wait(0, [dv, dq, dk])
    meet()  # nobody reads these rows any more
    if GROUP == 0:
        hand_in(GROUP, dq, q, dq_desc, dq_row * (2 * PART))
    else:
        hand_in(GROUP, dq, do, dq_desc, dq_row * (2 * PART))
    return dk, dv
