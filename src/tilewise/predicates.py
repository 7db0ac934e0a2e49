"""The formulas of masks and dropout: pure integer arithmetic, one formula per mask, used by every backend.

Each function takes and returns anything with ``+ - * // % ^ >> &`` and comparisons: Python ints, torch and numpy
integer arrays, Numba scalars, traced vectors. Nothing here imports anything.

An interval mask is a pair ``(lo, hi)``: the query at position ``m`` sees keys ``lo <= n < hi``. Bounds may lie
outside ``[0, Sk]`` and may cross; `tiles.clip_interval` makes them proper. ``None`` stands for "no limit".
"""

LOW32 = 0xFFFFFFFF
BEFORE_ALL_ROWS = 2**30  # farther than any sequence is long


def causal_interval(m):
    """Keys up to and including the query's own position."""
    return None, m + 1


def window_low(m, left):
    """The first key of a window: ``m - left``."""
    return m - left


def window_high(m, right):
    """One past the last key of a window: ``m + right`` is included."""
    return m + right + 1


def window_interval(m, left, right):
    """Keys from ``m - left`` to ``m + right``, both included; ``None`` on a side means no limit there."""
    return (None if left is None else window_low(m, left)), (None if right is None else window_high(m, right))


def chunk_interval(m, size):
    """Keys of the query's own chunk, ``[c * size, (c + 1) * size)`` with ``c = floor(m / size)``."""
    start = m - (m % size + size) % size  # right for m < 0, whether % floors (Python) or truncates (GPUs)
    return start, start + size


def prefix_high(m, length):
    """One past the last key of a prefix-LM row, ``max(m + 1, length)``: the first `length` keys, and the causal ones."""
    causal = m + 1
    return causal + (length - causal) * (length > causal)


def prefix_interval(m, length):
    """Prefix-LM: every query sees the first `length` keys, and is causal after them."""
    return None, prefix_high(m, length)


def window_first_row(n, right):
    """The window turned round: the first position that sees key `n`."""
    return n - right


def window_end_row(n, left):
    """One past the last position whose window holds key `n`."""
    return n + left + 1


def prefix_first_row(n, length):
    """Prefix-LM turned round: every position sees a key of the prefix, its own and later ones see another."""
    return n - (n < length) * BEFORE_ALL_ROWS


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
    return first, second ^ (second >> 15)


def dropout_bits(first, second, n):
    """32 uniform bits for key ``n`` of the row with these keys; the key is kept when ``bits >= drop_threshold(p)``."""
    x = (n * 0x9E3779B1 + first) & LOW32
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & LOW32
    x = x ^ (x >> 15) ^ second  # one operation on GPUs: the row's part of the shifted word is in `second` already
    x = (x * 0x735A2D97) & LOW32
    return x ^ (x >> 15)


def drop_threshold(p):
    """The 32-bit number below which `dropout_bits` means "drop", for drop probability ``0 <= p < 1``."""
    return min(round(p * 4294967296.0), LOW32)
