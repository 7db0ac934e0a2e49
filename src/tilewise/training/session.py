"""A run put together: text, tokenizer, token streams, trainer and folder; new, resumed or just for reading."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tilewise.training.config import FUSED, TrainConfig
from tilewise.training.data import Corpus, load_corpus, make_streams
from tilewise.training.loop import Trainer, check_device
from tilewise.training.model import GPT
from tilewise.training.run_folder import RunFolder, load_checkpoint, locate_checkpoint
from tilewise.training.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer


class Working(Protocol):
    """Shows that something slow goes on, e.g. `rich.console.Console.status`."""

    def __call__(self, what: str, /) -> AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Session:
    """A run that is ready to be trained."""

    trainer: Trainer
    tokenizer: Tokenizer
    folder: RunFolder
    corpus: Corpus


def start(config: TrainConfig, path: Path, working: Working = nullcontext) -> Session:
    """A new run in a folder of its own, which is made only when the data turned out well.

    Raises:
        UsageError: the data, the device, an optional package or the folder; the message says what to do.
    """
    check_device(config.device)
    with working("Reading text"):
        corpus = load_corpus(config.data, config.max_mb)
    with working("Making tokens"):
        tokenizer = make_tokenizer(config, corpus)
        streams = make_streams(corpus, tokenizer, config.context, config.seed)
    folder = RunFolder.create(path, config)
    folder.save_tokenizer(tokenizer)
    return Session(Trainer(config, *streams, tokenizer.vocab_size), tokenizer, folder, corpus)


def resume(path: Path, steps: int | None = None, working: Working = nullcontext) -> Session:
    """A run as its newest checkpoint left it.

    Args:
        path: the run folder, or one of its checkpoints.
        steps: another number of steps in all; the learning rate then follows that longer or shorter schedule.

    Raises:
        UsageError: no such run or checkpoint, or the text is no longer the same.
    """
    folder, checkpoint = locate_checkpoint(path)
    if steps is not None and steps != folder.config.steps:
        folder.save_config(folder.config.with_(steps=steps))
    config, tokenizer = folder.config, folder.tokenizer()
    state = load_checkpoint(checkpoint)
    with working("Reading text"):
        corpus = load_corpus(config.data, config.max_mb)
    with working("Making tokens"):
        streams = make_streams(corpus, tokenizer, config.context, config.seed)
    trainer = Trainer(config, *streams, tokenizer.vocab_size)
    trainer.restore(state)
    folder.forget_after(trainer.steps_done)
    return Session(trainer, tokenizer, folder, corpus)


def load_model(path: Path, device: str = "cpu") -> tuple[GPT, Tokenizer]:
    """The trained model of a run folder or checkpoint, with its tokenizer.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    check_device(device)
    folder, checkpoint = locate_checkpoint(path)
    tokenizer = folder.tokenizer()
    state = load_checkpoint(checkpoint, device)
    config = TrainConfig.from_dict(state["config"])
    if config.attention in FUSED:  # writing is done anywhere, in float32
        config = config.with_(attention="sdpa")
    model = GPT(config, tokenizer.vocab_size)
    model.load_state_dict(state["model"])
    return model.to(torch.device(device)).eval(), tokenizer


def make_tokenizer(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer that the config asks for, trained on the training documents only."""
    return ByteTokenizer() if config.tokenizer == "byte" else BpeTokenizer.train(corpus.train, config.vocab_size)
