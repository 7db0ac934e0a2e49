"""Key tiles: K and V of a kv head as column panels, packed once where a thread works on that head for long.

Tile j holds the keys [j * block_n, (j + 1) * block_n), then zeros. It lives in slot j % slots; `tags` says which tile each
slot holds. One slot per tile keeps a whole head, one slot in all keeps the last tile only.
"""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

from numba import njit

from .blocks import K_LEN, K_START, KEY_STEP, SEQ_COLUMNS
from .memory import get_i64, put_i64
from .panels import list_rows, pack_tile
from .simd import element_bytes, inlined, vector_width

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
def hold_tile(lanes, a, s, b, head_kv, n0):
    """Make s.k and s.v the packed rows of key n0 and of those after it in its tile.

    Returns whether an Inf or NaN is among K and among V. Passes set such rows aside, so that the tile is not held for
    later: hence (False, False) for one that is.
    """
    row_bytes = 2 * vector_width(lanes) * element_bytes(lanes)
    tile = n0 // a.block_n
    slot, tag, first = tile % a.slots, tile_tag(a, b, head_kv, tile), tile * a.block_n
    k = s.k_slots + slot * a.tile_rows * a.dim_padded * element_bytes(lanes)
    v = s.v_slots + slot * a.tile_rows * a.value_dim_padded * element_bytes(lanes)
    s.k, s.v = k + (n0 - first) * row_bytes, v + (n0 - first) * row_bytes
    if get_i64(s.tags, slot) == tag:
        return False, False
    count = min(a.block_n, get_i64(a.seq, b * SEQ_COLUMNS + K_LEN) - first)
    padded = count + KEY_STEP  # a panel's key range is rounded up
    list_rows(s.k_rows, key_row(a, b, head_kv, first), a.k_s, count)
    list_rows(s.v_rows, value_row(a, b, head_kv, first), a.v_s, count)
    k_bad = pack_tile(lanes, k, a.tile_rows, s.k_rows, count, padded, a.code, a.dim, a.dim_padded)
    v_bad = pack_tile(lanes, v, a.tile_rows, s.v_rows, count, padded, a.code, a.value_dim, a.value_dim_padded)
    put_i64(s.tags, slot, 0 if k_bad or v_bad else tag)
    return k_bad, v_bad


@inlined
def rows_to_prefetch(a, s, b, head_kv, n1, most):
    """How many of the keys from n1 on to ask for while the tile before them is worked on: none that are packed."""
    tile = n1 // a.block_n
    if get_i64(s.tags, tile % a.slots) == tile_tag(a, b, head_kv, tile):
        return 0
    return min(most, get_i64(a.seq, b * SEQ_COLUMNS + K_LEN) - n1)


def tile_slots(tiles: int, row_bytes: int, block_n: int) -> int:
    """Slots for the `tiles` key tiles of a head: one each where they fit the bound, else one in all."""
    return tiles if tiles * (block_n + KEY_STEP) * row_bytes <= KEPT_BYTES else 1


def tile_sizes(slots: int, block_n: int, key_bytes: int, value_bytes: int) -> dict[str, int]:
    """Bytes of the scratch fields of key tiles."""
    rows = slots * (block_n + KEY_STEP)
    return {
        "k_slots": rows * key_bytes,
        "v_slots": rows * value_bytes,
        "tags": 8 * slots,
        **dict.fromkeys(("k_rows", "v_rows"), 8 * block_n),
    }
