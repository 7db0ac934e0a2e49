"""`tilewise explain`: a call described by options, explained without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilewise
from tilewise import masks
from tilewise.cli.output import JsonFile, PlotFile, console, dtype_of, figure_file, write_json
from tilewise.plan import BLOCK, FULL, MASKED, SKIPPED, TilePlan

PATTERNS = ("butterfly", "local-global")
COLOURS = {SKIPPED: "#f2f2f2", MASKED: "#f4a259", FULL: "#2a6f97"}
NAMES = {SKIPPED: "skipped", MASKED: "needs the mask", FULL: "full"}


def explain(
    batch: Annotated[int, typer.Option("--batch", "-B", help="Sequences.")] = 1,
    sq: Annotated[int, typer.Option("--sq", help="Queries per sequence.")] = 2048,
    sk: Annotated[int | None, typer.Option("--sk", help="Keys per sequence.", show_default="as many")] = None,
    heads: Annotated[int, typer.Option("--heads", "-H", help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads.", show_default="as many")] = None,
    dim: Annotated[int, typer.Option("--dim", "-D", help="Head dim of q and k.")] = 64,
    value_dim: Annotated[int | None, typer.Option(help="Head dim of v.", show_default="the same")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp64, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal", help="Keys up to the query's own.")] = False,
    top_left: Annotated[bool, typer.Option("--top-left", help="Causal from query 0 = key 0.")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT: sliding window, -1 for no limit.")] = None,
    prefix: Annotated[int | None, typer.Option(help="Prefix-LM: this many keys are seen by all.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Attention within chunks of this many keys.")] = None,
    documents: Annotated[str | None, typer.Option(help="Lengths of packed documents: 500,1000,548.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Block-sparse pattern: butterfly or local-global.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap on the scores.")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes, one per head.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A bias (1, H, Sq, Sk).")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="One sink logit per head.")] = False,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    backend: Annotated[str | None, typer.Option(help="Ask for this backend and no other.")] = None,
    block_m: Annotated[int, typer.Option(help="Rows of a tile; of the pattern with --blocks.")] = BLOCK,
    block_n: Annotated[int, typer.Option(help="Keys of a tile; of the pattern with --blocks.")] = BLOCK,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Show what a call would do: the backend and why not others, the tiles it visits, FLOPs, bytes and memory.

    Nothing is computed or allocated, so sizes may be larger than this machine.

    Example: `tilewise explain --sq 4096 --heads 32 --kv-heads 8 --dim 128 --causal --window 1024,0`
    """
    sk = sq if sk is None else sk
    found = [tilewise.Causal("top_left" if top_left else None)] if causal or top_left else []
    found += _masks(sq, sk, window, prefix, chunk, documents, blocks, (block_m, block_n))
    scalar = torch.zeros((), dtype=dtype_of(dtype))  # expanded: every shape costs one number

    def tensor(*shape: int) -> torch.Tensor:
        if min(shape) < 0:
            raise ValueError(f"sizes must be >= 0, got {shape}")
        return scalar.expand(shape)

    hkv, dv = heads if kv_heads is None else kv_heads, dim if value_dim is None else value_dim
    options: dict[str, Any] = {
        "mask": masks.And(tuple(found)) if found else None,
        "softcap": softcap,
        "alibi_slopes": tensor(heads) if alibi else None,
        "bias": tensor(1, heads, sq, sk) if bias else None,
        "sinks": tensor(heads) if sinks else None,
        "dropout_p": dropout,
        "backend": backend,
    }
    q, k, v = tensor(batch, sq, heads, dim), tensor(batch, sk, hkv, dim), tensor(batch, sk, hkv, dv)
    explained = tilewise.explain(q, k, v, block_m=block_m, block_n=block_n, **options)
    console.print(explained)
    if plot is not None and explained.plan is not None:
        draw(explained.plan, plot)
    write_json(json, "explain", explained.to_dict())


def draw(plan: TilePlan, path: Path) -> None:
    """The tiles of one sequence and head as a picture in a file."""
    with figure_file(path, 5.5, 5.0) as figure:
        from matplotlib.colors import ListedColormap  # noqa: PLC0415  after `figure_file` has checked that it is there
        from matplotlib.patches import Patch  # noqa: PLC0415

        kinds = (SKIPPED, MASKED, FULL)
        axes = figure.subplots()
        colours = ListedColormap([COLOURS[kind] for kind in kinds])
        axes.imshow(
            plan.grid.numpy(),
            cmap=colours,
            vmin=-0.5,
            vmax=2.5,
            extent=(0, plan.Sk, plan.Sq, 0),
            interpolation="nearest",
        )
        axes.set(xlabel="key", ylabel="query row", title=f"tiles of {plan.block_m} rows x {plan.block_n} keys")
        handles = [Patch(color=COLOURS[kind], label=f"{NAMES[kind]}: {plan.count(kind):,}") for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _masks(
    sq: int, sk: int, window: str | None, prefix: int | None, chunk: int | None, documents: str | None,
    blocks: str | None, tile: tuple[int, int],
) -> list[masks.Mask]:  # fmt: skip
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
