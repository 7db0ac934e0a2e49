"""The same model trained with different attentions, and what that says: the engine of ``tilewise demo``."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.training.config import TrainConfig
from tilewise.training.run_folder import RunFolder

FIRST_STEPS = 5
#: How much larger than another exact attention's rounding ours may be before it is called more than rounding.
ROUNDING_FACTOR = 3.0
_FLOOR_ULPS = 8

OnEvent = Callable[[str, dict[str, Any]], None]


class WorkerError(RuntimeError):
    """A variant's process failed; the message has its last words."""


@dataclass(frozen=True)
class Variant:
    """What one attention's process measured (see `worker.measure`); times are medians over steps, without compilation."""

    attention: str
    parameters: int
    losses: list[float]
    valid_loss: float
    step_seconds: float
    cpu_seconds: float
    compile_seconds: float
    saved_bytes: int
    peak_bytes: int
    step_bytes: int
    peak_method: str


@dataclass(frozen=True)
class Comparison:
    """Variants of one run, the first being what the others are compared with."""

    config: TrainConfig
    variants: dict[str, Variant]

    @property
    def baseline(self) -> Variant:
        return next(iter(self.variants.values()))

    def differences(self, name: str) -> list[float]:
        """Absolute loss difference from the baseline at every step."""
        return [abs(a - b) for a, b in zip(self.variants[name].losses, self.baseline.losses)]

    def ratio(self, name: str, quantity: str) -> float:
        """The baseline's value over a variant's: above 1 the variant needs less."""
        return getattr(self.baseline, quantity) / max(getattr(self.variants[name], quantity), 1e-12)

    def rounding_allowance(self, yardstick: str | None) -> float:
        """The largest loss difference that rounding explains.

        Rounding differences grow while training: how much, only another exact attention, rounding elsewhere, can tell.
        """
        ulp = float(np.spacing(np.float32(max(self.baseline.losses))))
        grown = max(self.differences(yardstick)) if yardstick in self.variants else 0.0
        return max(_FLOOR_ULPS * ulp, ROUNDING_FACTOR * grown)

    def to_dict(self) -> dict[str, Any]:
        others = [name for name in self.variants if name != self.baseline.attention]
        return {
            "config": self.config.to_dict(),
            "variants": {name: asdict(variant) for name, variant in self.variants.items()},
            "loss_difference": {
                name: {"first_steps": self.differences(name)[:FIRST_STEPS], "largest": max(self.differences(name))}
                for name in others
            },
        }


def compare(config: TrainConfig, attentions: list[str], folder: Path, on_event: OnEvent) -> Comparison:
    """Train `config` once with each attention, one process after another.

    Args:
        config: its `attention` is replaced.
        attentions: the first is the baseline.
        folder: each variant's run folder is made in it; earlier ones are replaced.
        on_event: called with the attention's name and each event of its process.

    Raises:
        WorkerError: a process failed.
    """
    variants = {}
    for name in attentions:
        path = folder / name
        if (path / "config.json").exists():
            shutil.rmtree(path)
        run = RunFolder.create(path, config.with_(attention=name))
        variants[name] = _run_worker(run, lambda event, name=name: on_event(name, event))
    return Comparison(config, variants)


def in_words(comparison: Comparison, name: str, yardstick: str | None) -> list[str]:
    """Two sentences: whether both learned the same, and what that cost."""
    return [_same_words(comparison, name, yardstick), _cost_words(comparison, name)]


def _same_words(comparison: Comparison, name: str, yardstick: str | None) -> str:
    differences = comparison.differences(name)
    largest, first = max(differences), max(differences[:FIRST_STEPS])
    base = comparison.baseline
    text = (
        f"Over {len(differences)} steps the losses of {name} and {base.attention} attention differ by at most "
        f"{largest:.1e} (loss {base.losses[0]:.2f} to {base.losses[-1]:.2f}; first {FIRST_STEPS} steps: {first:.1e})"
    )
    if yardstick in comparison.variants:
        text += f"; PyTorch's own {yardstick}, also exact, differs by {max(comparison.differences(yardstick)):.1e}"
    if largest <= comparison.rounding_allowance(yardstick):
        return text + ": that is rounding, both trained the same model."
    return text + ": that is MORE than rounding explains, please report it."


def _cost_words(comparison: Comparison, name: str) -> str:
    ours, base = comparison.variants[name], comparison.baseline
    memory, time = comparison.ratio(name, "saved_bytes"), comparison.ratio(name, "step_seconds")
    good = "and" if (memory >= 1) == (time >= 1) else "but"
    return (
        f"{name} kept {human_bytes(ours.saved_bytes)} for the backward pass where {base.attention} attention kept "
        f"{human_bytes(base.saved_bytes)} ({_times(memory, 'less', 'more')}), {good} a step took "
        f"{ours.step_seconds * 1e3:.0f} ms instead of {base.step_seconds * 1e3:.0f} ms "
        f"({_times(time, 'faster', 'slower')})."
    )


def _times(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.1f}x {better}" if ratio >= 1 else f"{1 / ratio:.1f}x {worse}"


def human_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _run_worker(run: RunFolder, on_event: Callable[[dict[str, Any]], None]) -> Variant:
    command = [sys.executable, "-m", "tilewise.training.worker", str(run.path)]
    result = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            for line in process.stdout or ():
                event = json.loads(line)
                result = event.get("result", result)
                on_event(event)
            code = process.wait()
        except BaseException:  # an interrupt must not leave a training process behind
            process.kill()
            raise
        errors.seek(0)
        last_words = errors.read().strip()
    if code == 0 and result is not None:
        return Variant(**result)
    raise WorkerError(_failure(run.config.attention, code, last_words))


def _failure(attention: str, code: int, last_words: str) -> str:
    if code == -signal.SIGKILL:
        return f"the {attention} process was killed, most likely for lack of memory: use a smaller --context or --batch"
    tail = "\n".join(last_words.splitlines()[-12:])
    return f"the {attention} process failed with exit code {code}:\n{tail}"
