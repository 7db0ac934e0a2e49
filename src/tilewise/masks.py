"""Masks: objects that say which keys a query sees, combined with ``&``.

Interval masks (`Full`, `Causal`, `Window`, `Prefix`, `Chunk`, `Document`) cost O(N) memory: their row ``m`` sees the keys
``[lo(m), hi(m))``, and the intersection of two intervals is an interval. Tile masks (`Blocks`, `Dense`) visit listed
tiles only. Positions: ``n`` counts keys from 0; ``m`` is the query's position in the key sequence, bottom-right aligned
(``m = row + Sk - Sq``, the last query sees the last key) unless the call says ``"top_left"`` (``m = row``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise import predicates
from tilewise.checks import as_int, describe, positive_int

ALIGNMENTS = ("bottom_right", "top_left")


class Rows(NamedTuple):
    """Query rows for which bounds are asked, as int64 tensors of one shape ``(R,)``."""

    m: Tensor  # aligned position
    batch: Tensor  # sequence index
    index: Tensor  # row index inside its sequence


class Mask:
    """Base of all masks. ``a & b`` sees what both see."""

    name: ClassVar[str]
    per_batch: bool = False  # whether bounds differ between sequences of equal lengths

    @property
    def params(self) -> tuple[Any, ...]:
        """Plain values that, with `tensors`, rebuild the mask: they travel in the spec's key."""
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    @classmethod
    def rebuild(cls, params: Sequence[Any], tensors: Sequence[Tensor]) -> Mask:
        return cls(*params, *tensors)

    def parts(self) -> tuple[Mask, ...]:
        return (self,)

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And((*self.parts(), *as_mask(other).parts()))

    __rand__ = __and__


class IntervalMask(Mask):
    def interval(self, rows: Rows) -> tuple[Tensor | None, Tensor | None]:
        """Bounds ``(lo, hi)`` of each row, ``None`` for no limit; they may lie outside the keys."""
        raise NotImplementedError


class TileMask(Mask):
    def keep(self) -> Tensor:
        """What is kept, bool, 4-D (B or 1, H or 1, ., .): per tile for `Blocks`, per element for `Dense`."""
        raise NotImplementedError


@dataclass(frozen=True)
class And(Mask):
    """Intersection; made by ``&``."""

    masks: tuple[Mask, ...]

    def parts(self) -> tuple[Mask, ...]:
        return self.masks


@dataclass(frozen=True)
class Full(IntervalMask):
    """Every query sees every key."""

    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True)
class Causal(IntervalMask):
    """Keys up to the query's own position. `align` also sets the alignment of the whole call (default bottom-right)."""

    name: ClassVar[str] = "causal"
    align: str | None = None

    def __post_init__(self):
        check_align(self.align)

    @property
    def params(self):
        return (self.align,)

    def interval(self, rows):
        return predicates.causal_interval(rows.m)


@dataclass(frozen=True)
class Window(IntervalMask):
    """Keys from ``m - left`` to ``m + right``, both included. ``None`` (or -1) means no limit on that side."""

    name: ClassVar[str] = "window"
    left: int | None = None
    right: int | None = None
    align: str | None = None

    def __post_init__(self):
        check_align(self.align)
        object.__setattr__(self, "left", window_side(self.left, "left"))
        object.__setattr__(self, "right", window_side(self.right, "right"))

    @property
    def params(self):
        return (self.left, self.right, self.align)

    def interval(self, rows):
        return predicates.window_interval(rows.m, self.left, self.right)


@dataclass(frozen=True)
class Chunk(IntervalMask):
    """Keys of the query's own chunk of `size` positions (chunked-local attention; combine with `Causal`)."""

    name: ClassVar[str] = "chunk"
    size: int

    def __post_init__(self):
        object.__setattr__(self, "size", _near(positive_int(self.size, "Chunk size")))

    @property
    def params(self):
        return (self.size,)

    def interval(self, rows):
        return predicates.chunk_interval(rows.m, self.size)


@dataclass(frozen=True, eq=False)
class Prefix(IntervalMask):
    """Prefix-LM: the first `length` keys are seen by all, the rest causally. `length`: int, or int tensor (B,)."""

    name: ClassVar[str] = "prefix"
    length: int | Tensor

    def __post_init__(self):
        if isinstance(self.length, Tensor):
            if self.length.dim() != 1 or self.length.is_floating_point() or self.length.dtype == torch.bool:
                raise ValueError(f"Prefix length must be an int or an int tensor (B,), got {describe(self.length)}")
        else:
            length = as_int(self.length, "Prefix length")
            if length < 0:
                raise ValueError(f"Prefix length must be >= 0, got {length}")
            object.__setattr__(self, "length", _near(length))

    @property
    def per_batch(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.length, Tensor)

    @property
    def params(self):
        return () if isinstance(self.length, Tensor) else (self.length,)

    @property
    def tensors(self):
        return (self.length,) if isinstance(self.length, Tensor) else ()

    def interval(self, rows):
        length = self.length.long()[rows.batch] if isinstance(self.length, Tensor) else self.length
        return predicates.prefix_interval(rows.m, length)


class Document(IntervalMask):
    """Queries see keys of their own document.

    Args:
        ids_q: int tensor (Sq,) or (B, Sq), the document of each query. Negative ids are padding: they see no key.
        ids_k: the same for keys, (Sk,) or (B, Sk); default `ids_q`. Each document must be one run of keys.

    Raises:
        ValueError: shapes or dtypes differ from the above, or a document's keys are not contiguous.
    """

    name: ClassVar[str] = "document"
    ordered: bool  # no bound ever decreases from query to query

    def __init__(self, ids_q: Tensor, ids_k: Tensor | None = None):
        ids_q = _document_ids(ids_q, "ids_q")
        ids_k = ids_q if ids_k is None else _document_ids(ids_k, "ids_k")
        if ids_q.device != ids_k.device:
            raise ValueError(f"Document ids must share a device, got {ids_q.device} and {ids_k.device}")
        if ids_q.shape[0] != ids_k.shape[0]:
            raise ValueError(f"Document ids must share a batch size, got {ids_q.shape[0]} and {ids_k.shape[0]}")
        self.lo, self.hi, facts = _document_bounds(ids_q, ids_k)
        self.length_k = ids_k.shape[1]
        contiguous, self.ordered = facts.tolist()
        if not contiguous:
            raise ValueError("Document: each document's keys must be contiguous; sort the sequence by document first")

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None) -> Document:
        """Documents given by cumulative lengths ``[0, l0, l0 + l1, ...]`` (int tensor, documents + 1 entries)."""
        ids = [_ids_from_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")]
        if cu_seqlens_k is not None:
            ids.append(_ids_from_cu_seqlens(cu_seqlens_k, "cu_seqlens_k"))
        return cls(*ids)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> Document:
        """Packed documents given by positions (Sq,) or (B, Sq): a new one starts where positions do not rise by 1."""
        positions = _document_ids(position_ids, "position_ids")
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        return cls(starts.cumsum(1) - 1)

    @classmethod
    def rebuild(cls, params, tensors):
        self = cls.__new__(cls)
        (self.length_k, self.ordered), (self.lo, self.hi) = params, tensors
        return self

    @property
    def per_batch(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.lo.shape[0] != 1

    @property
    def params(self):
        return (self.length_k, self.ordered)

    @property
    def tensors(self):
        return (self.lo, self.hi)

    def interval(self, rows):
        batch = rows.batch if self.per_batch else torch.zeros_like(rows.batch)
        return self.lo[batch, rows.index].long(), self.hi[batch, rows.index].long()


@dataclass(frozen=True, eq=False)
class Blocks(TileMask):
    """Block-sparse attention: tile ``(i, j)`` of `block_m` rows by `block_n` keys is computed where ``pattern[.., i, j]``.

    Args:
        pattern: bool tensor (nq, nk), (H, nq, nk) or (B, H, nq, nk); nq = ceil(Sq / block_m), nk = ceil(Sk / block_n).
        block_m, block_n: tile size in rows and keys.
    """

    name: ClassVar[str] = "blocks"
    pattern: Tensor
    block_m: int = 128
    block_n: int = 128

    def __post_init__(self):
        if (
            not isinstance(self.pattern, Tensor)
            or self.pattern.dtype != torch.bool
            or self.pattern.dim() not in (2, 3, 4)
        ):
            raise ValueError(
                f"Blocks pattern must be a bool tensor of 2, 3 or 4 dims (.., nq, nk), got {describe(self.pattern)}"
            )
        object.__setattr__(self, "block_m", positive_int(self.block_m, "Blocks block_m"))
        object.__setattr__(self, "block_n", positive_int(self.block_n, "Blocks block_n"))

    @classmethod
    def rebuild(cls, params, tensors):
        return cls(tensors[0], *params)

    @property
    def params(self):
        return (self.block_m, self.block_n)

    @property
    def tensors(self):
        return (self.pattern,)

    def keep(self):
        return as_4d(self.pattern)

    @classmethod
    def butterfly(cls, Sq: int, Sk: int, block_m: int = 128, block_n: int = 128) -> Blocks:
        """Tiles ``(i, j)`` where i and j differ in at most one bit: log2(n) + 1 per row (Pixelated Butterfly, section 3)."""
        i, j = _tile_grid(Sq, Sk, block_m, block_n)
        differ = i ^ j
        return cls((differ & (differ - 1)) == 0, block_m, block_n)

    @classmethod
    def local_global(
        cls, Sq: int, Sk: int, local: int = 1, global_tiles: int = 1, block_m: int = 128, block_n: int = 128
    ) -> Blocks:
        """Tiles within `local` of the diagonal, and the first `global_tiles` rows and columns (BigBird, Longformer)."""
        i, j = _tile_grid(Sq, Sk, block_m, block_n)
        return cls(((i - j).abs() <= local) | (i < global_tiles) | (j < global_tiles), block_m, block_n)


@dataclass(frozen=True, eq=False)
class Dense(TileMask):
    """Any boolean mask, broadcastable to (B, H, Sq, Sk); True means "seen". Tiles that are all False are skipped."""

    name: ClassVar[str] = "dense"
    mask: Tensor

    def __post_init__(self):
        if not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool or not 1 <= self.mask.dim() <= 4:
            raise ValueError(
                f"a dense mask must be a bool tensor broadcastable to (B, H, Sq, Sk), got {describe(self.mask)}; "
                "additive masks go to `bias`"
            )

    @property
    def tensors(self):
        return (self.mask,)

    def keep(self):
        return as_4d(self.mask)


KINDS: dict[str, type[Mask]] = {c.name: c for c in (Causal, Window, Chunk, Prefix, Document, Blocks, Dense)}


def as_mask(mask: Mask | Tensor) -> Mask:
    """A mask object from what users pass: a mask, or a boolean tensor."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    raise TypeError(f"mask must be a tilewise mask (masks combine with &) or a bool tensor, got {type(mask).__name__}")


def as_4d(t: Tensor) -> Tensor:
    """Leading dims of size 1 added until there are four."""
    return t.reshape((1,) * (4 - t.dim()) + t.shape)


def window_side(value: Any, side: str) -> int | None:
    """One side of a window: ``None`` and -1 are no limit, other negative numbers are refused."""
    if value is None:
        return None
    value = as_int(value, f"window {side}")
    if value < -1:
        raise ValueError(f"window {side} must be >= 0, or None (or -1) for no limit, got {value}")
    return None if value == -1 or value >= predicates.BEFORE_ALL_ROWS else value


def _near(size: int) -> int:
    """A size that kernels can add to a position in 32 bits: all sizes beyond every sequence mean the same."""
    return min(size, predicates.BEFORE_ALL_ROWS)


def check_align(align: str | None) -> None:
    if align is not None and align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS}, got {align!r}")


def _tile_grid(Sq, Sk, block_m, block_n):
    rows, cols = -(-Sq // block_m), -(-Sk // block_n)
    return torch.arange(rows)[:, None], torch.arange(cols)[None, :]


def _document_ids(ids: Any, what: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"Document {what} must be an int tensor (S,) or (B, S), got {describe(ids)}")
    return ids.long() if ids.dim() == 2 else ids.long()[None]


def _ids_from_cu_seqlens(cu_seqlens: Any, what: str) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"{what} must be a 1-D int tensor [0, l0, l0 + l1, ...], got {describe(cu_seqlens)}")
    lengths = cu_seqlens.long().diff()
    if len(cu_seqlens) == 0 or int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{what} must start at 0 and never decrease, got {cu_seqlens.tolist()}")
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def _document_bounds(ids_q: Tensor, ids_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and one-past-last key of each query's document; whether every document is one run of keys, and `ordered`."""
    if ids_k.shape[1] == 0:
        empty = torch.zeros_like(ids_q, dtype=torch.int32)
        return empty, empty, torch.tensor((True, True))
    sorted_ids, order = ids_k.sort(dim=1, stable=True)
    run = (sorted_ids[:, 1:] != sorted_ids[:, :-1]) | (order[:, 1:] == order[:, :-1] + 1) | (sorted_ids[:, 1:] < 0)
    begin = torch.searchsorted(sorted_ids, ids_q, right=False)
    end = torch.searchsorted(sorted_ids, ids_q, right=True)
    seen = (end > begin) & (ids_q >= 0)
    last = ids_k.shape[1] - 1
    hi = torch.where(seen, order.gather(1, (end - 1).clamp(min=0)) + 1, 0)
    reached = hi.cummax(1).values  # padding sees no key, at a place where order stays
    lo = torch.where(seen, order.gather(1, begin.clamp(max=last)), reached)
    hi = torch.where(seen, hi, reached)
    ordered = torch.stack([(x.diff(dim=1) >= 0).all() for x in (lo, hi)]).all()
    return lo.int(), hi.int(), torch.stack((run.all(), ordered))
