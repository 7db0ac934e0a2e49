"""`tilewise io --simulate`: every algorithm executed on real numbers with a counted memory, beside its formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from tilewise import Causal
from tilewise.call import problem_of
from tilewise.cli.output import FAILED, console, fail, table
from tilewise.explain import call_of
from tilewise.io_model.simulator import simulate
from tilewise.io_model.systems import System, report

LENGTHS = (64, 128, 256, 512)
D, BLOCK = 16, (32, 48)  # rows and keys of a tile: the last tile of keys is a part
MASKS = {"full": None, "causal": Causal()}


def run(systems: Iterable[System]) -> list[dict[str, Any]]:
    """Elements loaded and stored, by formula and as executed: small problems, one head. They must be equal.

    Systems that share an algorithm are executed once.
    """
    different = {system.algorithm: system for system in reversed(list(systems))}
    rows = [
        {"system": system.name, "mask": mask, "N": n, "pass": which, "formula": formula, "executed": executed}
        for system in reversed(different.values())
        for mask in MASKS
        for n in LENGTHS
        for which, (formula, executed) in _counts(system, mask, n).items()
    ]
    _show(rows)
    if wrong := [row for row in rows if row["formula"] != row["executed"]]:
        fail(f"{len(wrong)} counts differ from their formulas, the first: {wrong[0]}", FAILED)
    return rows


def _counts(system: System, mask: str, n: int) -> dict[str, tuple[int, int]]:
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, n, 1, D, generator=g) for _ in range(4))
    call, _ = call_of(q, k, v, {"mask": MASKS[mask]})
    problem, bound = problem_of(call.signatures, call.spec, 0, 0), call.spec.bind(call.aux, call.scale)
    problem = replace(problem, device="cuda")  # bounds of rows are computed, as in the account of `io`
    found = report(system, problem, bound, lambda _: BLOCK)
    done = simulate(system.algorithm, problem, bound, (q[0], k[0], v[0], do[0]), *BLOCK)
    pairs = {"forward": (found.forward, done.forward), "backward": (found.backward, done.backward)}
    return {
        which: (one.account.elements, sum(map(sum, executed.counts.values())))
        for which, (one, executed) in pairs.items()
    }


def _show(rows: list[dict[str, Any]]) -> None:
    cells = [
        (row["system"], row["pass"], row["mask"], *(f"{row[what]:,}" for what in ("N", "formula", "executed")))
        for row in rows
        if row["N"] == LENGTHS[-1]
    ]
    title = f"Elements loaded and stored by one head of {D}, tiles of {BLOCK[0]} x {BLOCK[1]}"
    console.print(table(title, ["system", "pass", "mask", "N", "formula", "executed"], cells, left=3))
    console.print(f"{len(rows)} problems executed with a counted memory")
