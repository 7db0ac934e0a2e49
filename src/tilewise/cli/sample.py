"""`tilewise sample`: text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.output import JsonFile, write_json
from tilewise.training.sampling import generate
from tilewise.training.session import load_model


def sample(
    run: Annotated[
        Path, typer.Argument(help="A run folder of `tilewise train` (its newest checkpoint), or a .pt of it.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue; empty starts a new document.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to write at most; the model may end the text before.")] = 300,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token; 1 draws as the model says; in between is safer.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only. Default: from all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws: the same seed writes the same text.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: JsonFile = None,
) -> None:
    """Write text with a trained model; earlier tokens' keys and values are cached, so each token costs one row.

    Example: `tilewise sample runs/mine --prompt "def main(" --tokens 200 --temperature 0.7 --top-k 40`
    """
    model, tokenizer = load_model(run, device)
    written = list(generate(model, tokenizer, prompt, tokens, temperature, top_k, seed))
    text = prompt + tokenizer.decode(written)
    typer.echo(text)
    write_json(json, "sample", {"run": str(run), "prompt": prompt, "tokens": written, "text": text, "seed": seed})
