"""Which backend takes a call: the capability table in order of preference, and `NoBackendError` when none can."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from tilewise.backends.base import FEATURES, Backend, Capabilities
from tilewise.problem import DTYPES, MAX_HEAD_DIM, Problem


def _cpu_requires() -> str | None:
    return None if importlib.util.find_spec("numba") else "numba is not installed (pip install numba)"


def _load_cpu() -> Backend:
    from tilewise.backends import cpu  # noqa: PLC0415  numba adds 0.3 s to an import: only the first CPU call pays

    return cpu.CpuBackend()


def _triton_requires() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with PyTorch for CUDA or ROCm"
    return None


def _load_triton() -> Backend:
    from tilewise.backends import triton  # noqa: PLC0415  only where a GPU call asks for it

    return triton.TritonBackend()


#: With TRITON_INTERPRET=1 Triton kernels run on CPU tensors, slowly: for debugging and tests.
_TRITON_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

#: In order of preference.
BACKENDS: tuple[Capabilities, ...] = (
    Capabilities(
        name="cpu",
        title="CPU (Numba, LLVM vector kernels)",
        device="cpu",
        dtypes=DTYPES,
        max_head_dim=MAX_HEAD_DIM,
        features=frozenset(FEATURES),
        requires=_cpu_requires,
        load=_load_cpu,
    ),
    Capabilities(
        name="triton",
        title="GPU (Triton, portable)",
        device=_TRITON_DEVICE,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_head_dim=MAX_HEAD_DIM,
        features=frozenset(FEATURES),
        requires=_triton_requires,
        load=_load_triton,
    ),
)

# A plain global, like torch's own kernel choice: torch.compile can guard on it, on a ContextVar it cannot.
_preferred: str | None = None


class NoBackendError(RuntimeError):
    """No backend can take a call; the message names every backend with every reason."""


def names() -> list[str]:
    return [c.name for c in BACKENDS]


def capabilities(name: str) -> Capabilities:
    """The row of one backend.

    Raises:
        ValueError: no backend has this name.
    """
    for row in BACKENDS:
        if row.name == name:
            return row
    raise ValueError(f"backend must be one of {names()}, got {name!r}")


@lru_cache(maxsize=8)
def load(name: str) -> Backend:
    """The kernels of one backend, imported at first use."""
    return capabilities(name).load()


def select(problem: Problem, backend: str | None = None) -> str:
    """The name of the backend that takes this call.

    An explicit `backend` (argument or `use_backend`) never falls back to another one. On the meta device, where nothing
    runs, any known name is accepted.

    Raises:
        NoBackendError: no backend, or not the one asked for, can take the call.
    """
    backend = backend or _preferred
    rows = BACKENDS if backend is None else (capabilities(backend),)
    if problem.device == "meta":
        return rows[0].name
    refusals = []
    for row in rows:
        reasons = row.why_not(problem)
        if not reasons:
            return row.name
        refusals.append(f"  {row.name}: " + "; ".join(reasons))
    asked = "no backend" if backend is None else f"backend {backend!r} (asked for explicitly, so no other was tried)"
    raise NoBackendError(f"{asked} can take this call:\n" + "\n".join(refusals))


def preferred() -> str | None:
    """The backend set by `use_backend`, if any."""
    return _preferred


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within this context every call of the process goes to the named backend, or raises.

    Example:
        >>> import torch, tilewise
        >>> q = k = v = torch.randn(1, 8, 2, 16)
        >>> with tilewise.use_backend("cpu"):
        ...     tilewise.attention(q, k, v).shape
        torch.Size([1, 8, 2, 16])
    """
    global _preferred
    capabilities(name)
    outer, _preferred = _preferred, name
    try:
        yield
    finally:
        _preferred = outer
