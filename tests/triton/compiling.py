"""Compile the Triton kernels of a call for a GPU that is not there."""

import contextlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise.backends.base import Needs
from tilewise.backends.device.lower import lower
from tilewise.testing import Inputs, bind

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
KERNELS = {"forward": ("forward_kernel",), "backward": ("delta_kernel", "dq_kernel", "dkdv_kernel", "dbias_kernel")}


@dataclass
class _Driver:
    """As much of a Triton driver as compiling asks for."""

    target: GPUTarget

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, _type):
        return "int32_t"

    def is_active(self):
        return True


@dataclass
class _Recorder:
    kernel: Any
    found: list

    def __getitem__(self, grid):
        return lambda *args, **options: self.found.append(self.kernel.warmup(*args, grid=grid, **options))


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[list]:
    """Within it, kernels of the Triton backend are compiled and kept in the list, not started."""
    driver, found, kept = triton.runtime.driver, [], []
    try:
        before = driver.active
    except RuntimeError:  # no GPU: no driver
        before = None
    driver.set_active(_Driver(TARGETS[target]))
    for name, kernels in KERNELS.items():
        module = importlib.import_module(f"tilewise.backends.triton.{name}")
        for kernel in kernels:
            original = getattr(module, kernel)
            kept.append((module, kernel, original))
            setattr(module, kernel, _Recorder(_fresh(original), found))
    try:
        yield found
    finally:
        for module, kernel, original in kept:
            setattr(module, kernel, original)
        if before is not None:
            driver.set_active(before)


def _fresh(kernel):
    # Compiled kernels are remembered per device number, and every target here is device 0.
    kernel.device_caches.clear()
    return kernel


def compile_call(inputs: Inputs, target: str) -> list:
    """The compiled kernels of one call's forward and backward pass, every gradient asked for."""
    forward, backward = (importlib.import_module(f"tilewise.backends.triton.{name}") for name in KERNELS)
    bound = bind(inputs)
    longest = (0, 0)
    if inputs.varlen:
        longest = tuple(max(t.diff().tolist(), default=0) for t in (bound.cu_seqlens_q, bound.cu_seqlens_k))
    q, k, v = inputs.q, inputs.k, inputs.v
    call = lower(q, k, bound, *longest)
    needs = Needs(True, True, True, bound.bias is not None, bound.alibi_slopes is not None, bound.sinks is not None)
    with compiling_for(target) as found:
        o, lse, _ = forward.forward(q, k, v, call)
        backward.backward(torch.empty_like(o), None, q, k, v, o, lse, call, needs)
    return found


def spilled_bytes(kernel) -> int:
    """Bytes of spill stores that ptxas reports for a compiled kernel."""
    text = kernel.asm["ptx"]
    assert text
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))
