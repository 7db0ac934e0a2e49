"""The tiles of one problem: slices of rows and of keys, which of them meet, and what is hidden in a tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from tilewise.masks import Blocks, IntervalMask, Mask, Rows
from tilewise.predicates import keep_interval
from tilewise.tiles import kv_tile_range

BLOCKS = Blocks.name
SKIPPED, MASKED, FULL = range(3)


def shared_by_all(masks: Sequence[Mask]) -> list[str]:
    """Why masks are not the same for all sequences and heads, or more than one brings tiles."""
    found = []
    if sum(isinstance(mask, Blocks) for mask in masks) > 1:
        found.append("takes one Blocks mask")
    if any(mask.per_batch or (isinstance(mask, Blocks) and mask.keep().shape[:2] != (1, 1)) for mask in masks):
        found.append("takes masks that are the same for all sequences and heads")
    return found


class Tiling:
    """A problem cut into tiles of `block_m` rows and `block_n` keys; a `Blocks` mask brings its own.

    Args:
        masks: the parts of the mask, the same for all sequences and heads.
        Sq, Sk: rows and keys.
        block_m, block_n: of a tile.
        device: of the tensors.
    """

    def __init__(
        self, masks: Sequence[Mask], Sq: int, Sk: int, block_m: int, block_n: int, device: torch.device | str = "cpu"
    ):
        # Decided on the CPU: asking a GPU for each of thousands of tiles would take longer than its work on them.
        masks, pattern = [mask.rebuild(mask.params, [t.cpu() for t in mask.tensors]) for mask in masks], None
        for mask in masks:
            if isinstance(mask, Blocks):
                block_m, block_n, pattern = mask.block_m, mask.block_n, mask.keep()[0, 0].tolist()
        self.block_m, self.block_n = block_m, block_n
        self.rows = [slice(a, min(a + block_m, Sq)) for a in range(0, Sq, block_m)]
        self.keys = [slice(a, min(a + block_n, Sk)) for a in range(0, Sk, block_n)]
        lo, hi = _bounds(masks, Sq, Sk, "cpu")
        self.lo, self.hi = lo.to(device, torch.int32), hi.to(device, torch.int32)
        self.grid = [self._kinds(lo[rows], hi[rows]) for rows in self.rows]
        if pattern is not None:
            self.grid = [
                [kind if kept else SKIPPED for kind, kept in zip(*line, strict=True)]
                for line in zip(self.grid, pattern, strict=True)
            ]

    def _kinds(self, lo: Tensor, hi: Tensor) -> list[int]:
        """What a block of rows does with each tile of keys."""
        sees = lo < hi
        if not bool(sees.any()):
            return [SKIPPED] * len(self.keys)
        seen = kv_tile_range(int(lo[sees].min()), int(lo.max()), int(hi.min()), int(hi[sees].max()), self.block_n)
        whole = [range(seen.first, seen.last), range(seen.full_first, seen.full_last)]
        # The last tile may have fewer keys: it is full if every row sees all that there are.
        if bool((hi == self.keys[-1].stop).all()) and seen.full_first < seen.last == len(self.keys):
            whole[1] = range(seen.full_first, seen.last)
        return [sum(j in tiles for tiles in whole) for j in range(len(self.keys))]

    def keys_of(self, i: int) -> list[int]:
        """The key tiles that the row tile i meets."""
        return [j for j, kind in enumerate(self.grid[i]) if kind != SKIPPED]

    def rows_of(self, j: int) -> list[int]:
        """The row tiles that the key tile j meets."""
        return [i for i, line in enumerate(self.grid) if line[j] != SKIPPED]

    def hide(self, s: Tensor, i: int, j: int) -> Tensor:
        """Scores of a tile with -inf, in place, where a row does not see a key."""
        if self.grid[i][j] == FULL:
            return s
        rows, keys = self.rows[i], self.keys[j]
        n = torch.arange(keys.start, keys.stop, device=s.device)
        return s.masked_fill_(~keep_interval(n, self.lo[rows, None], self.hi[rows, None]), -torch.inf)

    @cached_property
    def masked(self) -> bool:
        """Whether anything is hidden in a tile that is met."""
        return any(kind == MASKED for line in self.grid for kind in line)

    @cached_property
    def visits(self) -> tuple[Tensor, Tensor]:
        """For kernels: int32 (key tiles + 1,) and (visits,): tile j meets row tiles ``i[first[j] : first[j + 1]]``."""
        by_keys = [self.rows_of(j) for j in range(len(self.keys))]
        first = torch.tensor([0, *(len(rows) for rows in by_keys)]).cumsum(0)
        i = torch.tensor([i for rows in by_keys for i in rows])
        return first.to(self.lo.device, torch.int32), i.to(self.lo.device, torch.int32)


@lru_cache(maxsize=64)
def tiling(
    masks: tuple[Mask, ...], Sq: int, Sk: int, block_m: int, block_n: int, device: torch.device | str = "cpu"
) -> Tiling:
    """The `Tiling` of these arguments, made once for all layers and steps: masks are values, not to be changed."""
    return Tiling(masks, Sq, Sk, block_m, block_n, device)


def visible(masks: Sequence[Mask], Sq: int, Sk: int, device: torch.device | str) -> Tensor:
    """The whole mask as one (Sq, Sk) matrix, which only systems with N x N matrices can afford."""
    lo, hi = _bounds(masks, Sq, Sk, device)
    seen = keep_interval(torch.arange(Sk, device=device), lo[:, None], hi[:, None])
    for mask in masks:
        if isinstance(mask, Blocks):
            by_rows = mask.keep()[0, 0].to(device).repeat_interleave(mask.block_m, 0)[:Sq]
            seen &= by_rows.repeat_interleave(mask.block_n, 1)[:, :Sk]
    return seen


def _bounds(masks: Sequence[Mask], Sq: int, Sk: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Row r sees the keys lo[r] to hi[r] - 1, if its tiles are not left out."""
    row = torch.arange(Sq, device=device)
    top_left = any(getattr(mask, "align", None) == "top_left" for mask in masks)
    lo, hi = torch.zeros_like(row), torch.full_like(row, Sk)
    for mask in masks:
        if isinstance(mask, IntervalMask):
            low, high = mask.interval(Rows(row if top_left else row + Sk - Sq, torch.zeros_like(row), row))
            lo = lo if low is None else torch.maximum(lo, torch.as_tensor(low, device=device))
            hi = hi if high is None else torch.minimum(hi, torch.as_tensor(high, device=device))
    lo = lo.clamp(max=Sk)
    return lo, torch.maximum(hi, lo)
