"""`tilewise fit`: the batch and the context of a model that fit on a GPU, with standard attention and with tilewise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tilewise.cli.options import integers
from tilewise.cli.output import JsonFile, PlotFile, console, table, write_json, write_plot
from tilewise.io_model.fit import WHO, largest_batch, largest_context, training_step, usable
from tilewise.io_model.gpus import GPUS, Gpu, gpu_of
from tilewise.io_model.models import MODELS, Model, model_of
from tilewise.page import human

CONTEXTS = ",".join(str(1024 << i) for i in range(7))


def fit(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}; or all.")] = "gpt2-small",
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}; or all.")] = "h200",
    contexts: Annotated[str, typer.Option(help="Tokens of a sequence, separated by commas.")] = CONTEXTS,
    dropout: Annotated[bool, typer.Option("--dropout/--no-dropout", help="Whether the model has dropout.")] = True,
    reserve: Annotated[float, typer.Option(help="GiB that the CUDA context and the allocator take.")] = 2.0,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Show which batch and which context of a training step fit in a GPU's memory, by formulas, without running anything.

    16-bit mixed precision with Adam takes 16 bytes per parameter. Activations are those of the usual implementation
    (Korthikanti et al. 2023), no checkpointing; attention's are counted as everywhere in this tool. Standard attention keeps
    N x N matrices per head and layer, tilewise one number per row. docs/io-model.md has the formulas.

    Example: `tilewise fit --model gpt3-1.3b --gpu a100 --contexts 2048,8192`
    """
    lengths = integers(contexts, "--contexts")
    if min(lengths) < 1 or reserve < 0:
        raise ValueError("--contexts must be >= 1 and --reserve >= 0")
    models = list(MODELS.values()) if model == "all" else [model_of(model)]
    gpus = list(GPUS.values()) if gpu == "all" else [gpu_of(gpu)]
    found = []
    for one in models:
        for card in gpus:
            found.append(_point(one, card, lengths, dropout, round(reserve * 2**30)))
            _show(found[-1], one, card)
    data = {"dropout": dropout, "reserve_bytes": round(reserve * 2**30), "points": found}
    write_plot(plot, "fit", data)
    write_json(json, "fit", data)


def _point(model: Model, gpu: Gpu, lengths: Sequence[int], dropout: bool, reserve: int) -> dict[str, Any]:
    memory = usable(gpu, reserve)
    batches = {n: {who: largest_batch(model, who, n, memory, dropout) for who in WHO} for n in lengths}
    steps = {n: {who: asdict(training_step(model, who, 1, n, dropout)) for who in WHO} for n in lengths}
    return {
        "model": model.name,
        "gpu": gpu.name,
        "parameters": model.parameters(),
        "memory_bytes": memory,
        "largest_batch": batches,
        "bytes_at_batch_1": steps,
        "largest_context": {who: largest_context(model, who, 1, memory, dropout) for who in WHO},
    }


def _show(point: dict[str, Any], model: Model, gpu: Gpu) -> None:
    rows = []
    for n, batches in point["largest_batch"].items():
        steps = point["bytes_at_batch_1"][n]
        cells = [human(sum(steps[who].values()), "B") for who in WHO]
        shares = [f"{steps[who]['attention'] / sum(steps[who].values()):.0%}" for who in WHO]
        rows.append((f"{n:,}", *(f"{batches[who]:,}" if batches[who] else "none" for who in WHO), *cells, *shares))
    columns = ["context"] + [
        f"{who}\n{what}" for what in ("batch", "bytes at batch 1", "of it attention") for who in WHO
    ]
    title = (
        f"{model.title}, {point['parameters'] / 1e6:,.0f}M parameters, on one {gpu.title}: "
        f"{human(point['memory_bytes'], 'B')} to fill"
    )
    console.print(table(title, columns, rows, left=0))
    longest = point["largest_context"]
    if not longest["tilewise"]:
        console.print(f"Parameters and optimizer alone take {human(16 * point['parameters'], 'B')}: nothing fits.")
        return
    console.print(
        f"Longest context at batch 1: {longest['standard']:,} with standard attention, {longest['tilewise']:,} with tilewise."
    )
