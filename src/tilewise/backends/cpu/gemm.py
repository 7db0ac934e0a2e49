"""Micro-kernels: one generator of register-tile products, and the three shapes that attention is made of.

A *panel* is QP = 3 W query rows as vector lanes. Matrices with query columns (Q^T, S^T, P^T, O^T) are `[row][QP]`;
K, V, dO and Q as rows are *column panels* `[c / 2W][row][2W]`. With them no product needs a horizontal sum or a
transposed copy of K or V, and any head dim works by zero padding in scratch memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import PANEL_VECTORS, emit_fma

SCORE_ROWS = (
    4  # keys (or head-dim columns) of a tile with query lanes: 4 x 3 accumulators + 3 vectors + 1 = 16 registers
)
GRAD_ROWS = 6  # keys of a tile with head-dim lanes: 6 x 2 accumulators + 2 vectors + 1 = 15 registers
COLUMN_VECTORS = 2  # vectors of a column panel

_I64, _I32 = ir.IntType(64), ir.IntType(32)


@dataclass(frozen=True)
class Tile:
    """C[rows, vectors * W] from sum over k of A[row, k] (broadcast) * B[k, vectors * W].

    k advances in chunks of `unroll`: A by a run-time stride, B without a gap. All strides count elements.
    """

    rows: int
    vectors: int
    unroll: int
    a_row: int  # between rows of A
    a_step: int  # between k of one chunk of A
    finish: str  # "set": C = sum; "add": C += sum; "rescale": C = alpha * C + sum


def _dot_tile(lanes):
    columns = COLUMN_VECTORS * lanes.width
    return Tile(SCORE_ROWS, PANEL_VECTORS["fma"], unroll=columns, a_row=columns, a_step=1, finish="set")


def _mix_tile(finish):
    def shape(lanes):
        return Tile(
            SCORE_ROWS, PANEL_VECTORS["fma"], unroll=4, a_row=1, a_step=COLUMN_VECTORS * lanes.width, finish=finish
        )

    return shape


def _outer_tile(lanes):
    return Tile(GRAD_ROWS, COLUMN_VECTORS, unroll=lanes.panel, a_row=lanes.panel, a_step=1, finish="add")


def _emit_loop(builder, tile: Tile, vec, a, a_chunk, b, chunks):
    """The k loop; returns the accumulators, row by row."""
    element_bytes, width = vec.bits // 8, vec.width
    zero = ir.Constant(vec.llvm, [0.0] * width)
    entry, body, done = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    left, a_at, b_at = (builder.phi(_I64) for _ in range(3))
    sums = [[builder.phi(vec.llvm) for _ in range(tile.vectors)] for _ in range(tile.rows)]
    acc = [list(row) for row in sums]

    def element(base, offset, llvm):
        address = builder.add(base, ir.Constant(_I64, offset * element_bytes))
        return builder.load(builder.inttoptr(address, llvm.as_pointer()), align=element_bytes)

    no_value, splat = ir.Constant(vec.llvm, ir.Undefined), ir.Constant(ir.VectorType(_I32, width), [0] * width)
    for k in range(tile.unroll):
        columns = [element(b_at, (k * tile.vectors + v) * width, vec.llvm) for v in range(tile.vectors)]
        for r in range(tile.rows):
            scalar = element(a_at, r * tile.a_row + k * tile.a_step, vec.element)
            one = builder.insert_element(no_value, scalar, ir.Constant(_I32, 0))
            spread = builder.shuffle_vector(one, no_value, splat)
            acc[r] = [emit_fma(builder, spread, column, old) for column, old in zip(columns, acc[r], strict=True)]
    next_left = builder.sub(left, ir.Constant(_I64, 1))
    steps = (
        (left, chunks, next_left),
        (a_at, a, builder.add(a_at, a_chunk)),
        (b_at, b, builder.add(b_at, ir.Constant(_I64, tile.unroll * tile.vectors * width * element_bytes))),
    )
    for phi, first, following in steps:
        phi.add_incoming(first, entry)
        phi.add_incoming(following, builder.block)
    for row, new_row in zip(sums, acc, strict=True):
        for phi, new in zip(row, new_row, strict=True):
            phi.add_incoming(zero, entry)
            phi.add_incoming(new, builder.block)
    builder.cbranch(builder.icmp_signed(">", next_left, ir.Constant(_I64, 0)), body, done)
    builder.position_at_end(done)
    return acc


def _emit_finish(builder, tile: Tile, vec, c, alpha, acc):
    """Combine the sums with C. Only now is C read: early loads would stall the first products on a far cache."""

    def slot(base, offset):
        address = builder.add(base, ir.Constant(_I64, offset * vec.width * vec.bits // 8))
        return builder.inttoptr(address, vec.llvm.as_pointer())

    for r, row in enumerate(acc):
        for v, value in enumerate(row):
            pointer = slot(c, r * tile.vectors + v)
            if tile.finish == "add":
                value = builder.fadd(builder.load(pointer, align=4), value)
            elif tile.finish == "rescale":
                factor = builder.load(slot(alpha, v), align=4)
                value = emit_fma(builder, builder.load(pointer, align=4), factor, value)
            builder.store(value, pointer, align=4)


def _tile_function(module, name, tile: Tile, vec):
    """Consecutive tiles as an LLVM function of its own, so that its registers are allocated apart from the caller's."""
    full_name = f"tilewise_{name}_{vec.kind}x{vec.width}"
    if full_name in module.globals:
        return module.globals[full_name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 7), full_name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    c, a, a_chunk, b, chunks, alpha, tiles = function.args
    entry, body, done = builder.block, builder.append_basic_block("tile"), builder.append_basic_block("end")
    builder.branch(body)
    builder.position_at_end(body)
    left, c_at, a_at = (builder.phi(_I64) for _ in range(3))
    acc = _emit_loop(builder, tile, vec, a_at, a_chunk, b, chunks)
    _emit_finish(builder, tile, vec, c_at, alpha, acc)
    element_bytes = vec.bits // 8
    steps = (
        (left, tiles, builder.sub(left, ir.Constant(_I64, 1))),
        (c_at, c, builder.add(c_at, ir.Constant(_I64, tile.rows * tile.vectors * vec.width * element_bytes))),
        (a_at, a, builder.add(a_at, ir.Constant(_I64, tile.rows * tile.a_row * element_bytes))),
    )
    for phi, first, following in steps:
        phi.add_incoming(first, entry)
        phi.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed(">", steps[0][2], ir.Constant(_I64, 0)), body, done)
    builder.position_at_end(done)
    builder.ret_void()
    return function


def gemm_tile(name: str, shape: Callable):
    """A Numba function `(lanes, c, a, a_chunk_bytes, b, chunks, alpha, tiles)` for the tile `shape(lanes)`.

    It computes `tiles` >= 1 tiles below each other, each over `chunks` >= 1 chunks of k.
    """

    @intrinsic
    def tile(_context, lanes, c, a, a_chunk, b, chunks, alpha, tiles):
        def codegen(context, builder, sig, args):
            function = _tile_function(builder.module, name, shape(lanes), lanes.vector)
            builder.call(function, args[1:])

        return types.void(lanes, *(types.int64,) * 7), codegen

    return tile


dot_tile = gemm_tile("dot", _dot_tile)  # S^T[4 keys][QP] = sum over d of K[n][d] Q^T[d][QP]
mix_rescale_tile = gemm_tile(
    "mix_rescale", _mix_tile("rescale")
)  # O^T[4 d][QP] = alpha O^T + sum over n of V[n][d] P^T[n]
mix_add_tile = gemm_tile("mix_add", _mix_tile("add"))  # dQ^T[4 d][QP] += sum over n of K[n][d] dS^T[n]
outer_tile = gemm_tile("outer", _outer_tile)  # dK[6 keys][2W] += sum over m of dS^T[n][m] Q[m][2W]
