"""Tile arithmetic: which tiles a block of rows visits and which of them need a mask. Pure integer arithmetic.

Forward, backward, cost model and plots all call these functions; they take and return Python ints (or anything that
behaves like them inside a kernel). ``//`` is only used on numerators >= 0, where truncation and floor agree.
"""

from typing import NamedTuple

PART_TILES, MERGE_TILES = 2, 8  # what a part of the keys, and merging parts, costs besides
DECODE_ROWS = 64  # of one sequence and kv head, up to which a tile of rows walks the keys in parts
OWN_ROWS = 128  # of a tile of one head
MANY_KEYS = 8  # for each row, from which on dividing keys among programs pays


class TileRange(NamedTuple):
    """kv tiles ``[first, last)`` are visited; of these ``[full_first, full_last)`` need no mask."""

    first: int
    full_first: int
    full_last: int
    last: int


def cdiv(a, b):
    """``ceil(a / b)`` for a >= 0, b > 0."""
    return (a + b - 1) // b


def clip_interval(lo, hi, length, minimum=min, maximum=max):
    """The proper interval ``0 <= lo <= hi <= length`` holding the same keys."""
    lo = minimum(maximum(lo, 0), length)
    return lo, maximum(minimum(hi, length), lo)


def kv_tile_range(lo_min, lo_max, hi_min, hi_max, block_n):
    """Tiles of `block_n` keys for a block of rows whose intervals have these extreme bounds.

    Every key seen by some row lies in a visited tile; in a full tile every row sees every key.
    """
    first = lo_min // block_n
    last = first + (cdiv(hi_max, block_n) - first) * (hi_max > lo_min)  # no branch: kernels trace this, too
    full_first = min(max(cdiv(lo_max, block_n), first), last)
    full_last = min(max(hi_min // block_n, full_first), last)
    return TileRange(first, full_first, full_last, last)


def splits(tiles, programs, slots):
    """Parts into which to divide the `tiles` of each of `programs` programs, where `slots` programs use all of the memory.

    Fewer read as fast each as they would among `slots`, more share what there is. The fewest parts that take the least
    time, counted in tiles: each part costs `PART_TILES` besides, merging parts `MERGE_TILES`.
    """
    most = max(1, min(tiles, slots))

    def time(parts):
        busy = max(slots, programs * parts) * (cdiv(tiles, parts) + PART_TILES)
        return busy + (parts > 1) * MERGE_TILES * slots

    return min(range(1, most + 1), key=time)


def packs(sequences, heads, group, rows, keys, slots):
    """Whether tiles of all `group` heads that share keys, in parts of the keys, are faster than tiles of one head each.

    A program takes as long for a packed tile as for one of a single head's rows, full or not, of twice the rows; but
    parts of the keys are shared out evenly among `slots` programs.
    """
    packed = sequences * (heads // group) * cdiv(rows * group, DECODE_ROWS)
    own = cdiv(sequences * heads * cdiv(rows, OWN_ROWS), slots)
    return keys >= MANY_KEYS * rows * group and 2 * packed <= slots * own


def work_order(place, tiles, heads, together):
    """(rank of the tile, head) that program `place` of ``tiles * heads`` takes.

    Programs go through the tiles of `together` heads rank by rank, then through the next heads: with the longest tiles
    ranked first, short ones are left for the end, and the heads worked on at one time stay few enough for the cache.
    """
    first = place // (tiles * together) * together
    width = min(together, heads - first)
    inside = place - first * tiles
    return inside // width, first + inside % width
