"""`tilewise train`: a small language model on real text, with the attention of your choice."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.output import JsonFile, console, stderr, write_json
from tilewise.training import TrainConfig, UsageError, run_training
from tilewise.training.config import ATTENTIONS, DEVICES, DTYPES, PACKINGS, POSITIONS, PRESETS, TOKENIZERS
from tilewise.training.errors import MissingPackageError
from tilewise.training.loop import Outcome
from tilewise.training.plots import plot_losses
from tilewise.training.progress import TrainingProgress
from tilewise.training.session import Session, resume, start

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
DEFAULT = TrainConfig()


def _option(panel: str, help: str, name: str | None = None) -> Any:
    return typer.Option(*([name] if name else []), help=help, rich_help_panel=panel)


def _one_of(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:-1]) + " or " + choices[-1]


MODEL, DATA, TRAINING, RUN = "Model", "Data", "Training", "Run"
PresetName = Annotated[
    str, _option(MODEL, f"Settings to start from: {_one_of(tuple(PRESETS))}; the other options change them.")
]
Layers = Annotated[int, _option(MODEL, "Transformer blocks.")]
Heads = Annotated[int, _option(MODEL, "Attention heads; each has width / heads dims.")]
KvHeads = Annotated[int | None, _option(MODEL, "Key/value heads; fewer than heads is grouped-query attention (GQA).")]
Width = Annotated[int, _option(MODEL, "Size of the residual stream.")]
Positions = Annotated[str, _option(MODEL, f"Positions: {_one_of(POSITIONS)}; they restart in every document.")]
Dropout = Annotated[float, _option(MODEL, "Dropout of attention weights and residual branches.")]
AttentionName = Annotated[
    str,
    _option(
        MODEL,
        f"Attention: {_one_of(ATTENTIONS)}. All compute the same; standard keeps the context x context score "
        "matrix in memory, sdpa is PyTorch's own, flash and cudnn are its GPU kernels by name (bf16, --packing rows).",
    ),
]
Deterministic = Annotated[
    bool,
    _option(
        MODEL, "Whether tilewise's gradients repeat bit for bit; costs time on Hopper GPUs.", "--deterministic/--fast"
    ),
]
Packing = Annotated[
    str,
    _option(
        DATA,
        f"{_one_of(PACKINGS)}: whether a token sees its own document only, or all of its row, as GPT-2 was trained.",
    ),
]
Data = Annotated[
    list[Path] | None,
    _option(DATA, "File or folder of text; repeat for more. Default: the Python standard library of this machine."),
]
MaxMb = Annotated[float | None, _option(DATA, "Use at most so many MB of the text.")]
TokenizerName = Annotated[
    str,
    _option(DATA, f"Tokenizer: {_one_of(TOKENIZERS)}. bpe is trained on your text and needs `pip install tokenizers`."),
]
VocabSize = Annotated[int, _option(DATA, "Tokens of the BPE vocabulary.")]
Context = Annotated[int, _option(DATA, "Tokens per row: how far the model can look back.")]
Batch = Annotated[int, _option(TRAINING, "Rows per step.")]
Steps = Annotated[int, _option(TRAINING, "Optimizer steps in all.")]
Lr = Annotated[float, _option(TRAINING, "Peak learning rate of AdamW.")]
Warmup = Annotated[int, _option(TRAINING, "Steps of linear warm-up; a cosine down to a tenth follows.")]
WeightDecay = Annotated[float, _option(TRAINING, "Weight decay of matrices.")]
Clip = Annotated[float, _option(TRAINING, "Largest gradient norm.")]
Seed = Annotated[int, _option(TRAINING, "Seed of weights, order of rows and dropout.")]
Dtype = Annotated[str, _option(TRAINING, f"{_one_of(DTYPES)}; bf16 is autocast over fp32 weights.")]
EvalEvery = Annotated[int, _option(TRAINING, "Steps between evaluations on held-out files; 0: at the end only.")]
EvalRows = Annotated[int, _option(TRAINING, "Held-out rows of each evaluation.")]
SaveEvery = Annotated[int, _option(RUN, "Steps between checkpoints; 0: at the end only.")]
Device = Annotated[str, _option(RUN, f"{_one_of(DEVICES)}.")]
Threads = Annotated[int | None, _option(RUN, "CPU threads; results repeat bitwise for one number of threads.")]
Out = Annotated[Path | None, _option(RUN, "Folder of the run. Default: runs/<date and time>.")]
Resume = Annotated[
    Path | None,
    _option(
        RUN,
        "Continue this run folder, bitwise as if it had not stopped. Its settings count; --steps may extend it.",
    ),
]


def train(
    ctx: typer.Context,
    preset: PresetName = "small",
    layers: Layers = DEFAULT.layers,
    heads: Heads = DEFAULT.heads,
    kv_heads: KvHeads = DEFAULT.kv_heads,
    width: Width = DEFAULT.width,
    positions: Positions = DEFAULT.positions,
    dropout: Dropout = DEFAULT.dropout,
    attention: AttentionName = DEFAULT.attention,
    deterministic: Deterministic = DEFAULT.deterministic,
    packing: Packing = DEFAULT.packing,
    data: Data = None,
    max_mb: MaxMb = DEFAULT.max_mb,
    tokenizer: TokenizerName = DEFAULT.tokenizer,
    vocab_size: VocabSize = DEFAULT.vocab_size,
    context: Context = DEFAULT.context,
    batch: Batch = DEFAULT.batch,
    steps: Steps = DEFAULT.steps,
    lr: Lr = DEFAULT.lr,
    warmup: Warmup = DEFAULT.warmup,
    weight_decay: WeightDecay = DEFAULT.weight_decay,
    clip: Clip = DEFAULT.clip,
    seed: Seed = DEFAULT.seed,
    dtype: Dtype = DEFAULT.dtype,
    eval_every: EvalEvery = DEFAULT.eval_every,
    eval_rows: EvalRows = DEFAULT.eval_rows,
    save_every: SaveEvery = DEFAULT.save_every,
    device: Device = DEFAULT.device,
    threads: Threads = DEFAULT.threads,
    out: Out = None,
    resume: Resume = None,
    json: JsonFile = None,
) -> None:
    """Train a small GPT on text; Ctrl-C saves a checkpoint, --resume goes on from it bitwise.

    Example: `tilewise train --context 1024 --steps 300 --out runs/mine`, then `tilewise sample runs/mine`; on a GPU
    `tilewise train --preset gpt2-small --device cuda`
    """
    if resume is not None:
        session = _resume(resume, _given(ctx), steps)
    else:
        config = configured(ctx, preset, data, leave_out=("out", "resume"))
        session = start(config, out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}", stderr.status)
    outcome, tokens_per_second = _run(session)
    folder = session.folder.path
    write_json(
        json,
        "train",
        {
            "config": session.folder.config.to_dict(),
            "folder": str(folder),
            "finished": outcome.finished,
            "steps": outcome.steps,
            "loss": outcome.loss,
            "valid_loss": outcome.valid_loss,
            "tokens_per_second": tokens_per_second,
            "metrics": session.folder.read_metrics(),
        },
    )
    if not outcome.finished:
        console.print(f"stopped after step {outcome.steps}; go on with: tilewise train --resume {folder}")
        raise typer.Exit(INTERRUPTED)
    console.print(f"trained; write text with: tilewise sample {folder}")


def configured(ctx: typer.Context, preset: str, data: list[Path] | None, leave_out: tuple[str, ...]) -> TrainConfig:
    """The preset, changed by the options that were given; `leave_out` names those that are no settings."""
    if preset not in PRESETS:
        raise UsageError(f"--preset must be {_one_of(tuple(PRESETS))}, got {preset!r}")
    given = {name: ctx.params[name] for name in _given(ctx) if name not in ("preset", "data", "json", *leave_out)}
    return TrainConfig(**PRESETS[preset] | given, data=tuple(map(str, data or ())))


def _given(ctx: typer.Context) -> list[str]:
    return [name for name in ctx.params if _was_given(ctx, name)]


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _resume(path: Path, given: list[str], steps: int) -> Session:
    refused = [f"--{name.replace('_', '-')}" for name in given if name not in ("resume", "steps", "json")]
    if refused:
        raise UsageError(
            f"--resume {path} takes its settings from the run, so {', '.join(refused)} cannot be given with it; "
            "only --steps and --json can"
        )
    return resume(path, steps if "steps" in given else None, stderr.status)


def _run(session: Session) -> tuple[Outcome, float]:
    """Train with a progress bar and draw the loss; returns the outcome and the last steps' tokens per second."""
    trainer, folder = session.trainer, session.folder
    config = trainer.config
    console.print(session.corpus.describe())
    console.print(
        f"{trainer.model.parameter_count():,} parameters, {session.tokenizer.vocab_size:,} tokens in the vocabulary, "
        f"{len(trainer.train.tokens):,} tokens of text (SHA-256 {trainer.train.fingerprint()[:12]}), "
        f"{config.attention} attention, run folder {folder.path}"
    )
    if trainer.steps_done:
        console.print(f"resuming after step {trainer.steps_done} of {config.steps}")
    if trainer.steps_done < config.steps:
        with stderr.status("Compiling kernels (once per machine)"):
            trainer.warm_up()
    with TrainingProgress(stderr, config, trainer.steps_done) as progress:
        outcome = run_training(trainer, folder, progress)
    try:
        plot_losses(folder.read_metrics(), folder.path / "loss.png")
    except MissingPackageError as error:
        console.print(f"no loss.png was written: {error}", markup=False)
    return outcome, progress.tokens_per_second
