"""`tilewise compare`: one model trained with several attentions from several seeds; do they learn the same?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress

from tilewise.cli.output import FAILED, JsonFile, PlotFile, console, fail, stderr, table, write_json, write_plot
from tilewise.cli.train import (
    Batch,
    Context,
    Data,
    Deterministic,
    Device,
    Dtype,
    MaxMb,
    Packing,
    PresetName,
    Steps,
    configured,
)
from tilewise.training.config import ATTENTIONS, TrainConfig
from tilewise.training.data import load_corpus, make_streams
from tilewise.training.errors import UsageError
from tilewise.training.loop import StepResult, check_device
from tilewise.training.seeds import SeedComparison, compare_seeds
from tilewise.training.session import make_tokenizer

DEFAULT = TrainConfig()


def compare(
    ctx: typer.Context,
    attention: Annotated[
        str, typer.Option(help=f"Of {', '.join(ATTENTIONS)}, with commas between; the first is compared with.")
    ] = "standard,tilewise",
    seeds: Annotated[int, typer.Option(min=2, help="Seeds of weights and of the order of rows, 0 and on.")] = 3,
    preset: PresetName = "small",
    deterministic: Deterministic = DEFAULT.deterministic,
    packing: Packing = DEFAULT.packing,
    data: Data = None,
    max_mb: MaxMb = DEFAULT.max_mb,
    context: Context = DEFAULT.context,
    batch: Batch = DEFAULT.batch,
    steps: Steps = DEFAULT.steps,
    dtype: Dtype = DEFAULT.dtype,
    device: Device = DEFAULT.device,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Train one model with several attentions, each from several seeds, and say whether attentions differ more than seeds.

    Runs of one seed begin with the same weights and read the same text, so their losses differ by rounding only.

    Example: `tilewise compare --preset gpt2-small --device cuda --steps 100 --json curves.json`; for speed
    `tilewise compare --attention flash,cudnn,tilewise --packing rows --fast --preset gpt-1.3b --device cuda --steps 12`
    """
    names = attention.split(",")
    if len(names) < 2 or not {*names} <= {*ATTENTIONS}:
        raise UsageError(f"--attention takes two or more of {', '.join(ATTENTIONS)}; got {attention!r}")
    config = configured(ctx, preset, data, leave_out=("attention", "seeds", "plot"))
    check_device(config.device)
    with stderr.status("Reading text and making tokens"):
        corpus = load_corpus(config.data, config.max_mb)
        tokenizer = make_tokenizer(config, corpus)
        streams = make_streams(corpus, tokenizer, config.context, config.seed)
    console.print(f"{corpus.describe()}; {tokenizer.vocab_size:,} tokens in the vocabulary")
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("training", total=len(names) * seeds * config.steps)

        def on_step(name: str, seed: int, result: StepResult) -> None:
            progress.update(task, advance=1, description=f"{name}, seed {seed}, loss {result.loss:.3f}")

        found = compare_seeds(config, names, seeds, streams, tokenizer.vocab_size, on_step)
    _show(found)
    results = {"text": corpus.describe(), **found.to_dict()}
    write_plot(plot, "compare", results)
    write_json(json, "compare", results)
    if worse := [name for name in found.attentions[1:] if not found.within_spread(name)]:
        fail(f"{', '.join(worse)} differs from {names[0]} by more than seeds do", FAILED)


def _show(found: SeedComparison) -> None:
    rows = []
    for run in found.runs:
        memory = "-" if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f} GB"
        losses = (f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.valid_loss:.4f}")
        rows.append((run.attention, run.seed, *losses, f"{run.step_seconds * 1e3:.0f} ms", memory))
    columns = ["attention", "seed", "first loss", "last loss", "held out", "step", "peak memory"]
    console.print(table(f"{found.parameters:,} parameters, {found.config.steps} steps", columns, rows))
    for name in found.attentions[1:]:
        console.print(found.in_words(name))
