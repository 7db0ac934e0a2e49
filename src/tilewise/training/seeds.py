"""One model trained with different attentions from several seeds: do their losses differ by more than seeds do?

All runs share a process, its text and its tokens. Runs of one seed start from the same weights and read the same rows, so
without rounding their losses would be equal; how far runs of one attention lie apart says how much a difference matters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.training.config import TrainConfig
from tilewise.training.data import TokenStream
from tilewise.training.loop import StepResult, Trainer

OnStep = Callable[[str, int, StepResult], None]


@dataclass(frozen=True)
class Run:
    """One training: its losses at every step, and on held-out text at the end."""

    attention: str
    seed: int
    losses: list[float]
    valid_loss: float
    step_seconds: float  # median, without the first
    peak_bytes: int | None  # of PyTorch's allocator on a GPU


@dataclass(frozen=True)
class SeedComparison:
    """All runs; the first attention is what the other is compared with."""

    config: TrainConfig
    parameters: int
    runs: list[Run]

    def of(self, attention: str) -> list[Run]:
        return [run for run in self.runs if run.attention == attention]

    @property
    def attentions(self) -> list[str]:
        return list(dict.fromkeys(run.attention for run in self.runs))

    def spread(self) -> list[float]:
        """At every step, how far the losses of the first attention's seeds lie apart."""
        return [max(losses) - min(losses) for losses in zip(*(run.losses for run in self.of(self.attentions[0])))]

    def differences(self, attention: str) -> list[float]:
        """At every step, the largest loss difference of two runs of one seed."""
        pairs = zip(self.of(attention), self.of(self.attentions[0]), strict=True)
        by_seed = [[abs(a - b) for a, b in zip(ours.losses, base.losses, strict=True)] for ours, base in pairs]
        return [max(step) for step in zip(*by_seed)]

    def within_spread(self, attention: str) -> bool:
        """Whether, over the run as a whole and on held-out text, the attentions differ by less than the seeds."""
        valid = [run.valid_loss for run in self.of(self.attentions[0])]
        apart = max(abs(a.valid_loss - b) for a, b in zip(self.of(attention), valid, strict=True))
        steps = statistics.fmean(self.differences(attention)) <= statistics.fmean(self.spread())
        return steps and apart <= max(valid) - min(valid)

    def in_words(self, attention: str) -> str:
        base, differences = self.attentions[0], self.differences(attention)
        same = "no more than seeds do" if self.within_spread(attention) else "MORE than seeds do, please report it"
        valid = [statistics.fmean(run.valid_loss for run in self.of(name)) for name in (attention, base)]
        seconds = [statistics.median(run.step_seconds for run in self.of(name)) for name in (attention, base)]
        return (
            f"From one seed the losses of {attention} and {base} attention differ by {statistics.fmean(differences):.1e} in "
            f"the mean over steps (at most {max(differences):.1e}), those of {base} attention from different seeds by "
            f"{statistics.fmean(self.spread()):.1e}: {same}. Held-out loss {valid[0]:.4f} and {valid[1]:.4f}; a step took "
            f"{seconds[0] * 1e3:.0f} and {seconds[1] * 1e3:.0f} ms."
        )

    def to_dict(self) -> dict[str, Any]:
        others = self.attentions[1:]
        return {
            "config": self.config.to_dict(),
            "parameters": self.parameters,
            "runs": [vars(run) for run in self.runs],
            "spread": self.spread(),
            "differences": {name: self.differences(name) for name in others},
            "within_spread": {name: self.within_spread(name) for name in others},
            "in_words": [self.in_words(name) for name in others],
        }


def compare_seeds(
    config: TrainConfig,
    attentions: Sequence[str],
    seeds: int,
    streams: tuple[TokenStream, TokenStream],
    vocab_size: int,
    on_step: OnStep,
) -> SeedComparison:
    """Train `config` with each attention from each of the seeds ``config.seed``, ``config.seed + 1``, ..."""
    runs, parameters = [], 0
    for seed in range(config.seed, config.seed + seeds):
        for attention in attentions:
            trainer = Trainer(
                config.with_(attention=attention, seed=seed), streams[0].with_seed(seed), streams[1], vocab_size
            )
            parameters = trainer.model.parameter_count()
            runs.append(_train(trainer, on_step))
            del trainer  # its memory is the next one's
    return SeedComparison(config, parameters, runs)


def _train(trainer: Trainer, on_step: OnStep) -> Run:
    config, on_gpu = trainer.config, trainer.config.device == "cuda"
    trainer.warm_up()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    results = []
    for _ in range(config.steps):
        results.append(trainer.step())
        on_step(config.attention, config.seed, results[-1])
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    seconds = statistics.median(result.seconds for result in results[1:] or results)
    return Run(config.attention, config.seed, [r.loss for r in results], trainer.evaluate(), seconds, peak)
