"""What one core can do: the FMA rate of a bare micro-kernel loop, the yardstick of the benchmarks."""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

import math
import time

import numpy as np
from numba import njit, types

from .gemm import SCORE_ROWS, dot_tile
from .host import host_lanes


def fma_peak(bits: int = 32, depth: int = 128, seconds: float = 0.2) -> float:
    """GFLOP/s of the score micro-kernel on data in the first-level cache, on the calling thread, in CPU time."""
    lanes = host_lanes(bits)

    @njit(types.void(*(types.int64,) * 6), nogil=True)
    def repeat(c, a, a_chunk, b, chunks, times):
        for _ in range(times):
            dot_tile(lanes, c, a, a_chunk, b, chunks, 0, 1)

    columns = 2 * lanes.width
    dtype = np.float32 if bits == 32 else np.float64
    c, b = _aligned((SCORE_ROWS, lanes.panel), dtype), _aligned((depth, lanes.panel), dtype)
    a = _aligned((depth // columns, SCORE_ROWS, columns), dtype)
    times, flops = 1000, 2 * SCORE_ROWS * lanes.panel * depth
    while True:
        start = time.thread_time()
        repeat(c.ctypes.data, a.ctypes.data, a.strides[0], b.ctypes.data, depth // columns, times)
        spent = time.thread_time() - start
        if spent >= seconds:
            return times * flops / spent / 1e9
        times *= 2


def _aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that start at a cache line: vectors that straddle two lines cost a tenth of the rate."""
    size = math.prod(shape)
    memory = np.zeros(size + 64 // np.dtype(dtype).itemsize, dtype)
    start = -memory.ctypes.data % 64 // memory.itemsize
    return memory[start : start + size].reshape(shape)
