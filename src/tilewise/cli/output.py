"""How commands show and store results: tables, JSON with the machine it was measured on, plots, errors."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from tilewise import __version__

_WIDTH = None if sys.stdout.isatty() else 120  # into a file or a pipe: wide enough for every table

console = Console(highlight=False, width=_WIDTH)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write everything to this JSON file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw it to this file (.png, .svg or .pdf).")]

USER_ERROR = 2
FAILED = 1


def fail(message: str, code: int = USER_ERROR) -> NoReturn:
    """Print one error to stderr and leave with an exit code."""
    stderr.print("[bold red]error:[/] ", end="")
    stderr.print(message, markup=False)
    raise typer.Exit(code)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for at, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if at < left else "right"
        made.add_column(column, justify=justify, no_wrap=at >= left)
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def write_json(path: Path | None, command: str, data: dict[str, Any], say: bool = True) -> None:
    """Write a command's results with the machine they come from, and say so; no path, no file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")  # whoever is stopped while writing leaves what was there
    part.write_text(json.dumps({"command": command, "machine": machine(), **data}, indent=2) + "\n")
    part.replace(path)
    if say:
        console.print(f"wrote {path}")


def machine() -> dict[str, Any]:
    """What results depend on: processors, threads, versions, date."""
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": installed("numba"),
        "tilewise": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Physical memory of this machine, or what its container may use of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def figure_file(path: Path, width: float = 7.0, height: float = 4.5) -> Iterator[Any]:
    """An empty matplotlib figure, saved to `path` at the end."""
    require("matplotlib", "--plot", "plot")
    from matplotlib.figure import Figure  # noqa: PLC0415  half a second that only plots pay

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    console.print(f"wrote {path}")


def write_plot(path: Path | None, command: str, data: dict[str, Any]) -> None:
    """Draw what a command's results show, the pictures of `tilewise report` in one file; no path, no file."""
    if path is None:
        return
    require("matplotlib", "--plot", "plot")
    from tilewise.report import kinds, picture  # noqa: PLC0415  as above

    section = kinds.section_of({"command": command, **data})
    if not section.panels:
        stderr.print("there is nothing to draw")
        return
    picture.save(section.panels, path, f"{section.heading}. {section.problem}")
    console.print(f"wrote {path}")


def require(package: str, what: str, extra: str) -> None:
    """Fail with the command that installs an optional package."""
    if importlib.util.find_spec(package) is None:
        fail(f"{what} needs {package}, which is not installed: pip install 'tilewise[{extra}]'")


def dtype_of(name: str) -> torch.dtype:
    """A torch dtype from the names people use."""
    names = {
        "fp32": torch.float32, "float32": torch.float32, "fp64": torch.float64, "float64": torch.float64,
        "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    }  # fmt: skip
    if name not in names:
        raise ValueError(f"dtype must be one of {', '.join(names)}, got {name!r}")
    return names[name]


def short(dtype: torch.dtype) -> str:
    """fp32, bf16, ..."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
