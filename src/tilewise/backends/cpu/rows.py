"""Moving rows: whole rows into column panels, and W rows at a time through W x W transposes."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .memory import FORMAT_BYTES, READABLE, WRITABLE, address_as, narrow, per_format, widen
from .simd import emit_fma

_I64, _I32 = ir.IntType(64), ir.IntType(32)


@intrinsic
def copy_row(_context, lanes, target, panel_bytes, source, panels, code):
    """Widen `panels` column panels (2 W elements each) of one row into memory `panel_bytes` apart.

    Returns a vector that is 0 unless an element is Inf or NaN. One switch per row: a switch per vector costs more than
    the copy.
    """
    vec = lanes.vector
    half = vec.width * vec.bits // 8
    zero = ir.Constant(vec.llvm, [0.0] * vec.width)

    def codegen(context, builder, sig, args):
        _, target, panel_bytes, source, panels, code = args

        def body(c):
            step = ir.Constant(_I64, 2 * vec.width * FORMAT_BYTES[c])
            entry, loop, done = builder.block, builder.append_basic_block("panel"), builder.append_basic_block("copied")
            builder.branch(loop)
            builder.position_at_end(loop)
            left, to, at = (builder.phi(_I64) for _ in range(3))
            check = builder.phi(vec.llvm)
            found = check
            for i in range(2):
                offset = ir.Constant(_I64, i * vec.width * FORMAT_BYTES[c])
                value = widen(builder, c, builder.add(at, offset), vec.element, vec.width)
                builder.store(
                    value, address_as(builder, builder.add(to, ir.Constant(_I64, i * half)), vec.llvm), align=4
                )
                found = emit_fma(builder, value, zero, found)
            following = builder.sub(left, ir.Constant(_I64, 1))
            for phi, first, then in (
                (left, panels, following),
                (to, target, builder.add(to, panel_bytes)),
                (at, source, builder.add(at, step)),
                (check, zero, found),
            ):
                phi.add_incoming(first, entry)
                phi.add_incoming(then, loop)
            builder.cbranch(builder.icmp_signed(">", following, ir.Constant(_I64, 0)), loop, done)
            builder.position_at_end(done)
            return [found]

        return per_format(builder, code, WRITABLE, body, [vec.llvm])[0]

    return vec(lanes, *(types.int64,) * 5), codegen


def _block_type(lanes):
    return types.UniTuple(lanes.vector, lanes.width)


def _address_of(builder, addresses, index, offset):
    slot = address_as(builder, addresses, _I64, ir.Constant(_I64, index))
    return builder.add(builder.load(slot), offset)


@intrinsic
def load_rows(_context, lanes, addresses, offset, code):
    """W vectors of a storage format: vector i from `addresses[i] + offset`."""
    block, vec = _block_type(lanes), lanes.vector

    def codegen(context, builder, sig, args):
        def body(c):
            where = (_address_of(builder, args[1], i, args[2]) for i in range(vec.width))
            return [widen(builder, c, address, vec.element, vec.width) for address in where]

        rows = per_format(builder, args[3], READABLE, body, [vec.llvm] * vec.width)
        return cgutils.pack_array(builder, rows)

    return block(lanes, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_rows(_context, lanes, addresses, offset, code, block):
    """Vector i rounded to a storage format at `addresses[i] + offset`."""

    def codegen(context, builder, sig, args):
        def body(c):
            for i, row in enumerate(cgutils.unpack_tuple(builder, args[4])):
                narrow(builder, c, _address_of(builder, args[1], i, args[2]), row)

        per_format(builder, args[3], WRITABLE, body)

    return types.void(lanes, types.int64, types.int64, types.int64, block), codegen


@intrinsic
def add_rows(_context, lanes, addresses, offset, block):
    """Vector i added to the accumulation-type memory at `addresses[i] + offset`, in order: addresses may coincide."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        for i, row in enumerate(cgutils.unpack_tuple(builder, args[3])):
            pointer = address_as(builder, _address_of(builder, args[1], i, args[2]), vec.llvm)
            builder.store(builder.fadd(builder.load(pointer, align=4), row), pointer, align=4)

    return types.void(lanes, types.int64, types.int64, block), codegen


@intrinsic
def load_block(_context, lanes, address, stride):
    """W vectors of the accumulation type, `stride` bytes apart."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        starts = [builder.add(args[1], builder.mul(args[2], ir.Constant(_I64, i))) for i in range(vec.width)]
        return cgutils.pack_array(builder, [builder.load(address_as(builder, s, vec.llvm), align=4) for s in starts])

    return _block_type(lanes)(lanes, types.int64, types.int64), codegen


@intrinsic
def store_block(_context, lanes, address, stride, block):
    """W vectors of the accumulation type stored `stride` bytes apart."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        for i, row in enumerate(cgutils.unpack_tuple(builder, args[3])):
            start = builder.add(args[1], builder.mul(args[2], ir.Constant(_I64, i)))
            builder.store(row, address_as(builder, start, vec.llvm), align=4)

    return types.void(lanes, types.int64, types.int64, block), codegen


@intrinsic
def transpose(_context, block):
    """The W x W block with rows and columns exchanged: log2(W) rounds of two-input shuffles."""
    width = block.count

    def codegen(context, builder, sig, args):
        rows = list(cgutils.unpack_tuple(builder, args[0]))
        step = 1
        while step < width:
            columns = range(width)
            low = [j if not j & step else width + j - step for j in columns]
            high = [j + step if not j & step else width + j for j in columns]
            masks = [ir.Constant(ir.VectorType(_I32, width), order) for order in (low, high)]
            for i in (i for i in range(width) if not i & step):
                pair = rows[i], rows[i | step]
                rows[i], rows[i | step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
            step *= 2
        return cgutils.pack_array(builder, rows)

    return block(block), codegen
