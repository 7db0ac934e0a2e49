"""Masks by brute force: every mask and combination against its literal definition, and tile maps against the elements."""

import itertools

import pytest
import torch

import tilewise
from tilewise import block_mask, masks, reference, tiles
from tilewise.backends.base import FEATURES
from tilewise.masks import Blocks, Causal, Chunk, Dense, Document, Full, Prefix, Window
from tilewise.sequences import row_bounds, sequences
from tilewise.spec import AttentionSpec, BoundSpec, MaskTerm

LENGTHS = list(itertools.product(range(7), range(7)))
ALIGNS = ("bottom_right", "top_left")


def _bound(mask, align):
    parts = mask.parts()
    terms = tuple(MaskTerm(part.name, part.params, len(part.tensors)) for part in parts)
    return BoundSpec(AttentionSpec(terms, align), 1.0, parts)


def _visible(mask, Sq, Sk, align="bottom_right", B=1, H=1):
    """What the reference lets each row see, (B, H, Sq, Sk)."""
    q, k = torch.zeros(B, Sq, H, 1), torch.zeros(B, Sk, H, 1)
    return reference.scores(q, k, _bound(mask, align), torch.arange(B))[1]


def _literal(keep, Sq, Sk, align):
    """``keep(m, n)`` for every row and key, m counted by the alignment."""
    shift = Sk - Sq if align == "bottom_right" else 0
    return torch.tensor([[bool(keep(r + shift, n)) for n in range(Sk)] for r in range(Sq)], dtype=torch.bool).reshape(
        Sq, Sk
    )


def _interval_masks():
    yield "full", Full(), lambda m, n: True
    yield "causal", Causal(), lambda m, n: n <= m
    for left, right in itertools.product((None, 0, 1, 3, 9), repeat=2):
        yield (
            f"window_{left}_{right}",
            Window(left, right),
            lambda m, n, left=left, right=right: (left is None or m - n <= left) and (right is None or n - m <= right),
        )
    for size in (1, 2, 3, 7):
        yield f"chunk_{size}", Chunk(size), lambda m, n, size=size: m // size == n // size
    for length in (0, 1, 3, 8):
        yield f"prefix_{length}", Prefix(length), lambda m, n, length=length: n < length or n <= m


INTERVALS = list(_interval_masks())


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("mask", "keep"), [pytest.param(m, f, id=name) for name, m, f in INTERVALS])
def test_interval_mask_is_its_definition(mask, keep, align):
    for Sq, Sk in LENGTHS:
        expected = _literal(keep, Sq, Sk, align)
        assert torch.equal(_visible(mask, Sq, Sk, align)[0, 0], expected), (Sq, Sk)
        assert torch.equal(_from_bounds(mask, Sq, Sk, align), expected), (Sq, Sk)


def _from_bounds(mask, Sq, Sk, align):
    """The same from the row bounds that kernels read, which must be proper."""
    bound = _bound(mask, align)
    bounds = row_bounds(bound, sequences(bound, (1, Sq, 1, 1), (1, Sk, 1, 1), 0, 0), Sq)
    lo, hi = bounds.lo[:, None].long(), bounds.hi[:, None].long()
    assert ((lo >= 0) & (lo <= hi) & (hi <= Sk)).all()
    n = torch.arange(Sk)
    return (n >= lo) & (n < hi)


@pytest.mark.parametrize("align", ALIGNS)
def test_and_is_both(align):
    some = [
        item
        for item in INTERVALS
        if item[0] in {"full", "causal", "window_1_3", "window_3_None", "chunk_3", "prefix_3"}
    ]
    for (_, a, keep_a), (_, b, keep_b) in itertools.product(some, repeat=2):
        for Sq, Sk in ((0, 3), (3, 0), (4, 6), (6, 4), (5, 5)):
            expected = _literal(lambda m, n, f=keep_a, g=keep_b: f(m, n) and g(m, n), Sq, Sk, align)
            assert torch.equal(_visible(a & b, Sq, Sk, align)[0, 0], expected)
            assert torch.equal(_from_bounds(a & b, Sq, Sk, align), expected)


def test_and_of_many_with_a_tensor():
    dense = torch.rand(5, 6) < 0.5
    mask = Causal() & (Window(2, None) & dense) & Full()
    assert [part.name for part in mask.parts()] == ["causal", "window", "dense"]
    expected = dense & _literal(lambda m, n: m - 2 <= n <= m, 5, 6, "bottom_right")
    assert torch.equal(_visible(mask, 5, 6)[0, 0], expected)
    assert torch.equal(_visible(dense & Causal(), 5, 6)[0, 0], dense & _visible(Causal(), 5, 6)[0, 0])


def test_prefix_per_sequence():
    visible = _visible(Prefix(torch.tensor([0, 2, 9])), 4, 5, B=3)
    for b, length in enumerate((0, 2, 9)):
        assert torch.equal(visible[b, 0], _literal(lambda m, n, c=length: n < c or n <= m, 4, 5, "bottom_right"))


def test_document_is_id_equality():
    """All arrangements of keys into runs of up to three documents and padding, and all ids of queries."""
    for Sk in range(5):
        for ids_k in itertools.product((-1, 0, 1, 2), repeat=Sk):
            runs = [i for i, _ in itertools.groupby(ids_k)]
            if any(runs.count(i) > 1 for i in set(runs) if i >= 0):
                continue
            ids_q = torch.tensor([-1, 0, 1, 2, 7])
            keys = torch.tensor(ids_k, dtype=torch.int64)
            expected = (ids_q[:, None] == keys) & (ids_q >= 0)[:, None]
            assert torch.equal(_visible(Document(ids_q, keys), 5, Sk)[0, 0], expected), ids_k


def test_packed_documents_are_ordered():
    assert Document(torch.tensor([0, 0, 1, 3, 3, -1, -1])).ordered
    assert Document.from_cu_seqlens(torch.tensor([0, 3, 3, 7])).ordered
    assert Document(torch.tensor([7, 7, 1, -1, 3])).ordered
    assert not Document(torch.tensor([1, 0]), torch.tensor([0, 0, 1])).ordered


@pytest.mark.parametrize("ids", [(0, 1, 0), (3, 3, 2, 3), (0, -1, 0)])
def test_document_refuses_scattered_keys(ids):
    with pytest.raises(ValueError, match="contiguous"):
        Document(torch.tensor(ids))


def test_document_spellings():
    ids = Document(torch.tensor([0, 0, 0, 1, 1, 2]))
    for other in (
        Document.from_cu_seqlens(torch.tensor([0, 3, 3, 5, 6])),
        Document.from_position_ids(torch.tensor([0, 1, 2, 0, 1, 0])),
        Document.from_position_ids(torch.tensor([[2, 3, 4, 2, 3, 2]])),
        Document(torch.tensor([5, 5, 5, 2, 2, 9], dtype=torch.int32)),
    ):
        assert torch.equal(_visible(other, 6, 6), _visible(ids, 6, 6))


@pytest.mark.parametrize(
    ("Sq", "Sk", "align", "rows"),
    [
        (2, 5, "bottom_right", ["11110", "11111"]),
        (5, 2, "bottom_right", ["00", "00", "00", "10", "11"]),
        (2, 5, "top_left", ["10000", "11000"]),
        (5, 2, "top_left", ["10", "11", "11", "11", "11"]),
        (3, 3, "bottom_right", ["100", "110", "111"]),
        (3, 3, "top_left", ["100", "110", "111"]),
    ],
)
def test_causal_matrices_written_out(Sq, Sk, align, rows):
    assert _visible(Causal(align), Sq, Sk, align)[0, 0].int().tolist() == [[int(x) for x in row] for row in rows]


def test_every_mask_kind_is_a_feature_of_the_capability_table():
    assert masks.KINDS.keys() <= FEATURES.keys()


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_kv_tile_range_covers_and_full_tiles_are_full(block):
    """Every pair of intervals over 7 keys, as a block of two rows."""
    intervals = [(lo, hi) for lo in range(8) for hi in range(lo, 8)]
    for (lo_a, hi_a), (lo_b, hi_b) in itertools.product(intervals, repeat=2):
        found = tiles.kv_tile_range(min(lo_a, lo_b), max(lo_a, lo_b), min(hi_a, hi_b), max(hi_a, hi_b), block)
        assert 0 <= found.first <= found.full_first <= found.full_last <= found.last or found == (0, 0, 0, 0)
        for n in range(7):
            seen = [lo <= n < hi for lo, hi in ((lo_a, hi_a), (lo_b, hi_b))]
            if any(seen):
                assert found.first <= n // block < found.last
            if found.full_first <= n // block < found.full_last:
                assert all(seen)


def _tile_masks(Sq, Sk, g):
    def rand(*shape):
        return torch.rand(shape, generator=g) < 0.5

    yield [Blocks(rand(-(-Sq // 3), -(-Sk // 2)), 3, 2)]
    yield [Blocks(rand(2, -(-Sq // 4), -(-Sk // 6)), 4, 6), Blocks(rand(3, 1, -(-Sq // 2), -(-Sk // 4)), 2, 4)]
    for shape in ((Sq, Sk), (1, Sk), (Sq, 1), (Sk,), (2, 1, 1), (3, 2, Sq, Sk), (1,)):
        yield [Dense(rand(*shape))]
    yield [Dense(rand(Sq, Sk)), Dense(rand(3, 1, 1, Sk)), Blocks(rand(-(-Sq // 2), -(-Sk // 3)), 2, 3)]


@pytest.mark.parametrize(("Sq", "Sk"), [(7, 9), (6, 6), (1, 5), (5, 1), (70, 130)])
def test_tile_map_covers_and_full_tiles_are_full(Sq, Sk):
    g = torch.Generator().manual_seed(0)
    for parts in _tile_masks(Sq, Sk, g):
        together = parts[0]
        for part in parts[1:]:
            together = together & part
        seen = _visible(together, Sq, Sk, B=3, H=2)
        found = block_mask.tile_map(parts, Sq, Sk)
        row, key = torch.arange(Sq) // found.block_m, torch.arange(Sk) // found.block_n
        visited, full = (t.expand(3, 2, -1, -1)[:, :, row][..., key] for t in (found.any, found.full))
        assert not (seen & ~visited).any()
        assert not (full & ~seen).any()
        assert not (found.full & ~found.any).any()


@pytest.mark.parametrize(("Sq", "Sk"), [(7, 9), (1, 5), (70, 130), (0, 4), (4, 0)])
def test_cpu_tile_ranges_are_the_tile_map(Sq, Sk):
    from tilewise.backends.cpu.lower import lower

    g = torch.Generator().manual_seed(0)
    for parts in _tile_masks(Sq, Sk, g):
        together = parts[0]
        for part in parts[1:]:
            together = together & part
        seen = _visible(together, Sq, Sk, B=3, H=2)
        plan = lower(torch.zeros(3, Sq, 2, 1), torch.zeros(3, Sk, 2, 1), _bound(together, "bottom_right"), 0, 0)
        ranges, visited, full = plan.tiles, torch.zeros_like(seen), torch.zeros_like(seen)
        for b, h, r in itertools.product(range(3), range(2), range(Sq)):
            first, last = ranges.offsets[b, h, r // ranges.block_m : r // ranges.block_m + 2].tolist()
            spans = list(zip(ranges.starts[first:last].tolist(), ranges.ends[first:last].tolist(), strict=True))
            assert all(start < end <= Sk for start, end in spans)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            for i, (start, end) in enumerate(spans):
                visited[b, h, r, start:end] = True
                full[b, h, r, start:end] = bool(ranges.full[first + i])
        assert not (seen & ~visited).any()
        assert not (full & ~seen).any()


def test_butterfly_and_local_global_written_out():
    butterfly = Blocks.butterfly(8, 8, 2, 2).pattern.int().tolist()
    assert butterfly == [[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]
    local = Blocks.local_global(10, 8, local=0, global_tiles=1, block_m=2, block_n=2).pattern.int().tolist()
    assert local == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0]]


def test_effective_mask_through_one_hot_values():
    """The mask as the kernels apply it: with v the identity, o is the matrix of weights."""
    for mask in (Causal(), Window(2, 1), Prefix(3), Chunk(4), Causal() & Chunk(4), Dense(torch.rand(9, 11) < 0.5)):
        q, k = torch.randn(1, 9, 1, 4), torch.randn(1, 11, 1, 4)
        weights = tilewise.attention(q, k, torch.eye(11)[None, :, None], mask=mask)[0, :, 0]
        assert torch.equal(weights > 0, _visible(mask, 9, 11)[0, 0])
