"""AMX: each micro-kernel and each layout against torch; see test_cpu_kernels for whole passes."""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

import math

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from tilewise.backends.cpu import amx, products_amx
from tilewise.backends.cpu.host import call_lanes
from tilewise.backends.cpu.memory import load, store
from tilewise.backends.cpu.simd import Lanes

LANES = Lanes(32, 16, products="amx")
DIMS = (1, 3, 31, 32, 33, 64, 72, 111)
needs_amx = pytest.mark.skipif(not amx.usable(), reason="this machine has no AMX, or its system keeps it")


def pairs(x: Tensor) -> Tensor:
    """(K, C) as (K / 2, C, 2): two consecutive rows beside each other."""
    return x.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()


def rows_of(count: int, dim: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Rows of a larger tensor, the same padded with zeros to a multiple of 32, and their addresses."""
    x = torch.randn(count, dim + 5).bfloat16()[:, :dim]
    padded = torch.zeros(count, -(-dim // 32) * 32, dtype=torch.bfloat16)
    padded[:, :dim] = x
    return x, padded, np.array([row.data_ptr() for row in x], np.int64)


@njit
def run_product(adds, c, a, b, depth, blocks):
    amx.configure_tiles(LANES)
    if adds:
        amx.add_product(c, a, 2 * depth, 64, b, depth // 32, blocks)
    else:
        amx.set_product(c, a, 2 * depth, 64, b, depth // 32, blocks)
    amx.release_tiles(LANES)


@njit
def run_layouts(rows, columns, queries, row_pairs, at, count, tile_rows, dim, width):
    products_amx.copy_rows(LANES, rows, at, count - 3, count, dim, width)
    bad = products_amx.copy_columns(LANES, columns, tile_rows, at, count, dim, width)
    products_amx.pack_query_panel(LANES, queries, at, 1, dim, width, 1.0)
    products_amx.pack_rows(LANES, row_pairs, count, at, count, 1, dim, width)
    return bad


@njit
def run_bad_columns(columns, at, bad, count, dim, width):
    found = products_amx.copy_columns(LANES, columns, count, at, count, dim, width)
    return found, products_amx.set_bad_columns_aside(columns, count, count, width, bad)


@needs_amx
@pytest.mark.parametrize("depth", [32, 64, 160])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("adds", [False, True])
def test_products(adds, blocks, depth):
    a, b = torch.randn(32 * blocks, depth).bfloat16(), torch.randn(depth, 32).bfloat16()
    before = torch.randn(32 * blocks + 2, 32)
    c, operand = before.clone(), pairs(b)
    run_product(adds, c[1:].data_ptr(), a.data_ptr(), operand.data_ptr(), depth, blocks)
    expected = a.double() @ b.double() + adds * before[1:-1].double()
    assert (c[1:-1] - expected).abs().max() < 1e-5 * depth
    assert torch.equal(c[[0, -1]], before[[0, -1]])  # nothing beyond


@needs_amx
@pytest.mark.parametrize("dim", DIMS)
def test_layouts(dim):
    count, tile_rows = 64, 96
    _, padded, addresses = rows_of(count, dim)
    width = padded.shape[1]
    shapes = (count, width), (width, tile_rows), (width // 2, 32, 2), (width // 32, count // 2, 32, 2)
    rows, columns, queries, row_pairs = found = [torch.full(shape, 7.0, dtype=torch.bfloat16) for shape in shapes]
    assert not run_layouts(*(t.data_ptr() for t in found), addresses.ctypes.data, count, tile_rows, dim, width)
    assert torch.equal(rows[:-3], padded[:-3]) and (rows[-3:] == 0).all()
    assert torch.equal(columns[:, :count], padded.T) and (columns[:, count:] == 7).all()
    assert torch.equal(queries, pairs(padded[:32].T))
    assert torch.equal(row_pairs, torch.stack([pairs(part) for part in padded.split(32, 1)]))


@needs_amx
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dim", DIMS)
def test_bad_rows_are_found_and_set_aside(dim, poison):
    count = 64
    x, padded, addresses = rows_of(count, dim)
    x[17, dim - 1] = poison
    padded[17] = 0.0
    width = padded.shape[1]
    columns, bad = torch.zeros(width, count, dtype=torch.bfloat16), np.zeros(count, np.int64)
    where = columns.data_ptr(), addresses.ctypes.data, bad.ctypes.data
    assert run_bad_columns(*where, count, dim, width) == (True, 1)
    assert bad[0] == 17 and torch.equal(columns, padded.T)


@needs_amx
def test_weights_are_rounded():
    @njit
    def run(pairs, panel):
        products_amx.round_key_pairs(LANES, pairs, panel, 32, 96)

    weights, found = torch.rand(128, 32), torch.zeros(64, 32, 2, dtype=torch.bfloat16)
    weights[40, 3] = math.nan
    run(found.data_ptr(), weights.data_ptr())
    expected = torch.where(torch.arange(128)[:, None] // 32 % 3 > 0, weights, 0.0).bfloat16()
    torch.testing.assert_close(found, pairs(expected), rtol=0, atol=0, equal_nan=True)


@needs_amx
def test_exp2():
    @njit
    def run(x, y, count):
        for i in range(0, 4 * count, 64):
            store(LANES, y + i, amx.exp2(load(LANES, x + i)))

    x = -torch.rand(1 << 16) * 130
    x[:9] = torch.tensor([0.0, -0.0, -math.inf, math.nan, -1e-9, -1e30, -1.0, -126.0, -150.0])
    y = torch.zeros_like(x)
    run(x.data_ptr(), y.data_ptr(), len(x))
    special = torch.tensor([1.0, 1.0, 0.0, math.nan, 1.0, 0.0, 0.5, 2.0**-126, 0.0])
    torch.testing.assert_close(y[:9], special, rtol=3e-7, atol=0, equal_nan=True)
    normal = x >= -126
    torch.testing.assert_close(y[normal].double(), x[normal].double().exp2(), rtol=3e-7, atol=0)
    assert (y[x < -126] == 0).all()


def test_only_bfloat16_is_multiplied_by_amx():
    for dtype in (torch.float32, torch.float16):
        assert call_lanes(dtype, None).products == "fma"
        with pytest.raises(ValueError, match="AMX multiplies bfloat16"):
            call_lanes(dtype, LANES)
    assert (call_lanes(torch.bfloat16, None).products == "amx") == amx.usable()
    with pytest.raises(ValueError, match="no products"):
        Lanes(32, 8, products="amx")
