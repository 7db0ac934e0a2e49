"""Tile lists: which tiles a block-sparse or dense mask visits, and which of them need no element-wise mask."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.masks import Blocks, TileMask

DENSE_BLOCK = 64  # rows and keys per tile into which a dense mask is summarised


class TileMap(NamedTuple):
    """Tiles of `block_m` rows by `block_n` keys: visited where `any`, without element-wise mask where `full`."""

    any: Tensor  # bool (B or 1, H or 1, nq, nk)
    full: Tensor
    block_m: int
    block_n: int


def tile_map(masks: list[TileMask], Sq: int, Sk: int) -> TileMap:
    """One tile map for the intersection of tile masks, in tiles that fit all of them."""
    block_m = math.gcd(*(m.block_m if isinstance(m, Blocks) else 0 for m in masks)) or DENSE_BLOCK
    block_n = math.gcd(*(m.block_n if isinstance(m, Blocks) else 0 for m in masks)) or DENSE_BLOCK
    nq, nk = math.ceil(Sq / block_m), math.ceil(Sk / block_n)
    visited = full = torch.ones(1, 1, nq, nk, dtype=torch.bool, device=masks[0].tensors[0].device)
    for mask in masks:
        if isinstance(mask, Blocks):
            kept = mask.keep()
            kept = kept.repeat_interleave(mask.block_m // block_m, 2).repeat_interleave(mask.block_n // block_n, 3)
            some = every = kept[:, :, :nq, :nk]
        else:
            some, every = _summarise(mask.keep(), Sq, Sk, block_m, block_n)
        visited, full = visited & some, full & every
    return TileMap(visited, full & visited, block_m, block_n)


def element_mask(masks: list[TileMask]) -> Tensor | None:
    """The element-wise part of tile masks, bool, broadcastable to (B, H, Sq, Sk); None when tiles say it all."""
    kept = [mask.keep() for mask in masks if not isinstance(mask, Blocks)]
    if not kept:
        return None
    combined = kept[0]
    for other in kept[1:]:
        combined = combined & other
    return combined


def _summarise(keep: Tensor, Sq: int, Sk: int, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """Whether any, and whether every, element of each tile is kept; broadcast dims stay broadcast."""
    rows, cols = keep.shape[2:]
    block = (block_m if rows > 1 else 1, block_n if cols > 1 else 1)
    pad = (0, -cols % block[1], 0, -rows % block[0])
    shape = (*keep.shape[:2], -(-rows // block[0]), block[0], -(-cols // block[1]), block[1])
    some = F.pad(keep, pad, value=False).reshape(shape).any(5).any(3)
    every = F.pad(keep, pad, value=True).reshape(shape).all(5).all(3)
    full = (*keep.shape[:2], math.ceil(Sq / block_m), math.ceil(Sk / block_n))
    return some.expand(full), every.expand(full)
