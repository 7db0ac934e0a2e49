"""Training: `tilewise compare`."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from tilewise.report import picture
from tilewise.report.pieces import Panel, Section, Table, listed, ms, sentence


def compare(data: dict[str, Any]) -> Section:
    """Losses of one model with several attentions and seeds."""
    runs, config = data["runs"], data["config"]
    names = list(dict.fromkeys(run["attention"] for run in runs))
    rows = []
    for run in runs:
        peak = "-" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 1e9:.2f} GB"
        losses = (f"{loss:.4f}" for loss in (run["losses"][0], run["losses"][-1], run["valid_loss"]))
        rows.append((run["attention"], str(run["seed"]), *losses, ms(run["step_seconds"]), peak))
    columns = ("attention", "seed", "first loss", "last loss", "held out", "step", "peak memory")
    return Section(
        "One model, several attentions and seeds",
        f"{data['parameters']:,} parameters, {config['steps']} steps of {config['batch']} x {config['context']} tokens, "
        f"{config['dtype']} on {config['device']}; {data['text']}",
        [sentence(words.partition("; a step took")[0]) for words in data["in_words"]],  # times are in the table
        [_losses(data, names), _differences(data, names)],
        [Table("Every run", columns, rows)],
        [
            f"{name} differs from {names[0]} by more than seeds do"
            for name, ok in data["within_spread"].items()
            if not ok
        ],
    )


def _losses(data: dict[str, Any], names: list[str]) -> Panel:
    means = {name: statistics.fmean(r["losses"][-1] for r in data["runs"] if r["attention"] == name) for name in names}
    says = (
        f"After {data['config']['steps']} steps the mean loss is {listed(f'{m:.4f} ({n})' for n, m in means.items())}."
    )

    def draw(axes: Any) -> None:
        first = data["runs"][0]["seed"]
        for at, name in enumerate(names):
            for run in data["runs"]:
                if run["attention"] == name:
                    label = name if run["seed"] == first else None
                    width = 3.2 - 2 * at / max(len(names) - 1, 1)
                    axes.plot(run["losses"], color=picture.colour(name, at), lw=width, label=label)
        axes.set(xlabel="step", ylabel="loss, nats per token")
        axes.legend()

    alt = f"Curves of loss against step of {listed(names)}, one for each seed; the attentions lie on each other."
    return Panel("losses", "loss", alt, says, draw, plot=3)


def _differences(data: dict[str, Any], names: list[str]) -> Panel:
    spread = statistics.fmean(data["spread"])
    says = (
        listed(
            f"{name} and {names[0]} differ by {statistics.fmean(apart):.1e} from one seed"
            for name, apart in data["differences"].items()
        )
        + f", seeds of {names[0]} by {spread:.1e} (means over steps)."
    )
    alt = "Curves on a logarithmic axis: differences of losses between attentions, far below the spread of seeds."
    draw = partial(_draw_differences, data=data, base=names[0])
    return Panel("differences", "loss differences", alt, says, draw, plot=3)


def _draw_differences(axes: Any, data: dict[str, Any], base: str) -> None:
    axes.plot(data["spread"], color=picture.GREY, label=f"spread of {base}'s seeds")
    for at, (name, apart) in enumerate(data["differences"].items()):
        axes.plot(apart, color=picture.colour(name, at), label=f"{name} and {base}, same seed")
    axes.set(xlabel="step", ylabel="difference of losses", yscale="log")
    axes.legend()
