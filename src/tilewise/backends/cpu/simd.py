"""Vectors as Numba values: types, operators and the few functions the kernels need, lowered to LLVM vector IR.

A kernel names its accumulation type and vector width by one compile-time value, `Lanes`; every function takes it (or a
vector) first, so that one source serves fp32 and fp64 on any vector width. Addresses are plain int64.
"""

import operator
from dataclasses import dataclass

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model, typeof_impl

# Helpers with one caller, and tiny ones, become part of their caller: each separate function costs compile time.
inlined = njit(inline="always")

# Query rows of a panel, in vectors: 4 x 3 accumulators fill the 16 registers of AVX2; AMX takes 32 rows.
PANEL_VECTORS = {"fma": 3, "amx": 2}
KEY_STEP = {"fma": 4, "amx": 32}  # keys of scores at once: what a panel needs is rounded out to multiples
GRAD_STEP = {"fma": 12, "amx": 32}  # the same for all micro-kernels of the backward pass

# (2^r - 1) / r on [-1/2, 1/2], minimax (Remez); error 7.5e-9 and 1.2e-17
_EXP2_POLY = {
    32: (0.693147188029, 0.240226510842, 0.0555035710549, 0.00961803077074, 0.00133908668598, 0.000154697351565),
    64: (
        *(0.69314718055994530909, 0.24022650695910098223, 0.055504108664821659773, 0.0096181291076068869668),
        *(0.0013333558146395995211, 0.00015403530441738292431, 0.000015252733853289476584, 1.3215442586728663638e-6),
        *(1.0178051724308302769e-7, 7.0725861612307770655e-9, 4.4566760308267050217e-10),
    ),
}
_MANTISSA_BITS, _EXPONENT_BIAS = {32: 23, 64: 52}, {32: 127, 64: 1023}


@dataclass(frozen=True)
class Lanes:
    """Accumulation type, vector width, and what multiplies matrices: "fma", or "amx" for bfloat16.

    `sources` (a hash) only makes Numba's disk cache notice edits.
    """

    bits: int
    width: int
    sources: str = ""
    products: str = "fma"

    def __post_init__(self):
        if self.bits not in (32, 64) or self.width not in (2, 4, 8, 16):
            raise ValueError(f"no vectors of {self.width} x {self.bits} bits")
        if self.products not in PANEL_VECTORS or (self.products == "amx" and (self.bits, self.width) != (32, 16)):
            raise ValueError(f"no products {self.products!r} with vectors of {self.width} x {self.bits} bits")

    @property
    def name(self) -> str:
        """What kernels with these lanes are called."""
        return "bf16 AMX" if self.products == "amx" else f"fp{self.bits}"

    @property
    def panel(self) -> int:
        """Query rows of one panel."""
        return PANEL_VECTORS[self.products] * self.width

    @property
    def key_step(self) -> int:
        """Key rows of a tile are followed by as many zeros."""
        return KEY_STEP[self.products]

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element of packed q, k, v and do."""
        return 2 if self.products == "amx" else self.bits // 8

    @property
    def grad_step(self) -> int:
        """Key rows of a backward tile are padded to multiples of this."""
        return GRAD_STEP[self.products]


class LanesType(types.Type):
    """The Numba type of a `Lanes`: no run-time content."""

    def __init__(self, lanes: Lanes):
        self.bits, self.width, self.products, self.panel = lanes.bits, lanes.width, lanes.products, lanes.panel
        self.key_step, self.grad_step, self.operand_bytes = lanes.key_step, lanes.grad_step, lanes.operand_bytes
        super().__init__(f"Lanes({lanes.bits}, {lanes.width}, {lanes.products})")

    @property
    def scalar(self):
        return types.float32 if self.bits == 32 else types.float64

    @property
    def vector(self):
        return Vector(f"f{self.bits}", self.width)


class Vector(types.Type):
    """`width` elements of kind f32, f64, i32, u32 or mask (one bit)."""

    def __init__(self, kind, width):
        self.kind, self.width = kind, width
        super().__init__(f"Vector({kind}, {width})")

    @property
    def element(self):
        kinds = {"f32": ir.FloatType(), "f64": ir.DoubleType(), "mask": ir.IntType(1)}
        return kinds.get(self.kind, ir.IntType(32))

    @property
    def llvm(self):
        return ir.VectorType(self.element, self.width)

    @property
    def is_float(self):
        return self.kind[0] == "f"

    @property
    def bits(self):
        return int(self.kind[1:])

    @property
    def mask(self):
        return Vector("mask", self.width)


@typeof_impl.register(Lanes)
def _typeof_lanes(value, _context):
    return LanesType(value)


@lower_constant(LanesType)
def _lower_lanes(context, _builder, _type, _value):
    return context.get_dummy_value()


register_model(LanesType)(models.OpaqueModel)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


# ---- operators -------------------------------------------------------------------------------------------------------


def _float_or_int(float_op, int_op):
    return lambda b, vec, x, y: getattr(b, float_op if vec.is_float else int_op)(x, y)


def _compare(symbol):
    def emit(b, vec, x, y):
        if vec.is_float:
            compare = b.fcmp_unordered if symbol == "!=" else b.fcmp_ordered  # NaN differs from itself
            return compare(symbol, x, y)
        return (b.icmp_unsigned if vec.kind == "u32" else b.icmp_signed)(symbol, x, y)

    return emit


_ARITHMETIC = {
    operator.add: _float_or_int("fadd", "add"),
    operator.sub: _float_or_int("fsub", "sub"),
    operator.mul: _float_or_int("fmul", "mul"),
    operator.truediv: lambda b, vec, x, y: b.fdiv(x, y),
    operator.xor: lambda b, vec, x, y: b.xor(x, y),
    operator.and_: lambda b, vec, x, y: b.and_(x, y),
    operator.rshift: lambda b, vec, x, y: b.lshr(x, y),
}
_COMPARISONS = {
    operator.lt: _compare("<"),
    operator.le: _compare("<="),
    operator.gt: _compare(">"),
    operator.ge: _compare(">="),
    operator.eq: _compare("=="),
    operator.ne: _compare("!="),
}


def _spread(builder, vec, scalar):
    """A scalar LLVM value in every element."""
    one = builder.insert_element(ir.Constant(vec.llvm, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vec.width), [0] * vec.width)
    return builder.shuffle_vector(one, ir.Constant(vec.llvm, ir.Undefined), zeros)


def _as_vector(context, builder, vec, value, value_type):
    if isinstance(value_type, Vector):
        return value
    if vec.is_float:
        scalar = context.cast(builder, value, value_type, types.float32 if vec.kind == "f32" else types.float64)
    else:
        scalar = builder.trunc(context.cast(builder, value, value_type, types.int64), ir.IntType(32))
    return _spread(builder, vec, scalar)


def _register_operator(op, emit, gives_mask):
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            vec = next((t for t in args if isinstance(t, Vector)), None)
            if vec is None or any(t != vec and not isinstance(t, types.Number) for t in args):
                return None
            return signature(vec.mask if gives_mask else vec, *args)

    infer_global(op)(Template)

    def lower(context, builder, sig, args):
        vec = next(t for t in sig.args if isinstance(t, Vector))
        x, y = (_as_vector(context, builder, vec, v, t) for v, t in zip(args, sig.args, strict=True))
        return emit(builder, vec, x, y)

    for pair in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(op, *pair)(lower)


for _op, _emit in _ARITHMETIC.items():
    _register_operator(_op, _emit, gives_mask=False)
for _op, _emit in _COMPARISONS.items():
    _register_operator(_op, _emit, gives_mask=True)


# ---- functions of vectors --------------------------------------------------------------------------------------------


def _call(builder, name, result, args):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [a.type for a in args]), f"llvm.{name}"
    )
    return builder.call(function, args)


def emit_fma(builder, x, y, z):
    """x * y + z of LLVM vectors, rounded once."""
    element = "f32" if isinstance(x.type.element, ir.FloatType) else "f64"
    return _call(builder, f"fma.v{x.type.count}{element}", x.type, [x, y, z])


def _compile_time(number, doc):
    """A function of `lanes` that is a constant to the compiler."""

    def constant(_context, lanes):
        def codegen(context, builder, sig, args):
            return ir.Constant(ir.IntType(64), number(lanes))

        return types.int64(lanes), codegen

    constant.__doc__ = doc
    return intrinsic(constant)


vector_width = _compile_time(lambda lanes: lanes.width, "Elements of one vector.")
element_bytes = _compile_time(lambda lanes: lanes.bits // 8, "Bytes of one accumulation element.")
panel_width = _compile_time(lambda lanes: lanes.panel, "QP, the query rows of a panel.")
key_step = _compile_time(lambda lanes: lanes.key_step, "Keys of scores at once.")
operand_bytes = _compile_time(lambda lanes: lanes.operand_bytes, "Bytes of one element of packed q, k, v and do.")
grad_step = _compile_time(lambda lanes: lanes.grad_step, "Keys at once of all micro-kernels of the backward pass.")


@intrinsic
def runtime(_context, x):
    """A compile-time integer as an ordinary one: keeps Numba from compiling a variant of the callee for it."""
    return types.int64(types.int64), lambda context, builder, sig, args: args[0]


def _splat(vector_of):
    """A function `(lanes, x)`: the vector `vector_of(lanes)` with `x` everywhere."""

    @intrinsic
    def splat(_context, lanes, x):
        vec = vector_of(lanes)

        def codegen(context, builder, sig, args):
            return _as_vector(context, builder, vec, args[1], sig.args[1])

        return vec(lanes, x), codegen

    return splat


splat = _splat(lambda lanes: lanes.vector)
splat_i32 = _splat(lambda lanes: Vector("i32", lanes.width))
splat_u32 = _splat(lambda lanes: Vector("u32", lanes.width))  # the low half of `x`


@intrinsic
def fma(_context, x, y, z):
    """x * y + z, rounded once."""
    return x(x, x, x), lambda context, builder, sig, args: emit_fma(builder, *args)


@intrinsic
def select(_context, mask, x, y):
    """`x` where the mask holds, else `y`: what is not selected cannot leak, NaN or not."""
    return x(mask, x, x), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def absolute(_context, x):
    """|x|."""
    return x(x), lambda context, builder, sig, args: _call(builder, f"fabs.v{x.width}{x.kind}", x.llvm, [args[0]])


@intrinsic
def copy_sign(_context, x, sign):
    """|x| with the sign of `sign`."""
    return x(x, x), lambda context, builder, sig, args: _call(
        builder, f"copysign.v{x.width}{x.kind}", x.llvm, list(args)
    )


@intrinsic
def any_true(_context, mask):
    """Whether the mask holds anywhere."""

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], ir.IntType(mask.width))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(mask), codegen


@intrinsic
def total(_context, x):
    """The sum of all elements, pairwise."""

    def codegen(context, builder, sig, args):
        value, width = args[0], x.width
        while width > 1:
            width //= 2
            order = [ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(s, s + width))) for s in (0, width)]
            undefined = ir.Constant(value.type, ir.Undefined)
            value = builder.fadd(*(builder.shuffle_vector(value, undefined, indices) for indices in order))
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return (types.float32 if x.kind == "f32" else types.float64)(x), codegen


def _exp2_parts(builder, vec, x, factor):
    """(2^n, 2^r - 1) with factor x = n + r, |r| <= 1/2. Below the smallest exponent 2^n is 0; NaN passes through r.

    The product with `factor` is never rounded: it is part of the two fma that split it. That is a third faster than
    multiplying first, too.
    """
    bits, mantissa, bias = vec.bits, _MANTISSA_BITS[vec.bits], _EXPONENT_BIAS[vec.bits]
    integers = ir.VectorType(ir.IntType(bits), vec.width)

    def constant(value):
        return ir.Constant(vec.llvm, [value] * vec.width)

    lowest = builder.fdiv(constant(float(-bias)), factor)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)  # in this order NaN stays
    magic = constant(1.5 * 2.0**mantissa + bias)  # the sum's low bits are n + bias
    shifted = emit_fma(builder, x, factor, magic)
    exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [mantissa] * vec.width))
    r = emit_fma(builder, x, factor, builder.fneg(builder.fsub(shifted, magic)))
    *rest, top = _EXP2_POLY[bits]
    poly = constant(top)
    for coefficient in reversed(rest):
        poly = emit_fma(builder, poly, r, constant(coefficient))
    return builder.bitcast(exponent, vec.llvm), builder.fmul(poly, r)


def _one(vec):
    return ir.Constant(vec.llvm, [1.0] * vec.width)


@intrinsic
def exp2(_context, x):
    """2^x for x <= 127: within 1 ulp, exactly 0 below the normal numbers, NaN for NaN."""

    def codegen(context, builder, sig, args):
        power, fraction = _exp2_parts(builder, x, args[0], _one(x))
        return emit_fma(builder, power, fraction, power)

    return x(x), codegen


@intrinsic
def exp2_scaled(_context, x, factor):
    """2^(factor x) like `exp2`, for factor > 0, the product unrounded."""

    def codegen(context, builder, sig, args):
        power, fraction = _exp2_parts(builder, x, *args)
        return emit_fma(builder, power, fraction, power)

    return x(x, factor), codegen


@intrinsic
def exp2m1(_context, x):
    """2^x - 1 for 0 <= x <= 127, relatively accurate near 0."""

    def codegen(context, builder, sig, args):
        power, fraction = _exp2_parts(builder, x, args[0], _one(x))
        return emit_fma(builder, power, fraction, builder.fsub(power, _one(x)))

    return x(x), codegen
