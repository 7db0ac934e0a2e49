"""`tilewise demo`: one small GPT trained with standard attention and with tilewise; the same losses, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from tilewise.cli.output import FAILED, JsonFile, console, fail, stderr, table, write_json
from tilewise.training import TrainConfig
from tilewise.training.compare import Comparison, WorkerError, compare, human_bytes, in_words
from tilewise.training.errors import MissingPackageError
from tilewise.training.plots import plot_comparison
from tilewise.training.progress import make_progress
from tilewise.training.sampling import generate
from tilewise.training.session import load_model

BASELINE, OURS, YARDSTICK = "standard", "tilewise", "sdpa"
PROMPTS = ("import ", "def ", "class ")
SAMPLE_TOKENS = 300


def demo(
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 40,
    context: Annotated[
        int, typer.Option(help="Tokens per row; standard attention's memory grows with its square.")
    ] = 2048,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    width: Annotated[int, typer.Option(help="Size of the residual stream.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of weights and of the order of rows.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: PyTorch's choice.")] = None,
    yardstick: Annotated[
        bool, typer.Option(help="Also train with PyTorch's own attention: shows how much rounding alone does.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder of results; an earlier demo in it is replaced.")] = Path("demo"),
    json: JsonFile = None,
) -> None:
    """Train the same small GPT with standard attention and with tilewise, and compare losses, memory and time.

    Same seed, same text (the Python standard library), fp32; each in a process of its own, so that its memory is its own.

    Example: `tilewise demo`, about 2 minutes on two idle cores; then `tilewise sample demo/tilewise --prompt "class "`
    """
    config = TrainConfig(
        layers=layers, heads=heads, width=width, context=context, batch=1, steps=steps, seed=seed, threads=threads,
        lr=3e-3, warmup=10, max_mb=4.0, eval_rows=8,
    )  # fmt: skip
    names = [BASELINE, *([YARDSTICK] if yardstick else []), OURS]
    console.print(
        f"A GPT of {layers} layers, width {width}, {heads} heads reads {context} bytes of Python at a time, "
        f"{steps} steps, fp32, once with each of: {', '.join(names)}."
    )
    comparison = _compare(config, names, out)
    words = in_words(comparison, OURS, YARDSTICK if yardstick else None)
    console.print(_table(comparison))
    for sentence in words:
        console.print(sentence)
    results = {**comparison.to_dict(), "in_words": words, "samples": _write_samples(out)}
    _draw(comparison, out / "curves.png")
    write_json(out / "results.json", "demo", results)
    write_json(json, "demo", results)
    console.print(f"wrote {out / 'samples.txt'}; more text: tilewise sample {out / OURS} --prompt 'class '")


def _compare(config: TrainConfig, names: list[str], out: Path) -> Comparison:
    with make_progress(stderr) as progress:
        tasks = {name: progress.add_task(name, total=config.steps, detail="waiting", start=False) for name in names}
        try:
            return compare(config, names, out, lambda name, event: _show(progress, tasks[name], event))
        except WorkerError as error:
            progress.stop()
            fail(str(error), FAILED)


def _show(progress: Progress, task: Any, event: dict[str, Any]) -> None:
    if "stage" in event:
        progress.update(task, detail=event["stage"])
        if event["stage"] == "training":
            progress.start_task(task)
    elif "step" in event:
        detail = f"loss {event['loss']:.3f}  {event['seconds'] * 1e3:.0f} ms/step"
        progress.update(task, completed=event["step"], detail=detail)
    else:
        progress.update(task, detail=f"held-out loss {event['result']['valid_loss']:.3f}")


def _table(comparison: Comparison) -> Table:
    """Quantities down, attentions across; the gain is how many times less ours needs, below 1x it needs more."""
    variants = comparison.variants
    ours, config = variants[OURS], comparison.config

    def measured(title: str, quantity: str, show: Any) -> list[str]:
        cells = [show(getattr(variant, quantity)) for variant in variants.values()]
        return [title, *cells, f"{comparison.ratio(OURS, quantity):.2f}x"]

    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.0f} ms"

    def tokens_per_second(seconds: float) -> str:
        return f"{config.tokens_per_step / seconds:,.0f}"

    differences = [f"{max(comparison.differences(name)):.1e}" for name in variants]
    rows = [
        measured("saved for backward", "saved_bytes", human_bytes),
        measured("memory a step adds", "step_bytes", human_bytes),
        measured("peak memory, process", "peak_bytes", human_bytes),
        measured("time per step", "step_seconds", milliseconds),
        measured("CPU time per step", "cpu_seconds", milliseconds),
        measured("tokens/s", "step_seconds", tokens_per_second),
        ["extra for first call", *(f"{v.compile_seconds:.1f} s" for v in variants.values()), ""],
        ["held-out loss", *(f"{v.valid_loss:.5f}" for v in variants.values()), ""],
        ["largest loss difference", *differences, ""],
    ]
    title = f"context {config.context}; times are medians without the first call; peak memory is {ours.peak_method}"
    return table(title, ["", *variants, f"{OURS} gains"], rows)


def _write_samples(out: Path) -> dict[str, str]:
    """Text by the model trained with tilewise."""
    samples = {}
    with stderr.status("Writing text with the trained model"):
        model, tokenizer = load_model(out / OURS)
        for prompt in PROMPTS:
            written = generate(model, tokenizer, prompt, SAMPLE_TOKENS, temperature=0.7, seed=0)
            samples[prompt] = prompt + tokenizer.decode(written)
    rule = "\n" + "-" * 60 + "\n"
    (out / "samples.txt").write_text(rule.join(samples.values()) + "\n", encoding="utf-8")
    return samples


def _draw(comparison: Comparison, path: Path) -> None:
    losses = {name: variant.losses for name, variant in comparison.variants.items()}
    differences = {name: comparison.differences(name) for name in losses if name != BASELINE}
    try:
        plot_comparison(losses, differences, "The same model, trained with different attentions", path)
        console.print(f"wrote {path}")
    except MissingPackageError as error:
        console.print(f"no curves.png was written: {error}", markup=False)
