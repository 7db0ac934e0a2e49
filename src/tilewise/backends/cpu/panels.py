"""Between tensors and panels: packing (any storage format, any strides) and unpacking.

`panel`: `[row][QP]`, query rows as lanes. `tile`: column panels `[c / 2W][row][2W]` of `tile_rows` rows each.
Rows are named by arrays of addresses, so that a block may gather its rows from anywhere.
"""

from numba import njit

from .memory import (
    format_bytes,
    get_i64,
    get_real,
    load,
    load_format,
    load_scalar,
    prefetch,
    put_i64,
    put_real,
    store,
    store_format,
    store_scalar,
)
from .rows import add_rows, copy_row, load_block, load_rows, store_block, store_rows, transpose
from .simd import any_true, element_bytes, fma, panel_width, runtime, splat, total, vector_width


@njit
def gather_panel(lanes, panel, addresses, offset, step, code, first, last):
    """panel[n][lane] = the element at addresses[lane] + offset + n * step, for first <= n < last."""
    width, columns, size = vector_width(lanes), panel_width(lanes), element_bytes(lanes)
    whole = first
    if step == format_bytes(code):
        whole += (last - first) // width * width
    for strip in range(0, columns, width):
        for n in range(first, whole, width):
            block = transpose(load_rows(lanes, addresses + 8 * strip, offset + n * step, code))
            store_block(lanes, panel + (n * columns + strip) * size, columns * size, block)
        for lane in range(strip, strip + width):
            start = get_i64(addresses, lane) + offset
            for n in range(whole, last):
                put_real(lanes, panel, n * columns + lane, load_scalar(lanes, start + n * step, code))


@njit
def scatter_panel(lanes, panel, addresses, code, last):
    """The element n of the row at addresses[lane] = panel[n][lane], for n < last, rounded to a storage format."""
    width, columns, size = vector_width(lanes), panel_width(lanes), element_bytes(lanes)
    step, whole = format_bytes(code), last // width * width
    for strip in range(0, columns, width):
        for n in range(0, whole, width):
            block = transpose(load_block(lanes, panel + (n * columns + strip) * size, columns * size))
            store_rows(lanes, addresses + 8 * strip, n * step, code, block)
        for lane in range(strip, strip + width):
            for n in range(whole, last):
                value = get_real(lanes, panel, n * columns + lane)
                store_scalar(lanes, get_i64(addresses, lane) + n * step, code, value)


@njit
def scatter_add_panel(lanes, panel, addresses, offset, step, first, last):
    """The element at addresses[lane] + offset + n * step += panel[n][lane]; addresses and elements may coincide."""
    width, columns, size = vector_width(lanes), panel_width(lanes), element_bytes(lanes)
    whole = first
    if step == size:
        whole += (last - first) // width * width
    for strip in range(0, columns, width):
        for n in range(first, whole, width):
            block = transpose(load_block(lanes, panel + (n * columns + strip) * size, columns * size))
            add_rows(lanes, addresses + 8 * strip, offset + n * step, block)
        for lane in range(strip, strip + width):
            start = get_i64(addresses, lane) + offset
            for n in range(whole, last):
                element = start + n * step
                put_real(lanes, element, 0, get_real(lanes, element, 0) + get_real(lanes, panel, n * columns + lane))


@njit
def add_lane_sums(lanes, panel, target, step, first, last):
    """The element at target + n * step += the sum over lanes of panel[n]."""
    width, columns, size = vector_width(lanes), panel_width(lanes), element_bytes(lanes)
    for n in range(first, last):
        sums = load(lanes, panel + n * columns * size)
        for strip in range(width, columns, width):
            sums = sums + load(lanes, panel + (n * columns + strip) * size)
        put_real(lanes, target + n * step, 0, get_real(lanes, target + n * step, 0) + total(sums))


@njit
def fill_vectors(lanes, address, count, value):
    """Set `count` elements, a multiple of the vector width."""
    width, size = vector_width(lanes), element_bytes(lanes)
    x = splat(lanes, value)
    for i in range(0, count, width):
        store(lanes, address + i * size, x)


@njit
def copy_vectors(lanes, target, source, count):
    """Copy `count` elements, a multiple of the vector width."""
    width, size = vector_width(lanes), element_bytes(lanes)
    for i in range(0, count, width):
        store(lanes, target + i * size, load(lanes, source + i * size))


@njit
def scale_panel(lanes, panel, rows, factors):
    """panel[row][lane] *= factors[lane]."""
    width, columns, size = vector_width(lanes), panel_width(lanes), element_bytes(lanes)
    for strip in range(0, columns, width):
        factor = load(lanes, factors + strip * size)
        for row in range(rows):
            at = panel + (row * columns + strip) * size
            store(lanes, at, load(lanes, at) * factor)


@njit
def scale_vectors(lanes, address, count, scale):
    """Multiply `count` elements, a multiple of the vector width."""
    width, size = vector_width(lanes), element_bytes(lanes)
    factor = splat(lanes, scale)
    for i in range(0, count, width):
        store(lanes, address + i * size, load(lanes, address + i * size) * factor)


@njit
def multiply_panel(lanes, panel, factors, first, last):
    """panel[n][lane] *= factors[n][lane] for first <= n < last."""
    width, columns, size = vector_width(lanes), panel_width(lanes), element_bytes(lanes)
    for i in range(first * columns, last * columns, width):
        at = panel + i * size
        store(lanes, at, load(lanes, at) * load(lanes, factors + i * size))


@njit
def pack_query_panel(lanes, panel, addresses, code, dim, dim_padded, scale):
    """panel[d][lane] = scale * row[lane][d], zero beyond dim."""
    columns = panel_width(lanes)
    gather_panel(lanes, panel, addresses, runtime(0), format_bytes(code), code, runtime(0), dim)
    scale_vectors(lanes, panel, dim * columns, scale)
    fill_vectors(lanes, panel + dim * columns * element_bytes(lanes), (dim_padded - dim) * columns, 0.0)


@njit
def list_rows(addresses, start, stride, count):
    """addresses[i] = start + i * stride."""
    for i in range(count):
        put_i64(addresses, i, start + i * stride)


@njit
def prefetch_rows(start, stride, first, last, row_bytes):
    """Ask for rows [first, last), `stride` bytes apart."""
    for row in range(first, last):
        for offset in range(0, row_bytes, 64):
            prefetch(start + row * stride + offset)


@njit
def pack_tile(lanes, tile, tile_rows, addresses, count, padded, code, dim, dim_padded):
    """tile[row][c] = the row at addresses[row], zero beyond; returns whether an Inf or NaN is among the values."""
    width, size, step = vector_width(lanes), element_bytes(lanes), format_bytes(code)
    columns, whole = 2 * vector_width(lanes), dim // vector_width(lanes) * vector_width(lanes)
    zero = splat(lanes, 0.0)
    check, poison = zero, 0.0
    panels = dim // columns
    for row in range(count):
        source = get_i64(addresses, row)
        if panels > 0:
            check = check + copy_row(
                lanes, tile + row * columns * size, tile_rows * columns * size, source, panels, code
            )
        for c in range(panels * columns, whole, width):
            value = load_format(lanes, source + c * step, code)
            check = fma(value, zero, check)  # 0 stays 0 unless a value is Inf or NaN
            store(lanes, tile + ((c // columns * tile_rows + row) * columns + c % columns) * size, value)
        for c in range(whole, dim_padded, width):
            store(lanes, tile + ((c // columns * tile_rows + row) * columns + c % columns) * size, zero)
        for c in range(whole, dim):
            value = load_scalar(lanes, source + c * step, code)
            poison += value * 0.0
            put_real(lanes, tile, (c // columns * tile_rows + row) * columns + c % columns, value)
    for c in range(0, dim_padded, columns):
        start = tile + (c // columns * tile_rows + count) * columns * size
        fill_vectors(lanes, start, (padded - count) * columns, 0.0)
    return any_true(check != zero) or poison != 0.0


@njit
def unpack_tile(lanes, tile, tile_rows, count, target, stride, code, dim, scale):
    """The row at target + row * stride = scale * tile[row], rounded to a storage format."""
    width, size, step = vector_width(lanes), element_bytes(lanes), format_bytes(code)
    columns, whole = 2 * vector_width(lanes), dim // vector_width(lanes) * vector_width(lanes)
    factor = splat(lanes, scale)
    for row in range(count):
        for c in range(0, whole, width):
            at = tile + ((c // columns * tile_rows + row) * columns + c % columns) * size
            store_format(lanes, target + row * stride + c * step, code, load(lanes, at) * factor)
        for c in range(whole, dim):
            value = get_real(lanes, tile, (c // columns * tile_rows + row) * columns + c % columns)
            store_scalar(lanes, target + row * stride + c * step, code, value * scale)


@njit
def set_bad_rows_aside(lanes, tile, tile_rows, count, dim_padded, bad):
    """Zero the rows that hold an Inf or NaN and list them in `bad`; returns how many."""
    width, size, columns = vector_width(lanes), element_bytes(lanes), 2 * vector_width(lanes)
    zero, found = splat(lanes, 0.0), 0
    for row in range(count):
        check = zero
        for c in range(0, dim_padded, width):
            at = tile + ((c // columns * tile_rows + row) * columns + c % columns) * size
            check = fma(load(lanes, at), zero, check)
        if any_true(check != zero):
            put_i64(bad, found, row)
            found += 1
            for c in range(0, dim_padded, columns):
                fill_vectors(lanes, tile + (c // columns * tile_rows + row) * columns * size, columns, 0.0)
    return found
