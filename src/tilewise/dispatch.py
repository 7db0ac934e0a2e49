"""Which backend takes a call: the capability table in order of preference, and `NoBackendError` when none can."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch

from tilewise.backends.base import FEATURES, Backend, Capabilities, Composite
from tilewise.problem import DTYPES, MAX_HEAD_DIM, Problem
from tilewise.tiles import DECODE_ROWS, MANY_KEYS, packs

Asked = TypeVar("Asked", bound=Callable[..., Any])


def while_tracing(function: Asked) -> Asked:
    """Have torch.compile call a function while it traces and keep the result, instead of looking inside.

    What `torch.compiler.assume_constant_result` does, without the compiler that it imports.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  no attribute that a type checker knows
    return function


@while_tracing
def _cpu_requires() -> str | None:
    return None if importlib.util.find_spec("numba") else "numba is not installed (pip install numba)"


def _load_cpu() -> Backend:
    from tilewise.backends import cpu  # noqa: PLC0415  numba adds 0.3 s to an import: only the first CPU call pays

    return cpu.CpuBackend()


@while_tracing
def _triton_requires() -> str | None:
    return _no_triton()


@lru_cache(maxsize=1)
def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with PyTorch for CUDA or ROCm"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    from tilewise.backends.device.assembler import sound_ptxas  # noqa: PLC0415  only where there is a GPU

    hopper = any(torch.cuda.get_device_capability(i)[0] == 9 for i in range(torch.cuda.device_count()))
    if hopper and sound_ptxas() is None:
        return (
            "its ptxas is older than 12.9, which makes wrong code for Hopper: upgrade triton, or set TRITON_PTXAS_PATH"
        )
    return None


def _triton_lacks(problem: Problem) -> str | None:
    if problem.dtype == torch.float32 and max(problem.D, problem.Dv) > 512:
        return "float32 with head dims beyond 512: its tiles do not fit on chip"
    return None


def _load_triton() -> Backend:
    from tilewise.backends import triton  # noqa: PLC0415  only where a GPU call asks for it

    return triton.TritonBackend()


MULTIPROCESSORS = 132  # of a Hopper GPU
BLOCK_KEYS = 64  # the least that a tile of keys has
GLUON_VERSION = "3.6"  # of Triton: the language has changed in every release since


@while_tracing
def _gluon_requires() -> str | None:
    return _no_gluon()  # behind a plain function: PyTorch 2.11 takes what lru_cache makes for a method of the row


@lru_cache(maxsize=1)
def _no_gluon() -> str | None:
    if (reason := _no_triton()) is not None:
        return reason
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # PyTorch's nightly builds bring it under another name
        version = "one of unknown version"
    if not version.startswith(GLUON_VERSION + "."):
        return f"its kernels were tuned and run with Triton {GLUON_VERSION} (they compile with 3.9), found {version}"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "there is no NVIDIA GPU"
    found = [_not_hopper(i) for i in range(torch.cuda.device_count())]
    return None if None in found else found[0]


@while_tracing
def _gpu_lacks(index: int) -> str | None:
    return _not_hopper(index)


@lru_cache(maxsize=64)
def _not_hopper(index: int) -> str | None:
    """Why the kernels do not run on one GPU of the machine, which may have others."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None  # `_no_gluon` says so
    major, minor = torch.cuda.get_device_capability(index)
    return None if (major, minor) == (9, 0) else f"it needs a Hopper GPU (sm_90), cuda:{index} is sm_{major}{minor}"


def _gluon_lacks(problem: Problem) -> str | None:
    """What its copies (TMA) and its tiles cannot do, and what others do better."""
    if problem.device == "cuda" and (reason := _gpu_lacks(problem.index)) is not None:
        return reason
    if min(problem.B, problem.total_q, problem.total_k) == 0:
        return "there are no rows or no keys"
    if max(problem.total_q * problem.H, 2 * problem.total_k) >= 2**31:
        return "rows and keys are too many for 32-bit numbers"
    rows = problem.Sq * problem.G
    packed = max(problem.D, problem.Dv) <= 128 and packs(
        problem.B, problem.H, problem.G, problem.Sq, problem.Sk, MULTIPROCESSORS
    )
    if packed or (rows <= DECODE_ROWS and problem.Sk >= MANY_KEYS * rows):
        return f"{rows} rows share {problem.Sk} keys, which triton divides among programs"
    if problem.D % 8 or problem.Dv % 8:
        return f"head dims {problem.D}, {problem.Dv} are not multiples of 8"
    for term in problem.spec.mask:
        if term.name == "blocks" and term.params[1] % BLOCK_KEYS:
            return f"blocks of {term.params[1]} keys, not a multiple of {BLOCK_KEYS}"
    return None


def _load_gluon() -> Backend:
    from tilewise.backends import gluon, triton  # noqa: PLC0415  only where a GPU call asks for it

    return Composite(gluon.GluonForward(), gluon.GluonBackward(triton.TritonBackend()))


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
        name="gluon",
        title="Hopper GPU (Gluon)",
        device="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        max_head_dim=256,
        features=frozenset(FEATURES) - {"dense", "bias", "dropout"},
        requires=_gluon_requires,
        load=_load_gluon,
        extra=_gluon_lacks,
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
        extra=_triton_lacks,
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
