"""The files that commands write and what is made of them; the list of plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.report import io, lab, memory, speed, tests, training
from tilewise.report.pieces import Section


def _any(_: dict[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Args:
        title: what it is, in words.
        command: what stands under "command" in it; "" is whatever stands there.
        section: makes its part of the page.
        among: tells it from others of the same command.
        computed: it says nothing of the machine that it was made on.
    """

    title: str
    command: str
    section: Callable[[dict[str, Any]], Section]
    among: Callable[[dict[str, Any]], bool] = _any
    computed: bool = False

    def takes(self, data: dict[str, Any]) -> bool:
        return self.command in ("", data.get("command")) and self.among(data)


def _of_features(data: dict[str, Any]) -> bool:
    return {"heads", "D"} <= data.keys()


def _of_gpu(data: dict[str, Any]) -> bool:
    return "burst_s" in data


def _of_tests(data: dict[str, Any]) -> bool:
    return {"passed", "failures"} <= data.keys()


#: In the order of the page; the first that takes a file has it.
KINDS = (
    Kind("speed on a GPU", "bench", speed.bench_gpu, _of_gpu),
    Kind("features on a GPU", "bench", speed.features, _of_features),
    Kind("speed on a CPU", "bench", speed.bench),
    Kind("generations", "lab generations", speed.generations),
    Kind("memory", "memory", memory.memory),
    Kind("memory of the lab's systems", "lab memory", memory.memory),
    Kind("the lab's systems", "lab compare", lab.compare),
    Kind("errors", "lab errors", lab.errors),
    Kind("block-sparse attention", "lab sparsity", lab.sparsity),
    Kind("the IO model", "io", io.io, lambda data: not data.get("measured"), computed=True),
    Kind("the IO model, measured", "io", io.io),
    Kind("what fits", "fit", memory.fit, computed=True),
    Kind("training", "compare", training.compare),
    Kind("tests on a GPU", "", tests.tests, _of_tests),
)


@dataclass(frozen=True)
class Plot:
    """One of the pictures that the papers' claims ask for, and the command whose JSON has its data."""

    number: int
    title: str
    command: str  # "": none makes it yet


PLOTS = tuple(
    Plot(number, *words)
    for number, words in enumerate(
        (
            ("speed against sequence length", "tilewise bench --device cuda, or tilewise lab generations"),
            ("memory against sequence length", "tilewise memory, or tilewise lab memory"),
            ("losses of attentions and seeds", "tilewise compare"),
            ("loss against seconds, short and long context", ""),
            ("roofline", "tilewise io"),
            ("bytes, predicted and counted", "tilewise io --measure, or tilewise io --simulate"),
            ("time against tile size", "tilewise lab compare"),
            ("where the time of a training step goes", ""),
            ("speed of whole models", ""),
            ("largest batch and context", "tilewise fit"),
            ("Long-Range Arena, speed by task", ""),
            ("finding a needle; F1 against context", ""),
            ("block-sparse: time against density", "tilewise lab sparsity"),
        ),
        start=1,
    )
)


def section_of(data: dict[str, Any]) -> Section:
    """What a command's data show.

    Raises:
        ValueError: no kind takes them.
    """
    for kind in KINDS:
        if kind.takes(data):
            return kind.section(data)
    raise ValueError(f"nothing is drawn of {data.get('command')!r}")
