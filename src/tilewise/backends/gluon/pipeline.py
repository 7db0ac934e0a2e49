"""What kernels for Hopper are built from: rings of tiles in shared memory, turns of warpgroups, work drawn from a counter.

A kernel is a few partitions of warps that run different code: a producer of one warp, which starts the copies (TMA), and
consumers, one warpgroup of 4 warps each, which compute. They meet at barriers in shared memory.

No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from tilewise.backends.device.descriptors import tma_start

from .versions import copy_in

FIRST_TURN = gl.constexpr(8)  # named barriers: Triton itself takes those of the lowest numbers, one for each partition
QUEUED = gl.constexpr(3)  # work items on their way from producer to consumers


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, each of which completes a phase with so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def matrix_at(tiles, at):
    """The tile of copy `at` as a matrix."""
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[len(tiles.shape) - 3]
    COLUMNS: gl.constexpr = tiles.shape[len(tiles.shape) - 1]
    return tiles.index(at % STAGES).reshape([ROWS, COLUMNS])


@aggregate
class Ring:
    """Stages in shared memory, each the tile of one copy, with barriers that say "full" and "empty".

    Copies are counted: copy number `at` lies in stage ``at % stages`` and waits until copy ``at - stages`` is freed. Tiles as
    wide as no power of two are in two parts: the last columns are `tails`, else None.
    """

    tiles: gl.shared_memory_descriptor
    tails: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, tails, full, empty):
        self.tiles = tiles
        self.tails = gl.constexpr(None) if tails is None else tails
        self.full = full
        self.empty = empty

    @gluon.jit
    def fill(self, at, desc, tail_desc, b, h, start, length, row):
        """Producer: once the stage is free, start the copy of the rows from `row` on (`tma_start`)."""
        STAGES: gl.constexpr = self.tiles.shape[0]
        stage = at % STAGES
        full = self.full.index(stage)
        mbarrier.wait(self.empty.index(stage), ((at // STAGES) & 1) ^ 1)
        if tail_desc is None:
            mbarrier.expect(full, desc.block_type.nbytes)
        else:
            mbarrier.expect(full, desc.block_type.nbytes + tail_desc.block_type.nbytes)
            place = tma_start(
                tail_desc, b, h, start, length, row, desc.block_type.shape[len(desc.block_type.shape) - 1]
            )
            copy_in(tail_desc, place, full, self.tails.index(stage))
        copy_in(desc, tma_start(desc, b, h, start, length, row), full, self.tiles.index(stage))

    @gluon.jit
    def wait(self, at):
        """Consumer: until copy `at` is there."""
        STAGES: gl.constexpr = self.tiles.shape[0]
        mbarrier.wait(self.full.index(at % STAGES), (at // STAGES) & 1)

    @gluon.jit
    def tile(self, at):
        """Copy `at` as a matrix (rows, columns)."""
        return matrix_at(self.tiles, at)

    @gluon.jit
    def tail(self, at):
        """Its last columns."""
        return matrix_at(self.tails, at)

    @gluon.jit
    def free(self, at):
        """Consumer: done with copy `at`."""
        STAGES: gl.constexpr = self.tiles.shape[0]
        mbarrier.arrive(self.empty.index(at % STAGES), count=1)


@gluon.jit
def make_tiles(desc, STAGES: gl.constexpr):
    """Memory for so many boxes of a tensor descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005  no stars in kernels


@gluon.jit
def make_ring(desc, tail_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of boxes of a tensor descriptor, or of two, each freed by so many consumers."""
    tiles = make_tiles(desc, STAGES)
    if tail_desc is None:
        return Ring(tiles, None, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS))
    else:
        tails = make_tiles(tail_desc, STAGES)
        return Ring(tiles, tails, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS))


@gluon.constexpr_function
def _barrier_asm(kind, number, threads):
    return f"bar.{kind} {number}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def await_turn(GROUP: gl.constexpr):
    """Wait until the warpgroup before this one gives the turn: two share the barrier, 256 threads."""
    gl.inline_asm_elementwise(
        _barrier_asm("sync", FIRST_TURN + GROUP, 256), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(GROUP: gl.constexpr):
    """Let that warpgroup go on, without waiting."""
    gl.inline_asm_elementwise(
        _barrier_asm("arrive", FIRST_TURN + GROUP, 256), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def all_written():
    """Until what this thread has copied to global memory (TMA) is there; `tma.store_wait` is until it has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_place(counter, place):
    """Which work item follows number `place`, for programs that begin with number `program_id`.

    Drawn from a counter that starts at 0; without one programs take turns, there and back, so that a long item in one
    round goes with a short one in the next.
    """
    programs = gl.num_programs(0)
    if counter is None:
        return (place // programs + 2) * programs - 1 - place % programs
    else:
        return gl.atomic_add(counter, 1, sem="relaxed") + programs


@aggregate
class Queue:
    """Work items, a few int32 each, that the producer finds out ahead of the consumers."""

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, words, full, empty):
        self.words = words
        self.full = full
        self.empty = empty

    @gluon.jit
    def put(self, at, item):
        """Producer, of one warp: hand out item number `at`, a tuple of scalars."""
        WORDS: gl.constexpr = self.words.shape[0] // QUEUED
        slot = at % QUEUED
        mbarrier.wait(self.empty.index(slot), ((at // QUEUED) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        for i in gl.static_range(len(item)):
            self.words.index(slot * WORDS + i).store(gl.full([1], 0, gl.int32, layout) + item[i])
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def wait(self, at):
        """Consumer: until item `at` is there."""
        mbarrier.wait(self.full.index(at % QUEUED), (at // QUEUED) & 1)

    @gluon.jit
    def word(self, at, i):
        """Word i of item `at`."""
        WORDS: gl.constexpr = self.words.shape[0] // QUEUED
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.words.index((at % QUEUED) * WORDS + i).load(layout), 0)

    @gluon.jit
    def free(self, at):
        """Consumer: has read item `at`."""
        mbarrier.arrive(self.empty.index(at % QUEUED), count=1)


@gluon.jit
def make_queue(WORDS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A queue of items of so many words, each read by so many consumers."""
    words = gl.allocate_shared_memory(gl.int32, [QUEUED * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(words, make_barriers(QUEUED, 1), make_barriers(QUEUED, CONSUMERS))


@gluon.jit
def barriers_ready():
    """After all barriers are made, before partitions use them."""
    fence_async_shared()
