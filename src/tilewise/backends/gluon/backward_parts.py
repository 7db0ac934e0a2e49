"""What the backward kernels for Hopper share: memory, the producer, the order of work, scores of a transposed tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from tilewise.backends.device.descriptors import tma_start
from tilewise.backends.device.portable import cdiv, work_order
from tilewise.backends.device.rows import row_tiles, tile_of
from tilewise.backends.device.seqinfo import sequence

from .backward_rows import TERMS, sum_row
from .pipeline import Ring, await_turn, make_barriers, make_ring, make_tiles
from .versions import copy_in


@gluon.jit
def meet():
    """Wait until both consumers are here."""
    await_turn(0)


@gluon.jit
def unknown_zero(at):
    """0, but the compiler does not know: an address that changes is not kept in registers, part by part, over the loop."""
    return at >> 30


@gluon.jit
def columns_of(x, like):
    """A number of each column as a whole tile."""
    whole, _ = gl.broadcast(x[None, :], like)
    return whole


@aggregate
class RowTiles:
    """A ring of row tiles, each with numbers of its rows, or none."""

    ring: Ring
    numbers: gl.shared_memory_descriptor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, numbers):
        self.ring = ring
        self.numbers = gl.constexpr(None) if numbers is None else numbers

    @gluon.jit
    def fill(self, at, desc, start, number_desc, row):
        """Producer: as `Ring.fill`."""
        STAGES: gl.constexpr = self.ring.tiles.shape[0]
        stage = at % STAGES
        full = self.ring.full.index(stage)
        mbarrier.wait(self.ring.empty.index(stage), ((at // STAGES) & 1) ^ 1)
        if number_desc is None:
            mbarrier.expect(full, desc.block_type.nbytes)
        else:
            mbarrier.expect(full, desc.block_type.nbytes + number_desc.block_type.nbytes)
            if len(number_desc.block_type.shape) == 1:
                copy_in(number_desc, [row], full, self.numbers.index(stage))
            else:
                copy_in(number_desc, [row, 0], full, self.numbers.index(stage))
        copy_in(desc, start, full, self.ring.tiles.index(stage))

    @gluon.jit
    def number(self, at, FIRST: gl.constexpr, LIKE: gl.constexpr):
        """The numbers of copy `at`, from row FIRST on: one for each column of a tile of layout and shape like LIKE."""
        STAGES: gl.constexpr = self.numbers.shape[0]
        COUNT: gl.constexpr = LIKE.shape[1]
        return self.numbers.index(at % STAGES).slice(FIRST, COUNT).load(gl.SliceLayout(0, LIKE.layout))

    @gluon.jit
    def start(self, at, FIRST: gl.constexpr, TERM: gl.constexpr, zero):
        """Start a tile of sums, shaped like `zero`, from a number of each column: it is the product of ones and its terms.

        As a product it costs less than to load the numbers into every thread. `TERM` is the first of its terms, the rows
        from FIRST on are the columns; see `store_starts`.
        """
        STAGES: gl.constexpr = self.numbers.shape[0]
        COLUMNS: gl.constexpr = self.numbers.shape[2]
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
        terms = self.numbers.index(at % STAGES).slice(FIRST, zero.type.shape[1]).permute((1, 0))
        ROWS: gl.constexpr = zero.type.shape[0]
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :] + gl.zeros([ROWS, COLUMNS], gl.int32, LAYOUT)
        ones = gl.where((column >= TERM) & (column < TERM + TERMS), 1.0, 0.0).to(gl.bfloat16)
        return warpgroup_mma(ones, terms, zero, use_acc=False, is_async=True)


@gluon.jit
def make_row_tiles(desc, number_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    ring = make_ring(desc, None, STAGES, CONSUMERS)
    if number_desc is None:
        return RowTiles(ring, None)
    else:
        numbers = make_tiles(number_desc, STAGES)
        return RowTiles(ring, numbers)


@aggregate
class Shared:
    """What producer and consumers share."""

    q: RowTiles
    do: RowTiles
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor  # two tiles of keys x rows
    dq: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, keys_full, weights, dq):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.keys_full = keys_full
        self.weights = weights
        self.dq = dq

    @gluon.jit
    def await_keys(self):
        mbarrier.wait(self.keys_full.index(0), 0)


@gluon.jit
def make_shared(q_desc, k_desc, v_desc, do_desc, q_numbers, do_numbers, dq_desc, CFG: gl.constexpr):
    DTYPE: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(CFG.swizzle, 16, 2)
    q = make_row_tiles(q_desc, q_numbers, CFG.stages, CFG.frees)
    do = make_row_tiles(do_desc, do_numbers, CFG.stages, CFG.frees)
    k = gl.allocate_shared_memory(DTYPE, [1] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v = gl.allocate_shared_memory(DTYPE, [1] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    weights = gl.allocate_shared_memory(DTYPE, [2, CFG.block_n, CFG.block_m], LAYOUT)
    if CFG.wide:
        return Shared(q, do, k, v, make_barriers(1, 1), weights, q.ring.tiles)
    else:
        # Shares lie there line by line, but dk, which follows them, is swizzled, and memory for that has to be aligned.
        SHARE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        dq = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, SHARE)  # noqa: RUF005
        return Shared(q, do, k, v, make_barriers(1, 1), weights, dq)


@gluon.jit
def key_tile(place, call):
    """(key tile, b, hkv): the first keys first, which under a causal mask are seen by the most rows."""
    j, head = work_order(place, call.tiles, call.all_heads, call.together)
    return j, head // call.heads_kv, head % call.heads_kv


@gluon.jit
def row_sweep(interval, visit, j, b, h, q_len, k_len, shift, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(walk, early, masked, full_last) of the row tiles that see key tile j.

    `masked` tiles need masking: `early` of them before the full ones. Where rows are missing, none does on their account:
    they start from -inf. Where keys are missing, every tile does: p of a key of zeros may be infinite.
    """
    walk = row_tiles(j, b, h, cdiv(q_len, BLOCK_M) * BLOCK_M, k_len, shift, interval, visit, BLOCK_M, BLOCK_N)
    full_last = gl.where((j + 1) * BLOCK_N > k_len, walk.full_first, walk.full_last)
    early = walk.full_first - walk.first
    return walk, early, early + walk.last - full_last, full_last


@gluon.jit
def masked_tile(n, walk, early, full_last, visit):
    """Number n of the row tiles that need masking."""
    return tile_of(gl.where(n < early, walk.first + n, full_last + n - early), walk, visit)


@gluon.jit
def produce(
    shared, q_desc, k_desc, v_desc, do_desc, q_numbers, do_numbers, lengths, interval, visit, call, CFG: gl.constexpr
):  # fmt: skip
    """Start the copies: keys and values once, row tiles in the order in which consumers want them."""
    BLOCK_M: gl.constexpr = CFG.block_m
    BLOCK_N: gl.constexpr = CFG.block_n
    j, b, hkv = key_tile(gl.program_id(0), call)
    q_start, q_len, k_start, k_len, shift = sequence(lengths, b)
    if j * BLOCK_N < k_len:
        full = shared.keys_full.index(0)
        mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        copy_in(k_desc, tma_start(k_desc, b, hkv, k_start, k_len, j * BLOCK_N), full, shared.k.index(0))
        copy_in(v_desc, tma_start(v_desc, b, hkv, k_start, k_len, j * BLOCK_N), full, shared.v.index(0))
        at = 0
        for h in range(hkv * call.group, (hkv + 1) * call.group):
            row = sum_row(lengths, b, h, q_start, call)
            walk, early, masked, full_last = row_sweep(interval, visit, j, b, h, q_len, k_len, shift, BLOCK_M, BLOCK_N)
            for n in range(walk.last - walk.first):
                i = masked_tile(n, walk, early, full_last, visit)
                if n >= masked:
                    i = tile_of(walk.full_first + n - masked, walk, visit)
                shared.q.fill(
                    at, q_desc, tma_start(q_desc, b, h, q_start, q_len, i * BLOCK_M), q_numbers, row + i * BLOCK_M
                )
                shared.do.fill(
                    at, do_desc, tma_start(do_desc, b, h, q_start, q_len, i * BLOCK_M), do_numbers, row + i * BLOCK_M
                )
                at += 1


@gluon.jit
def broken_sums(dk, dv):
    """1 where a sum is not finite, else 0."""
    return gl.max(gl.max(gl.where(dk * 0.0 + dv * 0.0 == 0.0, 0, 1), 1), 0)
