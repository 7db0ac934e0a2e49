"""Pictures of `tilewise io`: the roofline with every system on it, and bytes against the size of the chip."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli.output import figure_file, short
from tilewise.io_model.gpus import KIB
from tilewise.io_model.roofline import predict
from tilewise.io_model.systems import Report, report

if TYPE_CHECKING:
    from tilewise.cli.io import Asked

COLOURS = {"standard": "#d1495b", "flash1": "#edae49", "flash2": "#2a6f97"}
SAME = ("flash3", "triton")  # forward they move what flash2 moves
CHIPS = tuple(KIB << i for i in range(3, 10))  # 8 KiB to 512 KiB


def draw(reports: dict[str, Report], asked: Asked, path: Path) -> None:
    """Both pictures side by side, forward pass."""
    p = asked.problem
    with figure_file(path, 11.0, 4.8) as figure:
        left, right = figure.subplots(1, 2)
        _roofline(left, reports, asked)
        _chips(right, reports, asked)
        mask = ", ".join(p.features) or "no mask"
        figure.suptitle(
            f"forward pass, B{p.B} H{p.H} Sq{p.Sq} Sk{p.Sk} D{p.D} {short(p.dtype)}, {mask}; counted, {asked.gpu.title}"
        )


def _roofline(axes: Any, reports: dict[str, Report], asked: Asked) -> None:
    """Attainable rate against FLOPs per byte: dots where only compulsory bytes reach memory, rings if every load did."""
    gpu, peak = asked.gpu, asked.gpu.peak(asked.problem.dtype)
    guesses = {n: predict(found.forward, asked.problem, gpu) for n, found in reports.items() if n not in SAME}
    knee = peak / gpu.bandwidth
    highest = max([10 * knee, *(4 * g.intensity for g in guesses.values())])
    axes.plot([1, knee, highest], [gpu.bandwidth, peak, peak], color="black", linewidth=1.2)
    axes.annotate(f"{peak / 1e12:,.0f} TFLOP/s", (highest, 0.93 * peak), ha="right", va="top")
    axes.annotate(f"{gpu.bandwidth / 1e12:.2f} TB/s", (1.2, 6 * gpu.bandwidth), va="bottom")
    for name, guess in guesses.items():
        colour = COLOURS[name]
        useful = guess.flops / guess.seconds
        axes.plot([guess.intensity], [useful], "o", color=colour, markersize=8, label=f"{name}: bound by {guess.bound}")
        inner = min(peak, guess.tile_intensity * gpu.bandwidth)
        axes.plot([guess.tile_intensity], [inner], "o", color=colour, markersize=11, fillstyle="none")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs of products per byte", ylabel="FLOP/s at most")
    axes.set_ylim(top=2 * peak)
    axes.set_title("roofline; ring: every load from memory, dot: L2 holds re-reads", fontsize=9)
    axes.legend(loc="lower right", fontsize=8)


def _chips(axes: Any, reports: dict[str, Report], asked: Asked) -> None:
    """Bytes between memory and the chip against its size: standard is flat, flash falls like 1 / M."""
    for name, found in reports.items():
        if name in SAME:
            continue
        bytes_moved = [
            report(found.system, asked.problem, asked.bound, asked.tiles_of(size)).forward.account.bytes
            for size in CHIPS
        ]
        axes.plot([size / KIB for size in CHIPS], bytes_moved, "o-", color=COLOURS[name], label=name, markersize=4)
    least = min(found.forward.account.compulsory_bytes for found in reports.values())
    axes.axhline(least, color="grey", linestyle=":", label="each tensor once")
    axes.axvline(asked.sram / KIB, color="grey", linewidth=0.8)
    axes.annotate(f" {asked.sram / KIB:,.0f} KiB", (asked.sram / KIB, axes.get_ylim()[1]), va="top", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="chip, KiB", ylabel="bytes loaded and stored")
    axes.set_xticks([size / KIB for size in CHIPS], [f"{size // KIB}" for size in CHIPS])
    axes.minorticks_off()
    axes.set_title("bytes against the size of the chip", fontsize=9)
    axes.legend(fontsize=8)
