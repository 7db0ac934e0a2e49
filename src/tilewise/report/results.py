"""Stored results as the report finds them: files read, and those it cannot use, each with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.report.kinds import KINDS, Kind
from tilewise.report.pieces import Section


@dataclass(frozen=True)
class Unused:
    """A file that is not on the page.

    Args:
        broken: a result of a known command that cannot be read, rather than something else.
    """

    path: Path
    reason: str
    broken: bool


@dataclass(frozen=True)
class Result:
    """One file of a command, and what it shows."""

    path: Path
    kind: Kind
    machine: dict[str, Any]
    section: Section
    note: str = ""  # what whoever stored it had to say

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def where(self) -> str:
        """The processor that the result is of."""
        if self.kind.computed:
            return "computed"
        device = self.machine.get("gpu")
        cores = f"{self.machine['cores']} cores" if self.machine.get("cores") else ""
        return device or ", ".join(part for part in (self.machine.get("cpu", "unknown processor"), cores) if part)

    @property
    def versions(self) -> str:
        """Versions, date."""
        named = [f"{name} {self.machine[name]}" for name in VERSIONS if self.machine.get(name)]
        return ", ".join([*named, str(self.machine.get("date", "no date"))[:10]])


VERSIONS = ("tilewise", "torch", "triton", "numba", "python")


def files(paths: Iterable[Path]) -> list[Path]:
    """The JSON files named, and those in the folders named.

    Raises:
        ValueError: a path does not exist, or a folder holds no JSON file.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} holds no .json file")
        found += [one for one in inside if one not in found]
    return found


def read(paths: Iterable[Path]) -> tuple[list[Result], list[Unused]]:
    """Every file as a result, in the order of KINDS, or as one that is not used."""
    read_all = [_read(path) for path in paths]
    results = [one for one in read_all if isinstance(one, Result)]
    return sorted(results, key=lambda r: KINDS.index(r.kind)), [one for one in read_all if isinstance(one, Unused)]


def _read(path: Path) -> Result | Unused:
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        return Unused(path, f"no JSON: {error}", broken=True)
    if not isinstance(data, dict):
        return Unused(path, f"holds a {type(data).__name__}, not the object that commands write", broken=True)
    kind = next((kind for kind in KINDS if kind.takes(data)), None)
    if kind is None:
        return Unused(path, _stranger(data), broken=False)
    if not isinstance(data.get("machine"), dict):
        return Unused(path, f"{kind.title}: does not say on which machine ('machine')", broken=True)
    try:
        return Result(
            path, kind, data.get("counted_on", data["machine"]), kind.section(data), str(data.get("note", ""))
        )
    except KeyError as error:
        return Unused(path, f"{kind.title}: lacks {error}", broken=True)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return Unused(path, f"{kind.title}: {type(error).__name__}: {error}", broken=True)


def _stranger(data: dict[str, Any]) -> str:
    known = ", ".join(dict.fromkeys(kind.command for kind in KINDS if kind.command))
    if "command" in data:
        return f"results of {data['command']!r} are not drawn, only those of {known}"
    says = next((f"; it says: {data[key]}" for key in ("what", "how", "note") if key in data), "")
    return f"names no command, so it is none of {known}{says}"
