"""Numbers in pages that come from stored results: each has its formula in a comment behind it.

`8.42<!-- kept("recompute-tiles") -->` in Markdown shows 8.42 only. `python benchmarks/page_numbers.py PAGE...` evaluates the
formulas, writes what they give in the decimals that stand there, and says what changed; a test calls `renewed` and requires
that nothing does.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise.io_model.models import MODELS
from tilewise.io_model.systems import SYSTEMS, plain_problem, report, tiles_for

HERE = Path(__file__).parent
NUMBER = re.compile(r"(?P<number>[\d,]*\.?\d+)<!-- (?P<formula>.+?) -->")


@cache
def stored(name: str) -> dict[str, Any]:
    """A result of `results/`."""
    return json.loads((HERE / "results" / f"{name}.json").read_text())


@cache
def papers(generation: int) -> dict[str, Any]:
    """What the paper of FlashAttention-1, -2 or -3 prints."""
    return list(json.loads((HERE / "papers.json").read_text()).values())[generation]


# ---- the lab ----

COMPARE = "lab-compare-cpu-zen3"


def of_lab(system: str) -> dict[str, Any]:
    return next(r for r in stored(COMPARE)["results"] if r["system"] == system)


def kept(system: str) -> float:
    """MB kept for the backward pass."""
    return of_lab(system)["saved_bytes"] / 1e6


def peak(system: str) -> float:
    """MB beyond inputs, outputs and gradients."""
    return of_lab(system)["peak_bytes"] / 1e6


def ms(system: str, which: str) -> float:
    return of_lab(system)[which]["seconds"] * 1e3


def best_tile(which: str) -> dict[str, Any]:
    return min(stored(COMPARE)["sweep"], key=lambda s: s[which]["seconds"])


def kept_ratio(n: int, d: int) -> float:
    """Numbers that standard attention keeps over those that m, l and o take: (3 n d + n^2) / (4 n d + 2 n)."""
    return (3 * n * d + n * n) / (4 * n * d + 2 * n)


# ---- the IO model ----


def moved(name: str, system: str, *passes: str) -> float:
    """GB between chip and L2, both passes unless they are named."""
    found = stored(name)["systems"][system]
    return sum(found[p]["bytes_read"] + found[p]["bytes_written"] for p in passes or ("forward", "backward")) / 1e9


def behind(name: str, system: str) -> float:
    """GB behind L2, both passes."""
    found = stored(name)["systems"][system]
    return sum(found[p]["predicted"]["memory_bytes"] for p in ("forward", "backward")) / 1e9


def least(name: str, system: str, *passes: str) -> float:
    """ms that both passes take at least."""
    found = stored(name)["systems"][system]
    return sum(found[p]["predicted"]["seconds"] for p in passes or ("forward", "backward")) * 1e3


def intensity(name: str, system: str, which: str) -> float:
    return stored(name)["systems"][system][which]["predicted"]["intensity"]


def products(system: str) -> float:
    """TFLOP of matrix products at the papers' shape, both passes."""
    found = stored("io-a100-1k-dropout")["systems"][system]
    return sum(found[p]["flops"]["matmul"] for p in ("forward", "backward")) / 1e12


def balance(name: str) -> float:
    """FLOPs that a GPU does in the time of one byte."""
    gpu = stored(name)["gpu"]
    return gpu["matrix16"] / gpu["bandwidth"]


def exponent(system: str, which: str, size: str) -> float:
    laws = stored("io-h200-1k")["laws"]["exponents"]
    law = next(x for x in laws if (x["system"], x["backward"]) == (system, which == "backward"))
    return abs(law["exponents"][size][0])


def elements(system: str, n: int, d: int, chip: int) -> int:
    """Elements that one head's forward pass loads and stores, for a chip of so many."""
    problem, bound = plain_problem(N=n, D=d, dtype=torch.float32)
    return report(SYSTEMS[system], problem, bound, tiles_for(chip, d)).forward.account.elements


def chip(name: str, system: str, kib: int) -> float:
    """GB of the forward pass on a chip of so many KiB."""
    chips = stored(name)["chips"]
    return chips["bytes"][system][chips["kib"].index(kib)] / 1e9


def tiles(n: int, block: int = 128, **options: Any) -> Any:
    """Full, masked and skipped tiles of one head."""
    x = torch.zeros(()).expand(1, n, 1, 64)
    return tilewise.explain(x, x, x, block_m=block, block_n=block, **options).cost.tiles


def measured(system: str, which: str) -> dict[str, Any]:
    """What hardware counters of one H200 said, and the model."""
    rows = stored("io-h200-measured-hopper")["measured"]
    return next(row for row in rows if (row["system"], row["pass"]) == (system, which))


def counted(system: str, which: str, level: str) -> float:
    return measured(system, which)["counted"][level]


def model(system: str, which: str, level: str) -> float:
    return measured(system, which)["predicted"][level]


# ---- memory, density, generations, training ----


def longest(name: str, who: str) -> int:
    return stored(name)["out_of_memory_at"][who]


def context(model: str, who: str) -> int:
    """Tokens at batch 1 on one H200."""
    return next(p for p in stored("io-fit-h200")["points"] if p["model"] == model)["largest_context"][who]


def line(name: str) -> dict[str, float]:
    """The straight line of time against density: ms."""
    return {
        part: value * (1 if part == "r2" else 1e3)
        for part, value in stored("lab-sparsity-cpu-zen3")["fits"][name].items()
    }


def generation(name: str) -> float:
    return stored("lab-generations-cpu-zen3")["geometric_means"][name]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def attention_share(model: str, n: int) -> float:
    """Percent of a training step's FLOPs: 12 L w N^2 of 6 N P + 12 L w N^2."""
    of = MODELS[model]
    own = 12 * of.layers * of.width * n * n
    return 100 * own / (6 * n * of.parameters() + own)


# ---- pages ----


def renewed(text: str) -> str:
    """The text with every number that has a formula written anew."""
    return NUMBER.sub(lambda found: f"{_written(found)}<!-- {found['formula']} -->", text)


def _written(found: re.Match[str]) -> str:
    decimals = len(found["number"].partition(".")[2])
    return f"{eval(found['formula'], globals()):,.{decimals}f}"


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        old = path.read_text()
        new = renewed(old)
        path.write_text(new)
        for was, now in zip(NUMBER.finditer(old), NUMBER.finditer(new)):
            if was["number"] != now["number"]:
                print(f"{path}: {was['number']} -> {now['number']}: {now['formula']}")


if __name__ == "__main__":
    main()
