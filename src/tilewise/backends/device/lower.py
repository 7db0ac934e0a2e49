"""Lowering for GPUs: a bound spec becomes the structs that kernels read. No values are read from the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.block_mask import TileMap, element_mask, tile_map
from tilewise.masks import Blocks, Causal, Chunk, Document, IntervalMask, Prefix, TileMask, Window
from tilewise.predicates import drop_threshold
from tilewise.sequences import RowBounds, Sequences, row_bounds, sequences
from tilewise.spec import BoundSpec
from tilewise.tiles import cdiv

from .structs import Interval, Lengths, Scoring, Strided, Visit

LOG2E = 1.0 / math.log(2.0)
NO_KEY = 2**31 - 1
FAR = 2**23  # elements between rows from which 256 of them no longer fit in the 32-bit offsets inside a tile


@dataclass(frozen=True, eq=False)
class Lowered:
    """One call without q, k and v."""

    bound: BoundSpec
    q_shape: torch.Size
    k_shape: torch.Size
    device: torch.device
    lengths: Lengths
    scoring: Scoring
    B: int
    H: int

    @property
    def varlen(self) -> bool:
        return self.bound.spec.varlen

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.H, self.q_shape[0]) if self.varlen else (self.B, self.H, self.q_shape[1])

    @cached_property
    def kind(self) -> tuple:
        """Equal for calls that differ in numbers and addresses only: the same compiled kernels serve them."""
        bound = self.bound
        shapes = tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in bound.tensors)
        return bound.spec.key, self.scoring.scale is None, self.lengths.max_q, self.lengths.max_k, shapes

    @cached_property
    def sinks(self) -> Tensor | None:
        sinks = self.bound.sinks
        return None if sinks is None else sinks.float().resolve_neg().contiguous()

    @cached_property
    def sequences(self) -> Sequences:
        lengths = self.lengths
        return sequences(self.bound, self.q_shape, self.k_shape, lengths.max_q, lengths.max_k, self.device)

    @cached_property
    def row_bounds(self) -> RowBounds:
        return row_bounds(self.bound, self.sequences, self.q_shape[0])

    @cached_property
    def closed(self) -> Interval | None:
        """The interval masks in closed formulas, where each kind occurs in a form that kernels know."""
        return _closed_formulas(self.bound.interval_masks)

    @cached_property
    def interval(self) -> Interval:
        """Closed formulas, else bounds of every row."""
        if self.closed is not None:
            return self.closed
        return Interval(low=self.row_bounds.lo, high=self.row_bounds.hi, batch=self.row_bounds.stride)

    @cached_property
    def ordered_interval(self) -> Interval:
        """`interval`, with bounds of every key where it has bounds of every row; see `is_ordered`."""
        if self.closed is not None:
            return self.closed
        lo, hi = (x.view(-1, self.lengths.max_q) for x in (self.row_bounds.lo, self.row_bounds.hi))
        keys = torch.arange(self.lengths.max_k, dtype=lo.dtype, device=self.device).repeat(len(lo), 1)
        # Rows whose `lo` is at most n come first, rows whose `hi` is larger come last.
        first, end = (torch.searchsorted(x, keys, right=True, out_int32=True) for x in (hi, lo))
        return self.interval._replace(first=first, end=end, key_batch=self.lengths.max_k if len(lo) > 1 else 0)

    @cached_property
    def width(self) -> int:
        """How many keys a row sees at most, and how many rows see a key, as far as numbers tell."""
        interval, widths = self.interval, [max(self.lengths.max_q, self.lengths.max_k)]
        if interval.left is not None and interval.right is not None:
            widths.append(interval.left + interval.right + 1)
        if interval.chunk is not None:
            widths.append(interval.chunk)
        return max(0, min(widths))

    @property
    def reach(self) -> int:
        """How many keys the rows of one sequence see together at most, likewise."""
        return min(self.lengths.max_k, self.width + self.lengths.max_q)

    @property
    def work(self) -> str:
        """What kernels do to each score besides scaling and hiding it: "plain": nothing; "biased": load a bias; "modified"."""
        if self.scoring.bias is not None:
            return "biased"
        return "plain" if self.scoring.scale is None and self.scoring.seed is None else "modified"

    @property
    def lists_tiles(self) -> bool:
        """Whether tiles to visit are listed in memory, not computed from the rows' intervals."""
        return self.scoring.dense is not None or self.scoring.pattern is not None


def lower(q: Tensor, k: Tensor, bound: BoundSpec, max_q: int, max_k: int) -> Lowered:
    """The structs of one call; `q` and `k` give shapes and device."""
    # A bound spec without tensors is the same object in every call of a training loop (`spec.bind`): so are its structs.
    if not bound.has_tensors:
        remembered = _lower_bare(bound, q.shape, k.shape, q.dtype, q.device, max_q, max_k)
        if remembered.closed is not None:  # else bounds in memory, which belong to one call (`sequences._made_on`)
            return remembered
    return _lower(bound, q.shape, k.shape, q.dtype, q.device, max_q, max_k)


def _lower(
    bound: BoundSpec, q_shape: torch.Size, k_shape: torch.Size, dtype: torch.dtype, device: torch.device, max_q: int,
    max_k: int,
) -> Lowered:  # fmt: skip
    spec = bound.spec
    if spec.varlen:
        assert bound.cu_seqlens_q is not None
        B, H, total_q, total_k = len(bound.cu_seqlens_q) - 1, q_shape[1], q_shape[0], k_shape[0]
    else:
        (B, max_q, H, _), max_k = q_shape, k_shape[1]
        total_q, total_k = max_q, max_k
    lengths = Lengths(
        max_q, max_k, total_q, total_k, int(spec.align == "bottom_right"), bound.cu_seqlens_q, bound.cu_seqlens_k,
        bound.seqused_q, bound.seqused_k,
    )  # fmt: skip
    scoring = _scoring(bound, dtype, device, B, H, max_q, max_k)
    return Lowered(bound, q_shape, k_shape, device, lengths, scoring, B, H)


_lower_bare = lru_cache(maxsize=256)(_lower)


def as_rows(x: Tensor) -> Tensor:
    """`x` as kernels read it, consecutive along its last dim and rows not FAR apart: a copy only where it is not so."""
    x = x.resolve_neg()
    if (x.stride(-1) == 1 or x.size(-1) == 1) and x.stride(-3) < FAR:
        return x
    # Rows of many thousand heads are far apart in a contiguous tensor, too: heads outside rows.
    near = x.shape[-2] * x.shape[-1] < FAR
    return x.contiguous() if near else x.transpose(-3, -2).contiguous().transpose(-3, -2)


def strided(x: Tensor) -> Strided:
    """Strides of (B, S, H, D) or packed (total, H, D)."""
    *batch, row, head, _ = x.stride()
    return Strided(x, batch[0] if batch else 0, row, head)


def per_row(x: Tensor) -> Strided:
    """Strides of one number per row: (B, H, S), or packed (H, total)."""
    *batch, head, row = x.stride()
    return Strided(x, batch[0] if batch else 0, row, head)


def _elements(name: str, x: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """The fields of `Scoring` for a tensor that broadcasts to `shape`."""
    if x is None:
        return {}
    x = x.resolve_neg().expand(shape)
    return {name: x} | dict(zip((f"{name}_b", f"{name}_h", f"{name}_m", f"{name}_n"), x.stride(), strict=True))


def is_ordered(bound: BoundSpec) -> bool:
    """Whether no row sees keys before those of the row before it: rows that see a key are an interval, too.

    So it is with closed formulas, which kernels turn round. Bounds of rows are turned round in the dense layout only.
    """
    documents = [mask for mask in bound.interval_masks if isinstance(mask, Document)]
    in_rows = _closed_formulas(bound.interval_masks) is None
    return all(mask.ordered for mask in documents) and not (in_rows and bound.spec.varlen)


def _closed_formulas(masks: list[IntervalMask]) -> Interval | None:
    """The intersection of the masks in formulas that kernels know, or None where it has no such form."""
    limits: dict[str, int] = {}

    def at_most(name: str, value: int | None) -> None:
        if value is not None:
            limits[name] = min(value, limits.get(name, value))

    for mask in masks:
        if isinstance(mask, Causal):
            at_most("right", 0)
        elif isinstance(mask, Window):
            at_most("left", mask.left)
            at_most("right", mask.right)
        elif isinstance(mask, Prefix) and isinstance(mask.length, int):
            at_most("prefix", mask.length)
        elif not isinstance(mask, Chunk) or limits.setdefault("chunk", mask.size) != mask.size:
            return None
    left, right, prefix, chunk = map(limits.get, ("left", "right", "prefix", "chunk"))
    return Interval(left, right, prefix, chunk)


def _scoring(
    bound: BoundSpec, dtype: torch.dtype, device: torch.device, B: int, H: int, max_q: int, max_k: int
) -> Scoring:
    factor = bound.softmax_scale * LOG2E
    shape = (B, H, max_q, max_k)
    slopes = None if bound.alibi_slopes is None else bound.alibi_slopes.float().resolve_neg().contiguous()
    blocks: list[TileMask] = [mask for mask in bound.tile_masks if isinstance(mask, Blocks)]
    dense = element_mask(bound.tile_masks)
    tiles = tile_map(blocks, max_q, max_k) if blocks else None
    plain = bound.spec.softcap is None and slopes is None and bound.bias is None and factor > 0
    fields: dict[str, Any] = {
        "factor": factor if plain else 1.0,
        "scale": None if plain else factor,
        "cap": None if bound.spec.softcap is None else bound.spec.softcap * LOG2E,
        "coarse": 1 if bound.spec.softcap is not None and dtype.itemsize == 2 and _has_tanh(device) else None,
        "slopes": slopes,
        "slopes_batch": None if slopes is None else H * (slopes.dim() - 1),  # (H,) or (B, H)
    }
    fields |= _elements("bias", bound.bias, shape) | _elements("dense", dense, shape)
    if tiles is not None:
        fields |= _elements("pattern", tiles.any, (B, H, *tiles.any.shape[2:]))
        fields |= {"block_m": tiles.block_m, "block_n": tiles.block_n}
    if bound.seed is not None:
        p = bound.spec.dropout_p
        fields |= {"seed": bound.seed.to(device), "drop_threshold": drop_threshold(p), "drop_scale": 1.0 / (1.0 - p)}
    return Scoring(**fields)


def _has_tanh(device: torch.device) -> bool:
    """Whether a special function unit computes tanh."""
    return device.type == "cuda" and torch.version.hip is None


def visit(lowered: Lowered, block_m: int, block_n: int, transposed: bool = False) -> Visit | None:
    """Tile lists for tiles of this size, where masks need them; `transposed`: for each key tile, its row tiles."""
    if not lowered.lists_tiles and not (transposed and lowered.interval.low is not None):
        return None
    some, every = _classify(lowered, block_m, block_n)
    if transposed:
        some, every = some.transpose(2, 3), every.transpose(2, 3)
    return _list_tiles(some, every)


def packed_visit(lowered: Lowered, block_m: int, block_n: int, group: int) -> Visit | None:
    """The same for tiles of `rows.packed_rows`: one list for the rows of `group` heads."""
    if not lowered.lists_tiles:
        return None
    some, every = (_packed(seen, block_m, group, nothing) for seen, nothing in _classified_rows(lowered, block_n))
    return _list_tiles(some.any(3), every.all(3))


def _classified_rows(lowered: Lowered, block_n: int) -> tuple[tuple[Tensor, bool], tuple[Tensor, bool]]:
    """`_classify` for single rows; with each result, what a row that is not there counts as."""
    some, every = _classify(lowered, 1, block_n)
    return (some, False), (every, True)


def _packed(seen: Tensor, block_m: int, group: int, nothing: bool) -> Tensor:
    """(B or 1, H or 1, Sq, nk) as (B or 1, Hkv or 1, tiles, block_m, nk)."""
    b, h, rows, nk = seen.shape
    heads = max(1, h // group)
    packed = seen.expand(b, heads * group, rows, nk).unflatten(1, (heads, group)).transpose(2, 3).flatten(2, 3)
    padded = F.pad(packed, (0, 0, 0, -packed.shape[2] % block_m), value=nothing)
    return padded.unflatten(2, (-1, block_m))


def _list_tiles(some: Tensor, every: Tensor) -> Visit:
    """Lists from bool (B or 1, H or 1, rows, columns): the tiles to visit, and those that need no masking.

    With rows and columns that 16 divides, so are all strides: Triton would compile a kernel for each mixture.
    """
    rows, columns = some.shape[2:]
    some, every = (F.pad(x, (0, -columns % 16, 0, -rows % 16)) for x in (some, every & some))
    # Stable: first the partial tiles, then the full ones, each in ascending order.
    order = torch.where(some, every.to(torch.uint8), 2).argsort(dim=3, stable=True).int().contiguous()
    full = every.sum(3, dtype=torch.int32)
    partial = some.sum(3, dtype=torch.int32) - full
    b, h, rows, columns = some.shape
    return Visit(
        order, partial.contiguous(), full.contiguous(), h * rows if b > 1 else 0, rows if h > 1 else 0, columns
    )


def _classify(lowered: Lowered, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """Per tile, whether some and whether every row-key pair is seen, bool (B or 1, H or 1, nq, nk)."""
    lengths, bound = lowered.lengths, lowered.bound
    some, every = _interval_tiles(lowered, block_m, block_n)
    if bound.tile_masks:
        tiles = tile_map(bound.tile_masks, lengths.max_q, lengths.max_k)
        kept, whole = _resample(tiles, some.shape[2], some.shape[3], block_m, block_n)
        some, every = some & kept, every & whole
    return some, every


def _interval_tiles(lowered: Lowered, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """The same for the interval masks and the lengths of the sequences."""
    seqs, bounds = lowered.sequences, lowered.row_bounds
    device = bounds.lo.device
    nq, nk = cdiv(seqs.max_q, block_m), cdiv(seqs.max_k, block_n)
    index = torch.arange(nq * block_m, device=device)
    batches = seqs.batch if seqs.varlen or bounds.stride else min(1, seqs.batch)
    first = torch.arange(batches, device=device)[:, None] * bounds.stride + seqs.q_start[:batches, None]
    valid = index < seqs.q_len[:batches, None]
    at = (first + index).clamp(max=max(len(bounds.lo) - 1, 0))
    lo, hi = (x[at].reshape(batches, nq, block_m) for x in (bounds.lo, bounds.hi))
    valid = valid.reshape(batches, nq, block_m)
    seen = valid & (lo < hi)
    low, high = torch.where(seen, lo, NO_KEY).amin(2), torch.where(seen, hi, 0).amax(2)
    all_low, all_high = torch.where(valid, lo, 0).amax(2), torch.where(valid, hi, NO_KEY).amin(2)
    start = torch.arange(nk, device=device) * block_n
    some = (low[..., None] < start + block_n) & (high[..., None] > start)
    every = (all_low[..., None] <= start) & (all_high[..., None] >= start + block_n) & valid.all(2)[..., None]
    return some[:, None], every[:, None]


def _resample(tiles: TileMap, nq: int, nk: int, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """A tile map in tiles of another size: by sums over rectangles of the given one."""
    found = []
    for kept, some in ((tiles.any, True), (tiles.full, False)):
        sums = F.pad(kept.int().cumsum(2).cumsum(3), (1, 0, 1, 0))
        top, bottom = _covered(nq, block_m, tiles.block_m, kept.shape[2], kept.device)
        left, right = _covered(nk, block_n, tiles.block_n, kept.shape[3], kept.device)
        rows = sums[:, :, bottom] - sums[:, :, top]
        inside = rows[..., right] - rows[..., left]
        found.append(inside > 0 if some else inside == (bottom - top)[:, None] * (right - left))
    return found[0], found[1]


def _covered(count: int, size: int, given_size: int, given: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The range of given blocks that each of `count` blocks of another size touches."""
    start = torch.arange(count, device=device) * size
    return (start // given_size).clamp(max=given), cdiv(start + size, given_size).clamp(max=given)
