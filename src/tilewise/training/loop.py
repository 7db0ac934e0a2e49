"""The training loop: AdamW, linear warm-up then cosine, gradient clipping, held-out evaluation, checkpoints, Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewise.training.attention import MakeAttend
from tilewise.training.config import TrainConfig
from tilewise.training.data import IGNORE, Batch, TokenStream
from tilewise.training.errors import UsageError
from tilewise.training.memory import used_memory
from tilewise.training.model import GPT
from tilewise.training.run_folder import RunFolder


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    step: int  # steps done so far, this one included
    loss: float  # of the training rows, before the step
    lr: float
    grad_norm: float  # before clipping
    seconds: float


class Observer(Protocol):
    """Who is told about progress."""

    def on_step(self, result: StepResult) -> None: ...
    def on_evaluation(self, step: int, loss: float) -> None: ...


class Trainer:
    """A model, its optimizer and its data, one step at a time.

    Everything that a step depends on is in `state`: weights, optimizer, random generators and the step number, which
    decides the learning rate and the rows. So a run that is stopped and resumed goes on bitwise as if it had not been.

    Args:
        config: the settings.
        train, valid: the token streams (`make_streams`).
        vocab_size: of the tokenizer.
        make_attend: an attention of one's own, instead of the config's.
    """

    def __init__(
        self,
        config: TrainConfig,
        train: TokenStream,
        valid: TokenStream,
        vocab_size: int,
        make_attend: MakeAttend | None = None,
    ):
        check_device(config.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config, self.train, self.valid = config, train, valid
        with torch.device(config.device):  # drawn there: a billion weights take a CPU 20 seconds
            self.model = GPT(config, vocab_size, make_attend)
        self.optimizer = make_optimizer(self.model, config)
        self.steps_done = 0

    def step(self) -> StepResult:
        """One optimizer step."""
        began = time.perf_counter()
        lr = learning_rate(self.steps_done, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.backward(self.train.batch(self.steps_done, self.config.batch))
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        # Reading the two numbers waits for the device, so the time taken after it is the whole step's.
        loss, grad_norm = float(loss), float(grad_norm)
        return StepResult(self.steps_done, loss, lr, grad_norm, time.perf_counter() - began)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Loss of a batch, its gradients added to the parameters'."""
        self.model.train()
        loss = self.forward(batch)
        loss.backward()
        return loss.detach()

    def forward(self, batch: Batch) -> torch.Tensor:
        with _autocast(self.config):
            return self.model.loss(batch.to(self.config.device))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss (nats per token) over the held-out rows."""
        self.model.eval()
        total, count = 0.0, 0
        for batch in self.valid.evenly_spaced(self.config.eval_rows, self.config.batch):
            scored = int((batch.targets != IGNORE).sum())
            if scored:
                total += float(self.forward(batch)) * scored
                count += scored
        return total / max(count, 1)

    def warm_up(self) -> float:
        """Run one forward and backward pass that changes nothing, and return its seconds.

        The first call of a kernel compiles it (once per machine: compiled code is cached on disk); this keeps that time out
        of the steps' own.
        """
        random = _random_state(self.config.device)
        began = time.perf_counter()
        float(self.backward(self.train.batch(self.steps_done, self.config.batch)))
        seconds = time.perf_counter() - began
        self.optimizer.zero_grad(set_to_none=True)
        _set_random_state(random)
        return seconds

    def state(self) -> dict[str, Any]:
        """All that `restore` needs."""
        return {
            "config": self.config.to_dict(),
            "step": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": _random_state(self.config.device),
            "data": self.train.fingerprint(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            UsageError: the training text is not the one that the checkpoint was made with.
        """
        if state["data"] != self.train.fingerprint():
            raise UsageError(
                "the training text has changed since the checkpoint was written (its SHA-256 differs), so the run cannot "
                "be resumed; put the files back, or start a new run"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        _set_random_state(state["random"])
        self.steps_done = state["step"]


def make_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves gains alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of a step counted from 0: linear up to `lr` over `warmup` steps, then half a cosine to ``lr * min_lr_ratio``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    finished: bool  # False: interrupted
    steps: int
    loss: float | None
    valid_loss: float | None


def run_training(trainer: Trainer, folder: RunFolder, observer: Observer) -> Outcome:
    """Train to the config's last step, or until Ctrl-C (or SIGTERM), and leave a checkpoint either way."""
    config = trainer.config
    loss = valid_loss = None
    saved = trainer.steps_done if folder.list_checkpoints() else None
    with stop_signal() as stop:
        while trainer.steps_done < config.steps and not stop.requested:
            result = trainer.step()
            loss = result.loss
            observer.on_step(result)
            record = _record(result, config)
            last = result.step == config.steps
            if last or (config.eval_every and result.step % config.eval_every == 0):
                record["valid_loss"] = valid_loss = trainer.evaluate()
                observer.on_evaluation(result.step, valid_loss)
            folder.append_metrics(record)
            if config.save_every and result.step % config.save_every == 0:
                folder.save_checkpoint(result.step, trainer.state())
                saved = result.step
        if saved != trainer.steps_done:
            folder.save_checkpoint(trainer.steps_done, trainer.state())
    return Outcome(trainer.steps_done >= config.steps, trainer.steps_done, loss, valid_loss)


class StopSignal:
    requested = False


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Within this context the first Ctrl-C or SIGTERM only asks to stop; a second one stops at once."""
    stop = StopSignal()
    previous: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        stop.requested = True
        signal.signal(number, previous[number])

    if threading.current_thread() is threading.main_thread():  # elsewhere Python does not let signals be handled
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")


def _record(result: StepResult, config: TrainConfig) -> dict[str, Any]:
    return {
        "step": result.step,
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "tokens": result.step * config.tokens_per_step,
        "seconds": round(result.seconds, 6),
        "memory_mb": round(used_memory(config.device) / 1e6, 1),
    }


def _autocast(config: TrainConfig) -> Any:
    return torch.autocast(config.device, torch.bfloat16) if config.dtype == "bf16" else nullcontext()


def _random_state(device: str) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if device == "cuda" else state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
