"""Options that describe a problem, shared by the commands that take one, and the masks they stand for."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor

from tilewise import masks
from tilewise.cli.output import dtype_of

PATTERNS = ("butterfly", "local-global")

Batch = Annotated[int, typer.Option("--batch", "-B", help="Sequences.")]
Queries = Annotated[int, typer.Option("--sq", help="Queries per sequence.")]
Keys = Annotated[int | None, typer.Option("--sk", help="Keys per sequence.", show_default="as many")]
Heads = Annotated[int, typer.Option("--heads", "-H", help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="Key and value heads.", show_default="as many")]
Dim = Annotated[int, typer.Option("--dim", "-D", help="Head dim of q and k.")]
ValueDim = Annotated[int | None, typer.Option(help="Head dim of v.", show_default="the same")]
Dtype = Annotated[str, typer.Option(help="fp32, fp64, bf16 or fp16.")]
CausalMask = Annotated[bool, typer.Option("--causal", help="Keys up to the query's own.")]
TopLeft = Annotated[bool, typer.Option("--top-left", help="Causal from query 0 = key 0.")]
Window = Annotated[str | None, typer.Option(help="LEFT,RIGHT: sliding window, -1 for no limit.")]
Prefix = Annotated[int | None, typer.Option(help="Prefix-LM: this many keys are seen by all.")]
Chunk = Annotated[int | None, typer.Option(help="Attention within chunks of this many keys.")]
Documents = Annotated[str | None, typer.Option(help="Lengths of packed documents: 500,1000,548.")]
Blocks = Annotated[str | None, typer.Option(help="Block-sparse pattern: butterfly or local-global.")]


def tensors(
    batch: int, sq: int, sk: int | None, heads: int, kv_heads: int | None, dim: int, value_dim: int | None, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of these shapes that take no memory: one number, expanded."""
    sk, hkv, dv = or_else(sk, sq), or_else(kv_heads, heads), or_else(value_dim, dim)
    shapes = (batch, sq, heads, dim), (batch, sk, hkv, dim), (batch, sk, hkv, dv)
    q, k, v = (expanded(shape, dtype) for shape in shapes)
    return q, k, v


def expanded(shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor of this shape that holds one number."""
    if min(shape) < 0:
        raise ValueError(f"sizes must be >= 0, got {shape}")
    return torch.zeros((), dtype=dtype_of(dtype)).expand(shape)


def or_else(value: int | None, default: int) -> int:
    return default if value is None else value


def masks_of(
    sq: int, sk: int, window: str | None, prefix: int | None, chunk: int | None, documents: str | None,
    blocks: str | None, tile: tuple[int, int],
) -> list[masks.Mask]:  # fmt: skip
    """The masks of the options --window, --prefix, --chunk, --documents and --blocks (in tiles of this size)."""
    found: list[masks.Mask] = []
    if window is not None:
        sides = integers(window, "--window")
        if len(sides) != 2:
            raise ValueError(f"--window must be LEFT,RIGHT, got {window!r}")
        found.append(masks.Window(sides[0], sides[1]))
    if prefix is not None:
        found.append(masks.Prefix(prefix))
    if chunk is not None:
        found.append(masks.Chunk(chunk))
    if documents is not None:
        ends = torch.tensor([0, *integers(documents, "--documents")]).cumsum(0)
        found.append(masks.Document.from_cu_seqlens(ends))
    if blocks is not None:
        makers = dict(zip(PATTERNS, (masks.Blocks.butterfly, masks.Blocks.local_global), strict=True))
        if blocks not in makers:
            raise ValueError(f"--blocks must be one of {', '.join(PATTERNS)}, got {blocks!r}")
        found.append(makers[blocks](sq, sk, block_m=tile[0], block_n=tile[1]))
    return found


def integers(text: str, option: str) -> list[int]:
    """The integers of a comma-separated option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, got {text!r}") from None
