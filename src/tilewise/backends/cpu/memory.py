"""Reading and writing memory by address: scalars, vectors, storage formats, W x W blocks, records, atomics.

Storage formats (`F32` ... `U8`) are run-time codes: one compiled kernel reads every dtype, widening as it loads and
rounding to nearest even as it stores.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import Vector, emit_fma

F32, BF16, F16, F64, U8 = range(5)  # storage formats; indexes _FORMAT_BYTES

_I64, _I32 = ir.IntType(64), ir.IntType(32)


_FORMAT_BYTES = (4, 2, 2, 8, 1)


def _at(builder, address, llvm_type, element_offset=None):
    pointer = builder.inttoptr(address, llvm_type.as_pointer())
    return pointer if element_offset is None else builder.gep(pointer, [element_offset])


# ---- scalars ---------------------------------------------------------------------------------------------------------


def _scalar_access(kind):
    """The pair get(address, index), put(address, index, value) for one Numba scalar type."""
    llvm = {types.int64: _I64, types.int32: _I32}[kind]

    @intrinsic
    def get(_context, address, index):
        def codegen(context, builder, sig, args):
            return builder.load(_at(builder, args[0], llvm, args[1]))

        return kind(types.int64, types.int64), codegen

    @intrinsic
    def put(_context, address, index, value):
        def codegen(context, builder, sig, args):
            builder.store(args[2], _at(builder, args[0], llvm, args[1]))

        return types.void(types.int64, types.int64, kind), codegen

    return get, put


get_i64, put_i64 = _scalar_access(types.int64)
get_i32, put_i32 = _scalar_access(types.int32)


@intrinsic
def get_real(_context, lanes, address, index):
    """Element `index` of an array of the accumulation type."""
    llvm = lanes.vector.element

    def codegen(context, builder, sig, args):
        return builder.load(_at(builder, args[1], llvm, args[2]))

    return lanes.scalar(lanes, types.int64, types.int64), codegen


@intrinsic
def put_real(_context, lanes, address, index, value):
    """Set element `index` of an array of the accumulation type."""
    llvm = lanes.vector.element

    def codegen(context, builder, sig, args):
        builder.store(args[3], _at(builder, args[1], llvm, args[2]))

    return types.void(lanes, types.int64, types.int64, lanes.scalar), codegen


# ---- vectors of the accumulation type and of int32 -------------------------------------------------------------------


def _vector_access(vector_of):
    @intrinsic
    def load(_context, lanes, address):
        vec = vector_of(lanes)

        def codegen(context, builder, sig, args):
            return builder.load(_at(builder, args[1], vec.llvm), align=4)

        return vec(lanes, types.int64), codegen

    @intrinsic
    def store(_context, lanes, address, value):
        vec = vector_of(lanes)

        def codegen(context, builder, sig, args):
            builder.store(args[2], _at(builder, args[1], vec.llvm), align=4)

        return types.void(lanes, types.int64, vec), codegen

    return load, store


load, store = _vector_access(lambda lanes: lanes.vector)
load_i32, _ = _vector_access(lambda lanes: Vector("i32", lanes.width))
load_u32, _ = _vector_access(lambda lanes: Vector("u32", lanes.width))


# ---- storage formats -------------------------------------------------------------------------------------------------


def _vectorised(scalar, width):
    return ir.VectorType(scalar, width) if width else scalar


def _constant(llvm_type, value):
    count = getattr(llvm_type, "count", None)
    return ir.Constant(llvm_type, value if count is None else [value] * count)


def _widen(builder, code, address, real, width):
    """Load `width` elements (0: a scalar) of a format as `real`."""
    raw_type = {F32: ir.FloatType(), BF16: ir.IntType(16), F16: ir.HalfType(), F64: ir.DoubleType(), U8: ir.IntType(8)}
    raw = builder.load(_at(builder, address, _vectorised(raw_type[code], width)), align=1)
    target = _vectorised(real, width)
    if code == BF16:
        bits = builder.zext(raw, _vectorised(_I32, width))
        single = _vectorised(ir.FloatType(), width)
        raw = builder.bitcast(builder.shl(bits, _constant(bits.type, 16)), single)
    if code == U8:
        return builder.uitofp(raw, target)
    if raw.type == target:
        return raw
    return builder.fptrunc(raw, target) if code == F64 else builder.fpext(raw, target)


def _narrow(builder, code, address, value):
    """Store a value (scalar or vector) in a format, rounding to nearest even."""
    width = getattr(value.type, "count", 0)
    target = _vectorised({F16: ir.HalfType(), F64: ir.DoubleType()}.get(code, ir.FloatType()), width)
    if code == F64:
        value = value if value.type == target else builder.fpext(value, target)
    else:
        single = _vectorised(ir.FloatType(), width)  # fp64 to fp16 has no instruction: by way of fp32
        for narrower in (single, target):
            if value.type not in (narrower, target):
                value = builder.fptrunc(value, narrower)
    if code == BF16:
        integers = _vectorised(_I32, width)
        bits = builder.bitcast(value, integers)
        odd = builder.and_(builder.lshr(bits, _constant(integers, 16)), _constant(integers, 1))
        rounded = builder.add(builder.add(bits, _constant(integers, 0x7FFF)), odd)
        quiet_nan = _constant(integers, 0x7FC00000)
        bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet_nan, rounded)
        value = builder.trunc(builder.lshr(bits, _constant(integers, 16)), _vectorised(ir.IntType(16), width))
    builder.store(value, _at(builder, address, value.type), align=1)


def _per_format(builder, code, codes, body, results=()):
    """Emit `body(format)` for each of `codes` under a switch on the run-time `code`; phis of what the bodies return."""
    function, done = builder.function, builder.append_basic_block("format_done")
    blocks = [function.append_basic_block(f"format_{c}") for c in codes]
    switch = builder.switch(code, blocks[0])
    for c, block in zip(codes[1:], blocks[1:], strict=True):
        switch.add_case(ir.Constant(_I64, c), block)
    incoming = []
    for c, block in zip(codes, blocks, strict=True):
        builder.position_at_end(block)
        incoming.append((body(c), builder.block))
        builder.branch(done)
    builder.position_at_end(done)
    phis = [builder.phi(t) for t in results]
    for values, block in incoming:
        for phi, value in zip(phis, values or (), strict=True):
            phi.add_incoming(value, block)
    return phis


_READABLE, _WRITABLE = (F32, BF16, F16, F64, U8), (F32, BF16, F16, F64)


@intrinsic
def format_bytes(_context, code):
    """Bytes of one element of a storage format."""

    def codegen(context, builder, sig, args):
        size = ir.Constant(_I64, _FORMAT_BYTES[0])
        for c, other in enumerate(_FORMAT_BYTES[1:], 1):
            size = builder.select(builder.icmp_signed("==", args[0], ir.Constant(_I64, c)), ir.Constant(_I64, other), size)
        return size

    return types.int64(types.int64), codegen


@intrinsic
def load_scalar(_context, lanes, address, code):
    """One element of a storage format as the accumulation type."""
    real = lanes.vector.element

    def codegen(context, builder, sig, args):
        return _per_format(
            builder, args[2], _READABLE, lambda c: [_widen(builder, c, args[1], real, 0)], [real]
        )[0]

    return lanes.scalar(lanes, types.int64, types.int64), codegen


@intrinsic
def load_format(_context, lanes, address, code):
    """W consecutive elements of a storage format as a vector."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        return _per_format(
            builder, args[2], _WRITABLE, lambda c: [_widen(builder, c, args[1], vec.element, vec.width)], [vec.llvm]
        )[0]

    return vec(lanes, types.int64, types.int64), codegen


@intrinsic
def store_scalar(_context, lanes, address, code, value):
    """Round one value to a storage format."""

    def codegen(context, builder, sig, args):
        _per_format(builder, args[2], _WRITABLE, lambda c: _narrow(builder, c, args[1], args[3]))

    return types.void(lanes, types.int64, types.int64, lanes.scalar), codegen


@intrinsic
def store_format(_context, lanes, address, code, value):
    """Round W values to a storage format, consecutively."""

    def codegen(context, builder, sig, args):
        _per_format(builder, args[2], _WRITABLE, lambda c: _narrow(builder, c, args[1], args[3]))

    return types.void(lanes, types.int64, types.int64, lanes.vector), codegen


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
            step = ir.Constant(_I64, 2 * vec.width * _FORMAT_BYTES[c])
            entry, loop, done = builder.block, builder.append_basic_block("panel"), builder.append_basic_block("copied")
            builder.branch(loop)
            builder.position_at_end(loop)
            left, to, at = (builder.phi(_I64) for _ in range(3))
            check = builder.phi(vec.llvm)
            found = check
            for i in range(2):
                offset = ir.Constant(_I64, i * vec.width * _FORMAT_BYTES[c])
                value = _widen(builder, c, builder.add(at, offset), vec.element, vec.width)
                builder.store(value, _at(builder, builder.add(to, ir.Constant(_I64, i * half)), vec.llvm), align=4)
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

        return _per_format(builder, code, _WRITABLE, body, [vec.llvm])[0]

    return vec(lanes, *(types.int64,) * 5), codegen


@intrinsic
def prefetch(_context, address):
    """Ask for the cache line at an address, into the second-level cache."""

    def codegen(context, builder, sig, args):
        pointer = _at(builder, args[0], ir.IntType(8))
        numbers = [ir.Constant(_I32, n) for n in (0, 2, 1)]  # read, moderate locality, data
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [pointer, *numbers])

    return types.void(types.int64), codegen


# ---- W x W blocks ----------------------------------------------------------------------------------------------------


def _block_type(lanes):
    return types.UniTuple(lanes.vector, lanes.width)


def _address_of(builder, addresses, index, offset):
    slot = _at(builder, addresses, _I64, ir.Constant(_I64, index))
    return builder.add(builder.load(slot), offset)


@intrinsic
def load_rows(_context, lanes, addresses, offset, code):
    """W vectors of a storage format: vector i from `addresses[i] + offset`."""
    block, vec = _block_type(lanes), lanes.vector

    def codegen(context, builder, sig, args):
        def body(c):
            where = (_address_of(builder, args[1], i, args[2]) for i in range(vec.width))
            return [_widen(builder, c, address, vec.element, vec.width) for address in where]

        rows = _per_format(builder, args[3], _READABLE, body, [vec.llvm] * vec.width)
        return cgutils.pack_array(builder, rows)

    return block(lanes, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_rows(_context, lanes, addresses, offset, code, block):
    """Vector i rounded to a storage format at `addresses[i] + offset`."""

    def codegen(context, builder, sig, args):
        def body(c):
            for i, row in enumerate(cgutils.unpack_tuple(builder, args[4])):
                _narrow(builder, c, _address_of(builder, args[1], i, args[2]), row)

        _per_format(builder, args[3], _WRITABLE, body)

    return types.void(lanes, types.int64, types.int64, types.int64, block), codegen


@intrinsic
def add_rows(_context, lanes, addresses, offset, block):
    """Vector i added to the accumulation-type memory at `addresses[i] + offset`, in order: addresses may coincide."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        for i, row in enumerate(cgutils.unpack_tuple(builder, args[3])):
            pointer = _at(builder, _address_of(builder, args[1], i, args[2]), vec.llvm)
            builder.store(builder.fadd(builder.load(pointer, align=4), row), pointer, align=4)

    return types.void(lanes, types.int64, types.int64, block), codegen


@intrinsic
def load_block(_context, lanes, address, stride):
    """W vectors of the accumulation type, `stride` bytes apart."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        starts = [builder.add(args[1], builder.mul(args[2], ir.Constant(_I64, i))) for i in range(vec.width)]
        return cgutils.pack_array(builder, [builder.load(_at(builder, s, vec.llvm), align=4) for s in starts])

    return _block_type(lanes)(lanes, types.int64, types.int64), codegen


@intrinsic
def store_block(_context, lanes, address, stride, block):
    """W vectors of the accumulation type stored `stride` bytes apart."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        for i, row in enumerate(cgutils.unpack_tuple(builder, args[3])):
            start = builder.add(args[1], builder.mul(args[2], ir.Constant(_I64, i)))
            builder.store(row, _at(builder, start, vec.llvm), align=4)

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


# ---- records and atomics ---------------------------------------------------------------------------------------------


@intrinsic
def record_at(_context, address, dtype):
    """The structured record (a numpy dtype) at an address."""
    record = dtype.dtype

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64, dtype), codegen


@intrinsic
def take_ticket(_context, address):
    """The int64 at an address before it is atomically incremented."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _at(builder, args[0], _I64), ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def atomic_max(_context, lanes, address, index, value):
    """Raise element `index` of an accumulation-type array to at least `value`: the same in any order."""
    llvm = lanes.vector.element

    def codegen(context, builder, sig, args):
        builder.atomic_rmw("fmax", _at(builder, args[1], llvm, args[2]), args[3], "monotonic")

    return types.void(lanes, types.int64, types.int64, lanes.scalar), codegen
