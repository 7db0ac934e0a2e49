"""Key tiles: K and V of a kv head as column panels, packed once where a thread works on that head for long.

Tile j holds the keys [j * block_n, (j + 1) * block_n), then zeros. It lives in slot j % slots; `tags` says which tile each
slot holds. One slot per tile keeps a whole head, one slot in all keeps the last tile only.
"""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

from numba import njit

from .blocks import K_LEN, K_START, SEQ_COLUMNS
from .memory import get_i64, put_i64
from .panels import list_rows
from .simd import Lanes, inlined

KEPT_BYTES = 8 << 20  # of packed keys and values per thread, at most: memory stays linear and small


@inlined
def forget_tiles(a, s):
    """No slot holds a tile."""
    for slot in range(a.slots):
        put_i64(s.tags, slot, 0)


@inlined
def tile_tag(a, b, head_kv, tile):
    """A number for this tile of this head; never 0."""
    return (b * a.heads_kv + head_kv) * a.key_tiles + tile + 1


@inlined
def tiles_between(a, start, end):
    """The range of the tiles that the keys [start, end) lie in."""
    first = start // a.block_n
    return first, (end + a.block_n - 1) // a.block_n if start < end else first


@inlined
def key_row(a, b, head_kv, n):
    """The address of row n of K."""
    return a.k + b * a.k_b + (get_i64(a.seq, b * SEQ_COLUMNS + K_START) + n) * a.k_s + head_kv * a.k_h


@inlined
def value_row(a, b, head_kv, n):
    """The address of row n of V."""
    return a.v + b * a.v_b + (get_i64(a.seq, b * SEQ_COLUMNS + K_START) + n) * a.v_s + head_kv * a.v_h


@njit
def hold_tile(lanes, a, s, b, head_kv, n0, place, pack):
    """Make s.k and s.v the packed rows of key n0 and of those after it in its tile: `place` and `pack` of `products`.

    Returns whether an Inf or NaN is among K and among V. Passes set such rows aside, so that the tile is not held for
    later: hence (False, False) for one that is.
    """
    tile = n0 // a.block_n
    slot, tag, first = tile % a.slots, tile_tag(a, b, head_kv, tile), tile * a.block_n
    k_bad = v_bad = False
    if get_i64(s.tags, slot) != tag:
        count = min(a.block_n, get_i64(a.seq, b * SEQ_COLUMNS + K_LEN) - first)
        list_rows(s.k_rows, key_row(a, b, head_kv, first), a.k_s, count)
        list_rows(s.v_rows, value_row(a, b, head_kv, first), a.v_s, count)
        place(lanes, a, s, slot, 0)
        k_bad, v_bad = pack(lanes, a, s, count)
        put_i64(s.tags, slot, 0 if k_bad or v_bad else tag)
    place(lanes, a, s, slot, n0 - first)
    return k_bad, v_bad


@inlined
def rows_to_prefetch(a, s, b, head_kv, n1, most):
    """How many of the keys from n1 on to ask for while the tile before them is worked on: none that are packed."""
    tile = n1 // a.block_n
    if get_i64(s.tags, tile % a.slots) == tile_tag(a, b, head_kv, tile):
        return 0
    return min(most, get_i64(a.seq, b * SEQ_COLUMNS + K_LEN) - n1)


def tile_slots(lanes: Lanes, tiles: int, dims: int, block_n: int) -> int:
    """Slots for the `tiles` key tiles of a head, `dims` columns in all: one each where they fit the bound, else one."""
    tile_bytes = (block_n + lanes.key_step) * dims * lanes.operand_bytes
    return tiles if tiles * tile_bytes <= KEPT_BYTES else 1


def tile_sizes(lanes: Lanes, slots: int, block_n: int, dim: int, value_dim: int) -> dict[str, int]:
    """Bytes of the scratch fields of key tiles."""
    slot_bytes = slots * (block_n + lanes.key_step) * lanes.operand_bytes
    return {
        "k_slots": slot_bytes * dim,
        "v_slots": slot_bytes * value_dim,
        "tags": 8 * slots,
        **dict.fromkeys(("k_rows", "v_rows"), 8 * (block_n + 2 * lanes.key_step)),
    }
