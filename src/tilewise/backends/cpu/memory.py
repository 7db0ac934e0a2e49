"""Reading and writing memory by address: scalars, vectors, storage formats, records, atomics.

Storage formats (`F32` ... `U8`) are run-time codes: one compiled kernel reads every dtype, widening as it loads and
rounding to nearest even as it stores.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import Vector

F32, BF16, F16, F64, U8 = range(5)  # storage formats; indexes FORMAT_BYTES

_I64, _I32 = ir.IntType(64), ir.IntType(32)


FORMAT_BYTES = (4, 2, 2, 8, 1)


def address_as(builder, address, llvm_type, element_offset=None):
    pointer = builder.inttoptr(address, llvm_type.as_pointer())
    return pointer if element_offset is None else builder.gep(pointer, [element_offset])


# ---- scalars ---------------------------------------------------------------------------------------------------------


def _scalar_access(kind):
    """The pair get(address, index), put(address, index, value) for one Numba scalar type."""
    llvm = {types.int64: _I64, types.int32: _I32, types.int16: ir.IntType(16)}[kind]

    @intrinsic
    def get(_context, address, index):
        def codegen(context, builder, sig, args):
            return builder.load(address_as(builder, args[0], llvm, args[1]))

        return kind(types.int64, types.int64), codegen

    @intrinsic
    def put(_context, address, index, value):
        def codegen(context, builder, sig, args):
            builder.store(args[2], address_as(builder, args[0], llvm, args[1]))

        return types.void(types.int64, types.int64, kind), codegen

    return get, put


get_i64, put_i64 = _scalar_access(types.int64)
get_i32, put_i32 = _scalar_access(types.int32)
get_half, put_half = _scalar_access(types.int16)


@intrinsic
def get_real(_context, lanes, address, index):
    """Element `index` of an array of the accumulation type."""
    llvm = lanes.vector.element

    def codegen(context, builder, sig, args):
        return builder.load(address_as(builder, args[1], llvm, args[2]))

    return lanes.scalar(lanes, types.int64, types.int64), codegen


@intrinsic
def put_real(_context, lanes, address, index, value):
    """Set element `index` of an array of the accumulation type."""
    llvm = lanes.vector.element

    def codegen(context, builder, sig, args):
        builder.store(args[3], address_as(builder, args[1], llvm, args[2]))

    return types.void(lanes, types.int64, types.int64, lanes.scalar), codegen


# ---- vectors of the accumulation type and of int32 -------------------------------------------------------------------


def _vector_access(vector_of):
    @intrinsic
    def load(_context, lanes, address):
        vec = vector_of(lanes)

        def codegen(context, builder, sig, args):
            return builder.load(address_as(builder, args[1], vec.llvm), align=4)

        return vec(lanes, types.int64), codegen

    @intrinsic
    def store(_context, lanes, address, value):
        vec = vector_of(lanes)

        def codegen(context, builder, sig, args):
            builder.store(args[2], address_as(builder, args[1], vec.llvm), align=4)

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


def widen(builder, code, address, real, width):
    """Load `width` elements (0: a scalar) of a format as `real`."""
    raw_type = {F32: ir.FloatType(), BF16: ir.IntType(16), F16: ir.HalfType(), F64: ir.DoubleType(), U8: ir.IntType(8)}
    raw = builder.load(address_as(builder, address, _vectorised(raw_type[code], width)), align=1)
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


def narrow(builder, code, address, value):
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
    builder.store(value, address_as(builder, address, value.type), align=1)


def per_format(builder, code, codes, body, results=()):
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


READABLE, WRITABLE = (F32, BF16, F16, F64, U8), (F32, BF16, F16, F64)


@intrinsic
def format_bytes(_context, code):
    """Bytes of one element of a storage format."""

    def codegen(context, builder, sig, args):
        size = ir.Constant(_I64, FORMAT_BYTES[0])
        for c, other in enumerate(FORMAT_BYTES[1:], 1):
            size = builder.select(
                builder.icmp_signed("==", args[0], ir.Constant(_I64, c)), ir.Constant(_I64, other), size
            )
        return size

    return types.int64(types.int64), codegen


@intrinsic
def load_scalar(_context, lanes, address, code):
    """One element of a storage format as the accumulation type."""
    real = lanes.vector.element

    def codegen(context, builder, sig, args):
        return per_format(builder, args[2], READABLE, lambda c: [widen(builder, c, args[1], real, 0)], [real])[0]

    return lanes.scalar(lanes, types.int64, types.int64), codegen


@intrinsic
def load_format(_context, lanes, address, code):
    """W consecutive elements of a storage format as a vector."""
    vec = lanes.vector

    def codegen(context, builder, sig, args):
        return per_format(
            builder, args[2], WRITABLE, lambda c: [widen(builder, c, args[1], vec.element, vec.width)], [vec.llvm]
        )[0]

    return vec(lanes, types.int64, types.int64), codegen


@intrinsic
def store_scalar(_context, lanes, address, code, value):
    """Round one value to a storage format."""

    def codegen(context, builder, sig, args):
        per_format(builder, args[2], WRITABLE, lambda c: narrow(builder, c, args[1], args[3]))

    return types.void(lanes, types.int64, types.int64, lanes.scalar), codegen


@intrinsic
def store_format(_context, lanes, address, code, value):
    """Round W values to a storage format, consecutively."""

    def codegen(context, builder, sig, args):
        per_format(builder, args[2], WRITABLE, lambda c: narrow(builder, c, args[1], args[3]))

    return types.void(lanes, types.int64, types.int64, lanes.vector), codegen


@intrinsic
def prefetch(_context, address):
    """Ask for the cache line at an address, into the second-level cache."""

    def codegen(context, builder, sig, args):
        pointer = address_as(builder, args[0], ir.IntType(8))
        numbers = [ir.Constant(_I32, n) for n in (0, 2, 1)]  # read, moderate locality, data
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [pointer, *numbers])

    return types.void(types.int64), codegen


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
        return builder.atomic_rmw("add", address_as(builder, args[0], _I64), ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def atomic_max(_context, lanes, address, index, value):
    """Raise element `index` of an accumulation-type array to at least `value`: the same in any order."""
    llvm = lanes.vector.element

    def codegen(context, builder, sig, args):
        builder.atomic_rmw("fmax", address_as(builder, args[1], llvm, args[2]), args[3], "monotonic")

    return types.void(lanes, types.int64, types.int64, lanes.scalar), codegen
