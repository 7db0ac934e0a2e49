"""A run's folder: ``config.json``, ``tokenizer.json``, ``metrics.jsonl``, ``loss.png`` and ``checkpoints/step-000100.pt``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tilewise.training.config import TrainConfig
from tilewise.training.errors import UsageError
from tilewise.training.tokenizer import Tokenizer, load_tokenizer

KEPT_CHECKPOINTS = 2


class RunFolder:
    """Reads and writes one run. Files appear whole or not at all: each is written beside its place, then renamed.

    Example:
        >>> import tempfile
        >>> from tilewise.training import TrainConfig
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder.create(Path(folder) / "run", TrainConfig(steps=3))
        ...     RunFolder.open(run.path).config.steps
        3
    """

    def __init__(self, path: Path, config: TrainConfig):
        self.path, self.config = path, config
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new run.

        Raises:
            UsageError: the folder holds a run with checkpoints already, or cannot be made.
        """
        run = cls(path, config)
        if run.list_checkpoints():
            raise UsageError(
                f"{path} holds a run already: continue it with --resume {path}, or choose another folder with --out"
            )
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            run.metrics.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run folder {path}: {error.strerror}") from None
        run.save_config(config)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run.

        Raises:
            UsageError: there is none.
        """
        try:
            text = (path / "config.json").read_text(encoding="utf-8")
        except OSError:
            raise UsageError(f"no run at {path}: a run folder has a config.json, written by `tilewise train`") from None
        return cls(path, TrainConfig.from_json(text))

    def save_config(self, config: TrainConfig) -> None:
        self.config = config
        write_atomically(self.path / "config.json", config.to_json())

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        write_atomically(self.path / "tokenizer.json", tokenizer.to_json())

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer.json")

    def append_metrics(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps after a checkpoint: a resumed run writes them again."""
        kept = [json.dumps(record) + "\n" for record in self._whole_records() if record["step"] <= step]
        write_atomically(self.metrics, "".join(kept))

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then delete all but the newest few."""
        path = self.checkpoints / f"step-{step:06d}.pt"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        for old in self.list_checkpoints()[:-KEPT_CHECKPOINTS]:
            old.unlink()
        return path

    def list_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*.pt"))

    def latest_checkpoint(self) -> Path:
        """The newest one.

        Raises:
            UsageError: the run has none yet.
        """
        found = self.list_checkpoints()
        if not found:
            raise UsageError(f"{self.path} has no checkpoint: the run stopped before its first one; start it anew")
        return found[-1]

    def _whole_records(self) -> list[dict[str, Any]]:
        """Metrics up to a line cut short by a crash."""
        records = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records


def locate_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """The run and the checkpoint meant by a run folder (its newest one) or by a checkpoint file.

    Raises:
        UsageError: neither.
    """
    if path.is_dir() and (path / "config.json").exists():
        run = RunFolder.open(path)
        return run, run.latest_checkpoint()
    if path.is_file() and path.parent.name == "checkpoints":
        return RunFolder.open(path.parent.parent), path
    siblings = sorted(path.parent.glob("step-*.pt")) if path.parent.is_dir() else []
    there = f"; there are {', '.join(f.name for f in siblings)}" if siblings else ""
    raise UsageError(
        f"no checkpoint at {path}{there}: give a run folder that `tilewise train` wrote, or one of its checkpoints/*.pt"
    )


def load_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """A checkpoint's content, tensors only (no code is run by reading it).

    Raises:
        UsageError: the file is not a checkpoint of ours.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises whatever the damaged bytes lead to
        raise UsageError(f"{path} is not a readable checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict) or "model" not in state:
        raise UsageError(f"{path} is not a checkpoint of `tilewise train`: it holds no model")
    return state


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
