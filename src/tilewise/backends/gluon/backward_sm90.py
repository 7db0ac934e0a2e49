"""The backward pass on Hopper (FlashAttention-3, section 3.4): a producer warp and two consumer warpgroups for a tile of keys.

Scores are transposed, one row per key: so p and ds are the left operands of dv = p^T do and dk = ds^T q. dq belongs to no
program: each adds its share to a float32 tensor, through the copy engine.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.backends.device.descriptors import tma_start
from tilewise.backends.device.rows import tile_of
from tilewise.backends.device.seqinfo import sequence

from .backward_parts import broken_sums, key_tile, make_shared, masked_tile, meet, produce, row_sweep
from .backward_rows import UNSPECIALIZED, Shape, await_kernel, let_next_start, sum_row
from .backward_steps import KEYS, narrow_step, wide_step
from .pipeline import barriers_ready
from .versions import copy_out, reinterpreted, thread_barrier


@gluon.jit
def step(
    GROUP: gl.constexpr, shared, at, b, h, row, key, q_len, k_len, shift, dq_row, dk, dv, dq_desc, zero, interval, scoring,
    MASKED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    if WIDE:
        return wide_step(
            GROUP, shared, at, b, h, row, key, q_len, k_len, shift, dq_row + row, dk, dv, dq_desc, zero, interval, scoring,
            MASKED,
        )  # fmt: skip
    else:
        return narrow_step(
            GROUP, shared, at, b, h, row, key, q_len, k_len, shift, dq_row + row, dk, dv, dq_desc, zero, interval, scoring,
            MASKED,
        )  # fmt: skip


@gluon.jit
def write(desc, start, tile):
    """Let the copy engine write a tile in shared memory; it leaves out what lies beyond the tensor."""
    fence_async_shared()
    thread_barrier()
    copy_out(desc, start, tile)


@gluon.jit
def write_narrow(GROUP: gl.constexpr, shared, dk, dv, dk_desc, dv_desc, b, hkv, k_start, k_len, key):
    """Each consumer has its own keys: dv goes where their values were, dk where the shares of dq were, which leave first."""
    DTYPE: gl.constexpr = shared.q.ring.tiles.dtype
    BOX: gl.constexpr = dk_desc.block_type.shape
    MATRIX: gl.constexpr = [dk.type.shape[0], dk.type.shape[1]]
    start = tma_start(dk_desc, b, hkv, k_start, k_len, key + GROUP * KEYS)
    values = shared.v.index(0)
    values.reshape([2 * KEYS, MATRIX[1]]).slice(GROUP * KEYS, KEYS).store(dv.to(DTYPE))
    write(dv_desc, start, values.slice(GROUP * KEYS, KEYS, dim=len(BOX) - 3))
    tma.store_wait(1)
    thread_barrier()
    staging = reinterpreted(shared.dq.index(GROUP), DTYPE, BOX, dk_desc.layout)
    staging.reshape(MATRIX).store(dk.to(DTYPE))
    write(dk_desc, start, staging)
    tma.store_wait(0)


@gluon.jit
def write_wide(GROUP: gl.constexpr, shared, dk, dv, dk_desc, dv_desc, b, hkv, k_start, k_len, key):
    """Each consumer has half the columns: together they fill the memory of keys and values, which nobody needs now."""
    DTYPE: gl.constexpr = shared.q.ring.tiles.dtype
    PART: gl.constexpr = dk.type.shape[1]
    start = tma_start(dk_desc, b, hkv, k_start, k_len, key)
    shared.k.index(0).reshape([KEYS, 2 * PART]).slice(GROUP * PART, PART, dim=1).store(dk.to(DTYPE))
    shared.v.index(0).reshape([KEYS, 2 * PART]).slice(GROUP * PART, PART, dim=1).store(dv.to(DTYPE))
    fence_async_shared()
    meet()
    if GROUP == 0:
        write(dk_desc, start, shared.k.index(0))
    else:
        write(dv_desc, start, shared.v.index(0))
    tma.store_wait(0)


@gluon.jit
def consume(
    GROUP: gl.constexpr, shared, dq_desc, dk_desc, dv_desc, broken, lengths, interval, visit, scoring, softmax_scale, call,
    CFG: gl.constexpr,
):  # fmt: skip
    """dk and dv of a key tile, as far as they are this consumer's."""
    WIDTH: gl.constexpr = shared.k.shape[len(shared.k.shape) - 1]
    COLUMNS: gl.constexpr = WIDTH // 2 if CFG.wide else WIDTH
    ROWS: gl.constexpr = CFG.block_m // 2 if CFG.wide else CFG.block_m
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    j, b, hkv = key_tile(gl.program_id(0), call)
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    key = j * CFG.block_n
    note = broken + ((b * call.heads_kv + hkv) * call.tiles + j) * 2 + GROUP
    if key >= k_len:
        gl.store(note, 0)
    else:
        zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
        dk = gl.zeros([KEYS, COLUMNS], gl.float32, K_LAYOUT)
        dv = gl.zeros([KEYS, COLUMNS], gl.float32, K_LAYOUT)
        shared.await_keys()
        at = 0
        for h in range(hkv * call.group, (hkv + 1) * call.group):
            dq_row = sum_row(lengths, b, h, q_start, call)
            walk, early, masked, full_last = row_sweep(
                interval, visit, j, b, h, q_len, k_len, shift, CFG.block_m, CFG.block_n
            )
            for n in range(masked):
                i = masked_tile(n, walk, early, full_last, visit)
                dk, dv = step(
                    GROUP, shared, at, b, h, i * CFG.block_m, key, q_len, k_len, shift, dq_row, dk, dv, dq_desc, zero,
                    interval, scoring, True, CFG.wide,
                )  # fmt: skip
                at += 1
            for entry in range(walk.full_first, full_last):
                i = tile_of(entry, walk, visit)
                dk, dv = step(
                    GROUP, shared, at, b, h, i * CFG.block_m, key, q_len, k_len, shift, dq_row, dk, dv, dq_desc, zero,
                    interval, scoring, False, CFG.wide,
                )  # fmt: skip
                at += 1
        gl.store(note, broken_sums(dk, dv))
        dk = dk * softmax_scale
        if CFG.wide:
            write_wide(GROUP, shared, dk, dv, dk_desc, dv_desc, b, hkv, k_start, k_len, key)
        else:
            write_narrow(GROUP, shared, dk, dv, dk_desc, dv_desc, b, hkv, k_start, k_len, key)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, q_numbers, do_numbers, dq_desc, dk_desc, dv_desc, broken, lengths, interval, visit,
    scoring, softmax_scale, heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows, CFG: gl.constexpr,
):  # fmt: skip
    """dv = p^T do, dk = scale ds^T q, dq = ds k with ds = p (do v^T - delta), p = exp(s - lse)."""
    call = Shape(heads, heads_kv, group, tiles, together, all_heads, batch_rows, head_rows)
    shared = make_shared(q_desc, k_desc, v_desc, do_desc, q_numbers, do_numbers, dq_desc, CFG)
    barriers_ready()
    await_kernel()
    let_next_start()
    gl.warp_specialize([
        (consume, (0, shared, dq_desc, dk_desc, dv_desc, broken, lengths, interval, visit, scoring, softmax_scale, call,
                     CFG)),
        (consume, (1, shared, dq_desc, dk_desc, dv_desc, broken, lengths, interval, visit, scoring, softmax_scale, call,
                     CFG)),
        (produce, (shared, q_desc, k_desc, v_desc, do_desc, q_numbers, do_numbers, lengths, interval, visit, call, CFG)),
    ], [4, 1], [CFG.registers, CFG.producer_registers])  # fmt: skip
