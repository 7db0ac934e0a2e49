"""Pieces of a softmax on tiles that live in registers, as products on Hopper leave them: no data crosses threads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.device.portable import keep_interval


@gluon.jit
def exp2_early(x):
    """2^x computed where it is written: the compiler moves plain exponentials behind the wait for a product."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def halves(x):
    """The left and the right columns."""
    ROWS: gl.constexpr = x.type.shape[0]
    COLUMNS: gl.constexpr = x.type.shape[1]
    return gl.split(x.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))


@gluon.jit
def joined(left, right, like):
    """The whole of two halves, in the layout of `like`."""
    ROWS: gl.constexpr = left.type.shape[0]
    COLUMNS: gl.constexpr = 2 * left.type.shape[1]
    whole = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(whole, like.type.layout, assert_trivial=True)


@gluon.jit
def row_tops(x):
    """The largest number of each row: first of every four columns, for in a chain over all of them each waits for the last."""
    left, right = halves(x)
    first, second = halves(left)
    third, fourth = halves(right)
    tops = gl.max(gl.maximum(gl.maximum(first, second), gl.maximum(third, fourth)), 1)
    return gl.convert_layout(tops, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def thread_sums(x):
    """Sums of rows over what each thread holds of them, (rows, 4): `gl.sum` over these is the sum of the row."""
    ROWS: gl.constexpr = x.type.shape[0]
    COLUMNS: gl.constexpr = x.type.shape[1]
    return gl.sum(gl.sum(x.reshape([ROWS, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def _parts(x):
    """(x with its columns n = 8 a + 2 t + c apart: (rows, a, t, c); 8 a + c; 2 t): the last is a thread's own, 0 to 6.

    What is the same in every thread costs no registers: the compiler knows it. An index of each column would take one.
    """
    ROWS: gl.constexpr = x.type.shape[0]
    COLUMNS: gl.constexpr = x.type.shape[1]
    parts = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    a = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return parts, 8 * a[None, :, None, None] + c[None, None, None, :], 2 * t[None, None, :, None]


@gluon.jit
def _whole(parts, like):
    ROWS: gl.constexpr = like.type.shape[0]
    COLUMNS: gl.constexpr = like.type.shape[1]
    return gl.convert_layout(parts.reshape([ROWS, COLUMNS]), like.type.layout, assert_trivial=True)


@gluon.jit
def _by_rows(x, parts):
    """One number for each row, (rows, 1, 1, 1)."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
    return gl.convert_layout(x, ROW, assert_trivial=True)[:, None, None, None]


@gluon.jit
def keep_columns(x, lo, hi):
    """x where lo <= column < hi, -inf elsewhere; lo and hi are one number for each row, or one of them is None."""
    parts, constant, own = _parts(x)
    if lo is None:
        keep = constant < _by_rows(hi, parts) - own
    elif hi is None:
        keep = constant >= _by_rows(lo, parts) - own
    else:
        keep = keep_interval(constant, _by_rows(lo, parts) - own, _by_rows(hi, parts) - own)
    return _whole(gl.where(keep, parts, float("-inf")), x)


@gluon.jit
def columns_from(start, like):
    """The numbers of the columns, the first of which is `start`, as float32 in the shape of `like`."""
    parts, constant, own = _parts(like)
    # A sum of floats stays as written; one of integers the compiler would turn round, into an index of each column.
    numbers, _ = gl.broadcast((start + own).to(gl.float32) + constant.to(gl.float32), parts)
    return _whole(numbers, like)


@gluon.constexpr_function
def _pack_asm(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def packed(x, DTYPE: gl.constexpr):
    """Neighbouring columns rounded to 16 bits, two in an int32: carried so over a loop they need no shuffling of halves."""
    ROWS: gl.constexpr = x.type.shape[0]
    COLUMNS: gl.constexpr = x.type.shape[1]
    even, odd = gl.split(x.reshape([ROWS, COLUMNS // 2, 2]))
    return gl.inline_asm_elementwise(_pack_asm(DTYPE), "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Those columns as the left operand of a product."""
    ROWS: gl.constexpr = x.type.shape[0]
    COLUMNS: gl.constexpr = 2 * x.type.shape[1]
    if DTYPE == gl.bfloat16:  # dtypes in a tuple must be literal
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def widened(p, like, DTYPE: gl.constexpr):
    """Packed weights of half the columns of `like`, and 0 in the others."""
    COLUMNS: gl.constexpr = 2 * p.shape[1]
    whole = gl.join(p, gl.zeros_like(p)).permute((0, 2, 1)).reshape([p.shape[0], COLUMNS])
    LAYOUT: gl.constexpr = packed(like, DTYPE).type.layout
    return gl.convert_layout(whole, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _rescale_asm(count):
    """Operands: `count` results, as many values, as many factors; a thread's values belong to two rows, in turns of two."""
    results, values, factors = range(count), range(count, 2 * count), range(2 * count, 3 * count)
    lines = [
        "{ .reg .pred grown, any;",
        f"setp.neu.f32 grown, ${factors[0]}, 0f3F800000;",
        f"setp.neu.or.f32 grown, ${factors[2]}, 0f3F800000, grown;",
        "vote.sync.any.pred any, grown, 0xffffffff;",
        *(f"mov.b32 ${r}, ${v};" for r, v in zip(results, values)),
        "@!any bra.uni done;",
        *(f"mul.f32 ${r}, ${v}, ${f};" for r, v, f in zip(results, values, factors)),
        "done: }",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def _rescale_constraints(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha, skipped by warps whose rows all have alpha = 1."""
    COUNT: gl.constexpr = acc.type.shape[0] * acc.type.shape[1] // (32 * gl.num_warps())
    factor, acc = gl.broadcast(alpha[:, None], acc)
    return gl.inline_asm_elementwise(
        _rescale_asm(COUNT), _rescale_constraints(COUNT), [acc, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )
