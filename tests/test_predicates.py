"""The formulas every backend shares: equal results for ints, torch and numpy, and dropout bits that look random."""

import itertools
import math

import numpy as np
import pytest
import torch

from tilewise import predicates

SEEDS = (0, 1, 2, 0x7FFF_FFFF_FFFF_FFFE, 0xDEAD_BEEF)
SIGMAS = 5  # a fair test fails once in two million


def _bits(seed, b=0, h=0, rows=64, keys=512):
    """Bits of a (rows, keys) block, int64."""
    first, second = predicates.dropout_row_keys(seed, b, h, torch.arange(rows)[:, None])
    return predicates.dropout_bits(first, second, torch.arange(keys)[None, :])


def _agreement_sigmas(x, y):
    """How many standard deviations the rate of ``x == y`` is off one half, for bool tensors."""
    return abs(float((x == y).double().mean()) - 0.5) * 2 * math.sqrt(x.numel())


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_of_ints_torch_and_numpy_are_equal(seed):
    points = list(itertools.product((0, 1, 7), (0, 3, 127), (0, 1, 99_999), (0, 1, 65_536, 2**31 - 1)))
    ints = [predicates.dropout_bits(*predicates.dropout_row_keys(seed, b, h, r), n) for b, h, r, n in points]
    assert all(0 <= bits < 2**32 for bits in ints)
    for array in (lambda x: torch.tensor(x, dtype=torch.int64), lambda x: np.array(x, dtype=np.int64)):
        b, h, r, n = (array(list(x)) for x in zip(*points, strict=True))
        words = array([seed] * len(points))
        assert predicates.dropout_bits(*predicates.dropout_row_keys(words, b, h, r), n).tolist() == ints


def test_bits_are_what_they_were():
    """Changing the generator changes every seeded training run: it takes a change of this line too."""
    assert predicates.dropout_bits(*predicates.dropout_row_keys(42, 1, 2, 3), 4) == BITS_42_1_2_3_4


BITS_42_1_2_3_4 = 0xCA95BCDF


@pytest.mark.parametrize("p", [0.01, 0.17, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_keep_rate(p, seed):
    kept = _bits(seed) >= predicates.drop_threshold(p)
    assert abs(float(kept.double().mean()) - (1 - p)) < SIGMAS * math.sqrt(p * (1 - p) / kept.numel())


@pytest.mark.parametrize("p", [0.17, 0.5])
def test_keep_rate_of_each_row_and_key(p):
    kept = (_bits(3, rows=512, keys=512) >= predicates.drop_threshold(p)).double()
    for dim in (0, 1):
        spread = (kept.mean(dim) - (1 - p)) / math.sqrt(p * (1 - p) / 512)
        chi2 = float(spread.square().sum())
        assert abs(chi2 - 512) < SIGMAS * math.sqrt(2 * 512)


def test_each_bit_is_fair():
    bits = _bits(11, rows=128)
    for bit in range(32):
        ones = (bits >> bit) & 1
        assert abs(float(ones.double().mean()) - 0.5) * 2 * math.sqrt(ones.numel()) < SIGMAS, bit


def test_values_are_uniform():
    bits = _bits(5, rows=256)
    counts = torch.bincount((bits >> 24).flatten(), minlength=256).double()
    expected = bits.numel() / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < SIGMAS * math.sqrt(2 * 255)


def test_neighbours_are_independent():
    """Rows, keys, heads, sequences and seeds that follow each other share no more than chance."""
    drop = 2**31
    here = _bits(7) >= drop
    others = {"head": _bits(7, h=1), "sequence": _bits(7, b=1), "seed": _bits(8), "high seed": _bits(7 + (1 << 32))}
    others |= {"swapped": _bits(7, b=1, h=0), "head and sequence": _bits(7, b=1, h=1)}
    for name, bits in others.items():
        assert _agreement_sigmas(here, bits >= drop) < SIGMAS, name
    for lag in (1, 2, 3, 4, 8, 16, 32):
        assert _agreement_sigmas(here[:, lag:], here[:, :-lag]) < SIGMAS, f"keys {lag} apart"
        assert _agreement_sigmas(here[lag:], here[:-lag]) < SIGMAS, f"rows {lag} apart"
        assert _agreement_sigmas(here[lag:, lag:], here[:-lag, :-lag]) < SIGMAS, f"diagonals {lag} apart"


def test_batch_and_head_are_not_interchangeable():
    assert not torch.equal(_bits(7, b=1, h=2), _bits(7, b=2, h=1))


@pytest.mark.parametrize(("p", "threshold"), [(0.0, 0), (1e-16, 0), (0.5, 2**31), (1 - 2**-53, 2**32 - 1)])
def test_drop_threshold(p, threshold):
    assert predicates.drop_threshold(p) == threshold


def test_intervals_of_ints_and_tensors_are_equal():
    formulas = [
        predicates.causal_interval,
        lambda m: predicates.window_interval(m, 3, 2),
        lambda m: predicates.chunk_interval(m, 4),
    ]
    for formula in formulas:
        tensors = formula(torch.arange(-9, 10))
        for side, t in enumerate(tensors):
            ints = [formula(m)[side] for m in range(-9, 10)]
            assert (t is None and ints == [None] * 19) or t.tolist() == ints


def test_chunk_interval_floors_negative_positions():
    assert predicates.chunk_interval(-1, 4) == (-4, 0)
    assert predicates.chunk_interval(-5, 4) == (-8, -4)


@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_formulas_turned_round_see_the_same_pairs(size):
    """Which rows see a key, against which keys a row sees, for every pair."""
    for n in range(12):
        for m in range(-6, 18):
            assert (m >= predicates.window_first_row(n, size)) == (n < predicates.window_high(m, size))
            assert (m < predicates.window_end_row(n, size)) == (n >= predicates.window_low(m, size))
            assert (m >= predicates.prefix_first_row(n, size)) == (n < predicates.prefix_high(m, size))
            if size:
                (lo, hi), (first, end) = predicates.chunk_interval(m, size), predicates.chunk_interval(n, size)
                assert (lo <= n < hi) == (first <= m < end)
