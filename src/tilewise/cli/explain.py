"""`tilewise explain`: a call described by options, explained without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import tilewise
from tilewise import masks
from tilewise.cli.options import (
    Batch,
    Blocks,
    CausalMask,
    Chunk,
    Dim,
    Documents,
    Dtype,
    Heads,
    Keys,
    KvHeads,
    Prefix,
    Queries,
    TopLeft,
    ValueDim,
    Window,
    expanded,
    masks_of,
    or_else,
    tensors,
)
from tilewise.cli.output import JsonFile, PlotFile, console, figure_file, write_json
from tilewise.plan import BLOCK, FULL, MASKED, SKIPPED, TilePlan

COLOURS = {SKIPPED: "#f2f2f2", MASKED: "#f4a259", FULL: "#2a6f97"}
NAMES = {SKIPPED: "skipped", MASKED: "needs the mask", FULL: "full"}


def explain(
    batch: Batch = 1,
    sq: Queries = 2048,
    sk: Keys = None,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    value_dim: ValueDim = None,
    dtype: Dtype = "fp32",
    causal: CausalMask = False,
    top_left: TopLeft = False,
    window: Window = None,
    prefix: Prefix = None,
    chunk: Chunk = None,
    documents: Documents = None,
    blocks: Blocks = None,
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
    sk = or_else(sk, sq)
    found = [tilewise.Causal("top_left" if top_left else None)] if causal or top_left else []
    found += masks_of(sq, sk, window, prefix, chunk, documents, blocks, (block_m, block_n))
    options: dict[str, Any] = {
        "mask": masks.And(tuple(found)) if found else None,
        "softcap": softcap,
        "alibi_slopes": expanded((heads,), dtype) if alibi else None,
        "bias": expanded((1, heads, sq, sk), dtype) if bias else None,
        "sinks": expanded((heads,), dtype) if sinks else None,
        "dropout_p": dropout,
        "backend": backend,
    }
    q, k, v = tensors(batch, sq, sk, heads, kv_heads, dim, value_dim, dtype)
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
