"""AMX, the matrix unit of recent Intel processors: tiles of 16 rows x 64 bytes, and products of bfloat16 summed in fp32.

C[16][16] += A[16][32] B[32][16] is one instruction. A lies in memory row by row with consecutive k; B in *pairs*, one
32-bit word for two consecutive k of a column: `[k / 2][column]`. Such words travel as fp32 vectors, bits untouched.
"""

import ctypes
import functools
import platform
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .memory import address_as
from .simd import emit_fma

TILE_ROWS = 16  # of C and A
STEP = 32  # rows of C per call step, columns of C, and k of one instruction: keys, query rows and head dims alike
ROW_BYTES = 4 * STEP  # of C and of B

_I64, _I32, _I16, _I8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))
_HALVES = ir.VectorType(_I16, 32)
_SINGLES = ir.VectorType(ir.FloatType(), 16)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64
_SETS = ((0, 1), (2, 3))  # C: 16 rows x 32 columns, twice
_A, _B = (4, 5), (6, 7)
_CONFIG = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[TILE_ROWS] * 8, *[0] * 8])  # eight tiles, all of full size


@functools.cache
def usable() -> bool:
    """Whether this process may use AMX for bfloat16. Linux grants the large registers when asked, once per process."""
    # What Numba compiles for, which is not the machine's all where the user sets NUMBA_CPU_NAME.
    *_, features = cpu_target.target_context.codegen().magic_tuple()  # pyright: ignore[reportAttributeAccessIssue]
    needed = {"+amx-tile", "+amx-bf16", "+avx512f", "+avx512bw", "+avx512dq", "+avx512bf16"}
    if sys.platform != "linux" or platform.machine() != "x86_64" or not needed <= set(features.split(",")):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _call(builder, name, result, *args):
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _constant(x):
    return ir.Constant(_I64, x)


# ---- tiles -----------------------------------------------------------------------------------------------------------


class _Tiles:
    """Emits instructions on tile registers 0 ... 7."""

    def __init__(self, builder):
        self.builder = builder

    def _emit(self, name, *args):
        _call(self.builder, name, ir.VoidType(), *(ir.Constant(_I8, a) if isinstance(a, int) else a for a in args))

    def _at(self, address, offset):
        return address_as(self.builder, self.builder.add(address, _constant(offset)), _I8)

    def zero(self, tile):
        self._emit("tilezero", tile)

    def load(self, tile, address, offset, stride):
        self._emit("tileloadd64", tile, self._at(address, offset), stride)

    def store(self, tile, address, offset, stride):
        self._emit("tilestored64", tile, self._at(address, offset), stride)

    def multiply(self, c, a, b):
        self._emit("tdpbf16ps", c, a, b)


def _emit_chunk(tiles, pair, a_tile, a, a_stride, b):
    """C[16][32] += A[16][32] B[32][32]. Loads alternate with products: bunched loads make this four times slower."""
    row = _constant(ROW_BYTES)
    tiles.load(_B[0], b, 0, row)
    tiles.load(a_tile, a, 0, a_stride)
    tiles.multiply(pair[0], a_tile, _B[0])
    tiles.load(_B[1], b, ROW_BYTES // 2, row)
    tiles.multiply(pair[1], a_tile, _B[1])


def _emit_rest(tiles, pair, a, a_stride, a_chunk, b, chunks):
    """The chunks after the first."""
    builder = tiles.builder
    before, loop = builder.block, builder.append_basic_block("chunk")
    after = builder.append_basic_block("chunks_done")
    a_next, b_next, left_next = builder.add(a, a_chunk), builder.add(b, _CHUNK_OF_B), builder.sub(chunks, _constant(1))
    builder.cbranch(builder.icmp_signed(">", left_next, _constant(0)), loop, after)
    builder.position_at_end(loop)
    left, a_at, b_at = (builder.phi(_I64) for _ in range(3))
    _emit_chunk(tiles, pair, _A[1], a_at, a_stride, b_at)
    following = builder.sub(left, _constant(1))
    for phi, first, then in (
        (left, left_next, following),
        (a_at, a_next, builder.add(a_at, a_chunk)),
        (b_at, b_next, builder.add(b_at, _CHUNK_OF_B)),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed(">", following, _constant(0)), loop, after)
    builder.position_at_end(after)


_CHUNK_OF_B = _constant(TILE_ROWS * ROW_BYTES)


def _product_function(module, start):
    """Products below each other as an LLVM function.

    Two halves of 16 rows take turns: while one is worked on, the other's sums go to memory and its next ones come.
    In that order (after the first chunk) neither is waited for; one half alone would stand still for 300 cycles.
    """
    name = f"tilewise_amx_{start}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 7), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    tiles, row, half = _Tiles(builder), _constant(ROW_BYTES), TILE_ROWS * ROW_BYTES
    c, a, a_stride, a_chunk, b, chunks, blocks = function.args
    a_half = builder.mul(a_stride, _constant(TILE_ROWS))

    def begin(pair, offset):
        for i, tile in enumerate(pair):
            tiles.zero(tile) if start == "set" else tiles.load(tile, c_at, offset + 64 * i, row)

    def finish(pair, offset):
        for i, tile in enumerate(pair):
            tiles.store(tile, c_at, offset + 64 * i, row)

    c_at = c
    begin(_SETS[0], 0)
    entry, loop, done = builder.block, builder.append_basic_block("block"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    left, c_at, a_at = (builder.phi(_I64) for _ in range(3))
    following = builder.sub(left, _constant(1))

    _emit_chunk(tiles, _SETS[0], _A[0], a_at, a_stride, b)
    with builder.if_then(builder.icmp_signed("<", left, blocks)):
        finish(_SETS[1], -half)
    begin(_SETS[1], half)
    _emit_rest(tiles, _SETS[0], a_at, a_stride, a_chunk, b, chunks)

    second = builder.add(a_at, a_half)
    _emit_chunk(tiles, _SETS[1], _A[0], second, a_stride, b)
    finish(_SETS[0], 0)
    with builder.if_then(builder.icmp_signed(">", following, _constant(0))):
        begin(_SETS[0], 2 * half)
    _emit_rest(tiles, _SETS[1], second, a_stride, a_chunk, b, chunks)

    for phi, first, then in (
        (left, blocks, following),
        (c_at, c, builder.add(c_at, _constant(2 * half))),
        (a_at, a, builder.add(second, a_half)),
    ):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, builder.block)
    builder.cbranch(builder.icmp_signed(">", following, _constant(0)), loop, done)
    builder.position_at_end(done)
    finish(_SETS[1], half)
    builder.ret_void()
    return function


def _product(start):
    @intrinsic
    def product(_context, c, a, a_stride, a_chunk, b, chunks, blocks):
        def codegen(context, builder, sig, args):
            builder.call(_product_function(builder.module, start), args)

        return types.void(*(types.int64,) * 7), codegen

    return product


# (c, a, a_stride, a_chunk, b, chunks, blocks): C[32 rows][32] from A and B over `chunks` >= 1 times 32 k, `blocks` >= 1
# times below each other. C and B without gaps; rows of A are `a_stride` bytes apart, chunks of k `a_chunk` bytes.
set_product, add_product = _product("set"), _product("add")


@intrinsic
def configure_tiles(_context, lanes):
    """Take the tile registers into use on this thread."""

    def codegen(context, builder, sig, args):
        config = ir.Constant(ir.ArrayType(_I8, len(_CONFIG)), bytearray(_CONFIG))
        pointer = cgutils.global_constant(builder, "amx_config", config)
        _call(builder, "ldtilecfg", ir.VoidType(), builder.bitcast(pointer, _I8.as_pointer()))

    return types.void(lanes), codegen


@intrinsic
def release_tiles(_context, lanes):
    """Leave them to others: oneDNN configures them on the same threads, and in use they cost every thread switch."""
    return types.void(lanes), lambda context, builder, sig, args: _call(builder, "tilerelease", ir.VoidType())


@intrinsic
def stay_awake(_context, lanes):
    """One product whose result nobody reads, for passes over many vectors between products.

    Measured: 250 vectors of arithmetic take 800 cycles longer after one product than after none, as if the core waited
    for the matrix unit to fall asleep; with a product every 8 vectors, which costs 3 cycles each, it does not.
    """

    def codegen(context, builder, sig, args):
        _Tiles(builder).multiply(_SETS[0][0], _A[0], _B[0])

    return types.void(lanes), codegen


# ---- vectors of 32 bfloat16 ------------------------------------------------------------------------------------------


def _below(builder, count):
    """A mask of 32 elements: those before `count`."""
    wide = ir.VectorType(_I64, 32)
    one = builder.insert_element(ir.Constant(wide, ir.Undefined), count, ir.Constant(_I32, 0))
    spread = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, 32), [0] * 32))
    return builder.icmp_signed("<", ir.Constant(_HALVES, list(range(32))), builder.trunc(spread, _HALVES))


def _masked_load(builder, address, mask):
    pointer = address_as(builder, address, _HALVES)
    kind = ir.FunctionType(_HALVES, [pointer.type, _I32, mask.type, _HALVES])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v32i16.p0")
    loaded = builder.call(function, [pointer, ir.Constant(_I32, 2), mask, ir.Constant(_HALVES, [0] * 32)])
    return builder.bitcast(loaded, _SINGLES)


@intrinsic
def load_halves(_context, lanes, address, count):
    """32 consecutive bfloat16, zeros from `count` on; memory beyond them is not touched."""

    def codegen(context, builder, sig, args):
        return _masked_load(builder, args[1], _below(builder, args[2]))

    return lanes.vector(lanes, types.int64, types.int64), codegen


@intrinsic
def load_rows_halves(_context, lanes, addresses, offset, count):
    """The same from each of 16 rows: row i at `addresses[i] + offset`."""
    block = types.UniTuple(lanes.vector, 16)

    def codegen(context, builder, sig, args):
        mask = _below(builder, args[3])
        slots = [address_as(builder, args[1], _I64, ir.Constant(_I64, i)) for i in range(16)]
        rows = [_masked_load(builder, builder.add(builder.load(slot), args[2]), mask) for slot in slots]
        return cgutils.pack_array(builder, rows)

    return block(lanes, *(types.int64,) * 3), codegen


def _rearrangement(order):
    """A function of two vectors of 32 bfloat16 that picks 32 of the 64 elements."""

    @intrinsic
    def rearrange(_context, x, y):
        def codegen(context, builder, sig, args):
            halves = [builder.bitcast(arg, _HALVES) for arg in args]
            picked = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(_I32, 32), order))
            return builder.bitcast(picked, _SINGLES)

        return x(x, y), codegen

    return rearrange


even_halves = _rearrangement(list(range(0, 64, 2)))
odd_halves = _rearrangement(list(range(1, 64, 2)))
zip_low = _rearrangement([half for i in range(16) for half in (i, 32 + i)])  # words (x[i], y[i])
zip_high = _rearrangement([half for i in range(16, 32) for half in (i, 32 + i)])
zip_odd = _rearrangement([half for i in range(1, 32, 2) for half in (i, 32 + i)])


@intrinsic
def round_words(_context, x):
    """fp32 whose upper halves are x rounded to bfloat16, ties away from 0; a NaN stays one unless its bits are all set.

    An addition for each: the instruction that rounds two, VCVTNE2PS2BF16, takes 2 cycles, and 3 next to AMX.
    """

    def codegen(context, builder, sig, args):
        words = ir.VectorType(_I32, 16)
        half = ir.Constant(words, [1 << 15] * 16)
        return builder.bitcast(builder.add(builder.bitcast(args[0], words), half), _SINGLES)

    return x(x), codegen


@intrinsic
def dot_halves(_context, sums, x, y):
    """sums[i] + x[2i] y[2i] + x[2i + 1] y[2i + 1], products and sums in fp32."""

    def codegen(context, builder, sig, args):
        words = ir.VectorType(_I32, 16)
        halves = [builder.bitcast(arg, words) for arg in args[1:]]
        return _call(builder, "avx512bf16.dpbf16ps.512", _SINGLES, args[0], *halves)

    return sums(sums, sums, sums), codegen


@intrinsic
def widen_low(_context, x):
    """The elements 0, 2, 4, ... in fp32."""

    def codegen(context, builder, sig, args):
        words = ir.VectorType(_I32, 16)
        shifted = builder.shl(builder.bitcast(args[0], words), ir.Constant(words, [16] * 16))
        return builder.bitcast(shifted, _SINGLES)

    return x(x), codegen


# (2^r - 1) / r on [0, 1), minimax (Remez); relative error of 2^r 8.2e-8
_EXP2_POLY = (
    0.6931513118159652,
    0.24016445006954193,
    0.055799913318135504,
    0.009017030102090779,
    0.0018671301500161775,
)
_FLOOR_QUIETLY = 9  # VREDUCEPS: x - floor(x), no exception flags


@intrinsic
def exp2(_context, x):
    """2^x for x <= 127 within 2 ulp: 1 for 0, NaN for NaN, 0 below the normal numbers.

    AVX-512 takes exponents apart, and puts them together, in one instruction each. Where the result is no normal number
    the latter must not even try: it would take 100 to 300 cycles.
    """

    def codegen(context, builder, sig, args):
        x, zero, near = args[0], ir.Constant(_SINGLES, [0.0] * 16), ir.Constant(_I32, 4)
        floor, everywhere = ir.Constant(_I32, _FLOOR_QUIETLY), ir.Constant(_I16, -1)
        r = _call(builder, "avx512.mask.reduce.ps.512", _SINGLES, x, floor, zero, everywhere, near)
        *lower, top = _EXP2_POLY
        poly = ir.Constant(_SINGLES, [top] * 16)
        for coefficient in (*reversed(lower), 1.0):
            poly = emit_fma(builder, poly, r, ir.Constant(_SINGLES, [coefficient] * 16))
        normal = builder.fcmp_unordered(">=", x, ir.Constant(_SINGLES, [-126.0] * 16))
        where = builder.bitcast(normal, _I16)
        return _call(builder, "avx512.mask.scalef.ps.512", _SINGLES, poly, x, zero, where, near)

    return x(x), codegen
