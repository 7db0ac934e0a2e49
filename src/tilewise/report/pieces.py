"""What a page is made of: panels, tables and sections, and how numbers are written in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Panel:
    """One picture with one pair of axes.

    Args:
        name: its part of a file's name.
        title: above it.
        alt: what is drawn, for those who cannot see it.
        says: what it shows, in numbers of the data.
        draw: draws it on matplotlib axes.
        plot: its number in `kinds.PLOTS`; 0 is none of them.
        height: in inches, beside a width of 5.2: more for many bars.
    """

    name: str
    title: str
    alt: str
    says: str
    draw: Callable[[Any], None]
    plot: int = 0
    height: float = 3.6


@dataclass(frozen=True)
class Table:
    """Text cells; the first `left` columns are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Section:
    """One stored result: what it is about, what follows, its pictures and tables."""

    heading: str
    problem: str
    says: Sequence[str] = ()
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = field(default=())  # what was refused, failed or was not measured

    @property
    def brief(self) -> str:
        """Its first sentence."""
        return next(iter((*self.says, *(panel.says for panel in self.panels), *self.warnings)), "nothing was measured")


def shape_of(problem: dict[str, Any]) -> str:
    """B64 H16 N1024 D64 fp16 causal."""
    sizes = [f"{name} {problem[name]:,}" for name in ("B", "H", "N", "D") if name in problem]
    return ", ".join([*sizes, problem["dtype"], "causal" if problem.get("causal") else "full"])


def ms(seconds: float) -> str:
    """Milliseconds with three digits."""
    return f"{digits(seconds * 1e3)} ms"


def digits(value: float, count: int = 3) -> str:
    """A number with so many significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    places = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def times(value: float) -> str:
    """1.23x, 68x."""
    return f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def fold(value: float) -> str:
    """4.14 times, 49,404 times: before "less" and "fewer"."""
    return f"{digits(value) if value < 1000 else f'{value:,.0f}'} times"


def sentence(text: str) -> str:
    """With a capital at its beginning and a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def listed(words: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
