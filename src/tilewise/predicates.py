"""The formulas of masks and dropout: pure integer arithmetic, one formula per mask, used by every backend.

Each function takes and returns anything with ``+ - * // % ^ >> &`` and comparisons: Python ints, torch and numpy
integer arrays, Numba scalars, traced vectors. Nothing here imports anything.

An interval mask is a pair ``(lo, hi)``: the query at position ``m`` sees keys ``lo <= n < hi``. Bounds may lie
outside ``[0, Sk]`` and may cross; `tiles.clip_interval` makes them proper. ``None`` stands for "no limit".
"""

LOW32 = 0xFFFFFFFF


def causal_interval(m):
    """Keys up to and including the query's own position."""
    return None, m + 1


def window_interval(m, left, right):
    """Keys from ``m - left`` to ``m + right``, both included; ``None`` on a side means no limit there."""
    return (None if left is None else m - left), (None if right is None else m + right + 1)


def chunk_interval(m, size):
    """Keys of the query's own chunk, ``[c * size, (c + 1) * size)`` with ``c = floor(m / size)``."""
    start = m - m % size
    return start, start + size


def prefix_interval(m, length, maximum=max):
    """Prefix-LM: every query sees the first `length` keys, and is causal after them."""
    return None, maximum(m + 1, length)


def keep_interval(n, lo, hi):
    """Whether key ``n`` lies in ``[lo, hi)``."""
    return (n >= lo) & (n < hi)


def _mix32(x):
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & LOW32
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & LOW32
    return x ^ (x >> 15)


def _absorb(key, word):
    return (_mix32(key ^ (word & LOW32)) + 0x9E3779B9) & LOW32


def dropout_row_keys(seed, b, h, row):
    """Two 32-bit keys of one query row: a function of (seed, batch, head, row) and of nothing else."""
    first = _absorb(_absorb(_absorb(_absorb(_absorb(0x243F6A88, seed), seed >> 32), b), h), row)
    second = _absorb(_absorb(_absorb(_absorb(_absorb(0x85A308D3, seed), seed >> 32), b), h), row)
    return first, second


def dropout_bits(first, second, n):
    """32 uniform bits for key ``n`` of the row with these keys; the key is kept when ``bits >= drop_threshold(p)``."""
    x = (n * 0x9E3779B1 + first) & LOW32
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & LOW32
    x = x ^ second
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & LOW32
    return x ^ (x >> 15)


def drop_threshold(p):
    """The 32-bit number below which `dropout_bits` means "drop", for drop probability ``0 <= p < 1``."""
    return min(round(p * 4294967296.0), LOW32)
