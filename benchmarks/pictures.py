"""The pictures of docs/how-flashattention-trains.md that no report has: `python benchmarks/pictures.py` draws them.

Masks come from `tilewise explain --plot`; the walks from the IO model's simulator: it executes both algorithms on a counted
memory, and what it loads, in order, is the walk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from tilewise import Causal
from tilewise.call import problem_of
from tilewise.cli.main import app
from tilewise.cli.output import figure_file
from tilewise.explain import call_of
from tilewise.io_model import machine, simulator
from tilewise.traffic import FLASH1, FLASH2

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
MASKS = {
    "causal": ("--causal",),
    "window": ("--window", "256,0"),
    "documents": ("--causal", "--documents", "300,500,900,348"),
    "butterfly": ("--blocks", "butterfly"),
}
N, D, BLOCK = 96, 16, 16


class Watched(machine.Memory):
    """Notes which rows and keys are loaded, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.walk: list[tuple[str, int]] = []

    def load(self, name: str, *index: Any) -> Any:
        if name in ("q", "k"):
            self.walk.append((name, index[-1].start // BLOCK))
        return super().load(name, *index)


def walk(algorithm: Any) -> tuple[list[tuple[int, int]], Any]:
    """The tiles (block of rows, block of keys) of a causal forward pass, in the order in which they are met; its counts."""
    q, k, v, do = (torch.randn(1, N, 1, D) for _ in "qkvo")
    call, _ = call_of(q, k, v, {"mask": Causal()})
    problem = problem_of(call.signatures, call.spec, 0, 0)
    memory, original = [], simulator.Memory
    simulator.Memory = lambda: memory.append(Watched()) or memory[-1]
    try:
        bound = call.spec.bind(call.aux, call.scale)
        done = simulator.simulate(algorithm, problem, bound, (q[0], k[0], v[0], do[0]), BLOCK, BLOCK)
    finally:
        simulator.Memory = original
    tiles, at = [], {"q": 0, "k": 0}
    inner = "k" if algorithm is FLASH2 else "q"
    for name, block in memory[0].walk[: _loads(memory[0].walk, done, inner)]:
        at[name] = block
        if name == inner:
            tiles.append((at["q"], at["k"]))
    return tiles, done.forward.counts


def _loads(walked: list[tuple[str, int]], done: Any, inner: str) -> int:
    """How many of the loads are the forward pass's: the inner tensor's count says so."""
    left = done.forward.counts[inner][0] // (BLOCK * D)
    for at, (name, _) in enumerate(walked):
        left -= name == inner
        if left == 0:
            return at + 1
    raise AssertionError("the forward pass loaded more than was seen")


def draw_walks(path: Path) -> None:
    """Both walks side by side, tiles numbered and shaded by turn."""
    with figure_file(path, 9.0, 4.9) as figure:
        for axes, (title, algorithm) in zip(
            figure.subplots(1, 2),
            (("FlashAttention-1: keys stay, rows pass", FLASH1), ("FlashAttention-2: rows stay, keys pass", FLASH2)),
            strict=True,
        ):
            tiles, counts = walk(algorithm)
            blocks = N // BLOCK
            for turn, (row, key) in enumerate(tiles):
                share = turn / (len(tiles) - 1)
                shade = (0.85 - 0.69 * share, 0.91 - 0.47 * share, 0.95 - 0.36 * share)
                axes.add_patch(_rectangle(key, row, shade))
                dark = "white" if share > 0.55 else "#1d2329"
                axes.annotate(str(turn + 1), (key + 0.5, row + 0.5), ha="center", va="center", color=dark)
            axes.set(xlim=(0, blocks), ylim=(blocks, 0), xlabel="block of keys", ylabel="block of rows", aspect="equal")
            axes.set_xticks(range(blocks + 1))
            axes.set_yticks(range(blocks + 1))
            moved = {name: [n // (BLOCK * D) for n in counts[name]] for name in ("q", "k", "o")}
            loads = ", ".join(f"{name} {some[0]}" for name, some in moved.items() if some[0])
            words = f"blocks loaded: {loads}; stored: o {moved['o'][1]}"
            axes.set_title(f"{title}\n{words}", fontsize=10)


def _rectangle(x: int, y: int, shade: tuple[float, float, float]) -> Any:
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    return Rectangle((x, y), 1, 1, facecolor=shade, edgecolor="white")


def main() -> None:
    for name, options in MASKS.items():
        call = ("explain", "--sq", "2048", *options, "--plot", str(PICTURES / f"mask-{name}.png"))
        result = CliRunner().invoke(app, call)
        assert result.exit_code == 0, result.output
    draw_walks(PICTURES / "walks.png")


if __name__ == "__main__":
    main()
