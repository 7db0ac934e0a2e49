"""What a person sees while a run goes on: rich progress bars on stderr."""

from __future__ import annotations

from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise.training.config import TrainConfig
from tilewise.training.loop import StepResult
from tilewise.training.memory import used_memory

_RECENT_STEPS = 20


def make_progress(console: Console) -> Progress:
    """A bar with a description, steps, time left and a `detail` text."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )


class TrainingProgress:
    """An observer of `run_training` that draws a bar with loss, tokens/s and memory; held-out losses stay as lines."""

    def __init__(self, console: Console, config: TrainConfig, steps_done: int = 0):
        self._config, self._console = config, console
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._progress = make_progress(console)
        self._task = self._progress.add_task("training", total=config.steps, completed=steps_done, detail="")

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    @property
    def tokens_per_second(self) -> float:
        """Over the last steps."""
        return self._config.tokens_per_step * len(self._recent) / sum(self._recent) if self._recent else 0.0

    def on_step(self, result: StepResult) -> None:
        self._recent.append(result.seconds)
        memory = used_memory(self._config.device) / 1e6
        detail = f"loss {result.loss:.3f}  {self.tokens_per_second:,.0f} tokens/s  {memory:,.0f} MB"
        self._progress.update(self._task, completed=result.step, detail=detail)

    def on_evaluation(self, step: int, loss: float) -> None:
        self._console.print(f"step {step:>6}: held-out loss {loss:.4f}")
