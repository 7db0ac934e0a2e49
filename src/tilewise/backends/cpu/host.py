"""What this machine has: vector width, AMX; and the hash of this backend's sources."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import llvmlite.binding as llvm
import torch

from . import amx
from .simd import Lanes


@functools.cache
def sources_hash() -> str:
    """A hash of every file the kernels are made of. Numba's disk cache sees only the file of the kernel itself."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(folder.glob("*.py")), folder.parent.parent / "predicates.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def vector_bytes() -> int:
    """Bytes of a vector register: 64 with AVX-512, 32 with AVX2, else 16 (NEON, SSE)."""
    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


@functools.cache
def host_lanes(bits: int) -> Lanes:
    """The lanes of this machine for accumulation in 32 or 64 bits."""
    return Lanes(bits, vector_bytes() * 8 // bits, sources_hash())


@functools.cache
def _default_lanes(dtype: torch.dtype) -> Lanes:
    lanes = host_lanes(64 if dtype == torch.float64 else 32)
    return dataclasses.replace(lanes, products="amx") if dtype == torch.bfloat16 and amx.usable() else lanes


def call_lanes(dtype: torch.dtype, lanes: Lanes | None) -> Lanes:
    """The lanes of a call: those given, or the fastest that this machine has for the dtype."""
    if lanes is None:
        return _default_lanes(dtype)
    if lanes.products == "amx" and not (dtype == torch.bfloat16 and amx.usable()):
        raise ValueError(f"AMX multiplies bfloat16 on processors that have it: not {dtype} here")
    return lanes
