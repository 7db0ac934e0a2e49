"""Tile arithmetic that only some backends use; ranges of tiles are checked with the masks, in test_masks.py."""

import pytest

from tilewise.tiles import packs, splits, work_order


@pytest.mark.parametrize("slots", [1, 7, 132])
@pytest.mark.parametrize("programs", [1, 3, 64, 128, 133, 1000])
def test_splits(programs, slots):
    for tiles in (0, 1, 2, 17, 256, 16384):
        parts = splits(tiles, programs, slots)
        assert 1 <= parts <= max(1, tiles)
        if programs >= slots:
            assert parts == 1
        elif tiles >= 100 * slots:
            assert programs * parts >= 0.95 * slots


def test_packs():
    """As measured on an H200: 16K keys, 32 heads over 8."""
    taken = {(B, Sq): packs(B, 32, 4, Sq, 16384, 132) for B in (1, 4) for Sq in (16, 64, 128)}
    assert taken == {(1, 16): True, (1, 64): True, (1, 128): True, (4, 16): True, (4, 64): False, (4, 128): False}
    assert not packs(1, 32, 4, 128, 4000, 132)


@pytest.mark.parametrize("together", [1, 3, 100])
def test_every_program_has_work_of_its_own(together):
    tiles, heads = 5, 8
    found = {work_order(place, tiles, heads, together) for place in range(tiles * heads)}
    assert found == {(rank, head) for rank in range(tiles) for head in range(heads)}
