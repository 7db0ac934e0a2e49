"""Small training runs: their configuration, and an observer that can interrupt them."""

from __future__ import annotations

import os
import signal

from tilewise.training import TrainConfig

TINY = TrainConfig(
    layers=2, heads=2, width=32, context=48, batch=2, steps=6, warmup=2, eval_every=3, eval_rows=2, save_every=2,
    dropout=0.1, threads=1,
)  # fmt: skip


class Quiet:
    """An observer that raises Ctrl-C in this process after a given step, and keeps what it was told."""

    def __init__(self, interrupt_after: int | None = None):
        self.interrupt_after, self.losses, self.evaluations = interrupt_after, [], []

    def on_step(self, result):
        self.losses.append(result.loss)
        if result.step == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)

    def on_evaluation(self, step, loss):
        self.evaluations.append((step, loss))
