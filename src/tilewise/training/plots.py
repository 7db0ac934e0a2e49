"""Pictures of runs; they need matplotlib and nothing else here does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.training.errors import optional_package


def plot_losses(metrics: list[dict[str, Any]], path: Path) -> None:
    """Training and held-out loss of one run against its steps.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure, axes = _figure(1)
    steps = [record["step"] for record in metrics]
    axes[0].plot(steps, [record["loss"] for record in metrics], color="tab:blue", lw=1, label="training")
    held_out = [record for record in metrics if "valid_loss" in record]
    if held_out:
        points = [record["step"] for record in held_out], [record["valid_loss"] for record in held_out]
        axes[0].plot(*points, "o-", color="tab:orange", label="held out")
    axes[0].legend()
    axes[0].set(xlabel="step", ylabel="loss (nats per token)")
    _save(figure, path)


def plot_comparison(
    losses: dict[str, list[float]], differences: dict[str, list[float]], title: str, path: Path
) -> None:
    """Loss curves of several attentions drawn over each other, and how far each is from the first.

    Args:
        losses: loss at every step, by name.
        differences: absolute difference from the first one at every step, by name, for the others.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure, axes = _figure(2)
    colors = {name: f"C{i}" for i, name in enumerate(losses)}
    for i, (name, values) in enumerate(losses.items()):
        # The curves coincide: ever thinner lines, so that the ones below still show.
        axes[0].plot(
            range(1, len(values) + 1), values, color=colors[name], lw=5 - 4 * i / max(1, len(losses) - 1), label=name
        )
    axes[0].set(ylabel="loss (nats per token)", title=title)
    axes[0].legend()
    for name, values in differences.items():
        steps = [i + 1 for i, value in enumerate(values) if value > 0]
        axes[1].plot(steps, [value for value in values if value > 0], ".", color=colors[name], ms=4, label=name)
    axes[1].set(xlabel="step", ylabel=f"difference from {next(iter(losses))}", yscale="log")
    axes[1].legend()
    _save(figure, path)


def _figure(panels: int) -> tuple[Any, Any]:
    figures = optional_package("matplotlib.figure", "a plot")
    # Figure, not pyplot: it draws to files without a display and leaves no global state behind.
    figure = figures.Figure(figsize=(8, 3 + 2 * panels), layout="constrained")
    return figure, figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120)
