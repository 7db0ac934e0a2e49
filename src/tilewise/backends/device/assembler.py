"""Which assembler (ptxas) turns kernels into machine code for NVIDIA GPUs.

Triton 3.6 brings two and takes the older one, 12.8, for all GPUs before Blackwell. On Hopper that one makes wrong code of
right PTX: of several products (wgmma) that read one matrix in shared memory, all but the first got the matrix's address
where its sixteenth belongs, and read elsewhere or out of bounds. Version 12.9 does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]

SOUND = (12, 9)


def _tools() -> Iterator[Any]:
    """The assemblers that Triton knows, its own choice first; other versions of it have fewer."""
    for name in ("ptxas", "ptxas_blackwell"):
        try:
            yield getattr(triton.knobs.nvidia, name)
        except (AttributeError, RuntimeError):  # no such knob; no such file
            continue


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))


def sound_ptxas() -> Any | None:
    """The assembler to use: Triton's choice, or that of the user (TRITON_PTXAS_PATH), if it is sound; else the newer one."""
    return next((tool for tool in _tools() if _version(tool) >= SOUND), None)


@contextmanager
def sound_assembler() -> Iterator[None]:
    """Within it, Triton compiles with a sound assembler where there is one."""
    tool = sound_ptxas() if torch.version.hip is None else None
    if tool is None:
        yield
        return
    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.ptxas = tool.path
        yield
