"""Compile the Triton and Gluon kernels of a call for a GPU that is not there."""

import contextlib
import functools
import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise.backends.base import Needs
from tilewise.backends.device.assembler import sound_assembler
from tilewise.backends.device.lower import lower
from tilewise.backends.triton import configs
from tilewise.dispatch import GLUON_VERSION
from tilewise.spec import BoundSpec
from tilewise.testing import Inputs, bind

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
#: Triton brings two assemblers, and kernels for Hopper are assembled by the newer one.
NEWEST_PTXAS = triton.knobs.nvidia.ptxas_blackwell
#: Whether registers are tuned for this version of Triton; what others make of them is only looked at for being complete.
TUNED = triton.__version__.startswith(GLUON_VERSION + ".")
KERNELS = {
    "backends.triton.forward": ("forward_kernel",),
    "backends.triton.decode": ("decode_kernel", "merge_kernel"),
    "backends.triton.backward": ("statistics_kernel", "dq_kernel", "dkdv_kernel"),
    "backends.triton.bias_gradient": ("dbias_kernel",),
    "backends.gluon.forward_sm90": ("forward_kernel",),
    "lab.flash1_kernels": ("flash1_forward_kernel", "flash1_backward_kernel"),
    "backends.gluon.backward": ("prepare_kernel", "backward_kernel", "finish_kernel", "repair_kernel"),
}


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
        return lambda *args, **options: self._compile(args, grid, options)

    def _compile(self, args, grid, options):
        with sound_assembler():
            self.found.append(self.kernel.warmup(*args, grid=grid, **options))


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[list]:
    """Within it, kernels are compiled and kept in the list, not started."""
    driver, found, kept = triton.runtime.driver, [], []
    try:
        before = driver.active
    except RuntimeError:  # no GPU: no driver
        before = None
    driver.set_active(_Driver(TARGETS[target]))
    for name, kernels in KERNELS.items():
        module = importlib.import_module(f"tilewise.{name}")
        replaced: dict[str, Any] = {kernel: _Recorder(_fresh(getattr(module, kernel)), found) for kernel in kernels}
        for attribute, value in replaced.items():
            kept.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    for name, fact in (("shared_memory", SHARED_BYTES[target]), ("multiprocessors", 132)):
        kept.append((configs, name, getattr(configs, name)))
        setattr(configs, name, lambda _, fact=fact: fact)
    lowering = importlib.import_module("tilewise.backends.device.lower")
    kept.append((lowering, "_has_tanh", lowering._has_tanh))
    lowering._has_tanh = lambda _: target.startswith("sm_")
    lowering._lower_bare.cache_clear()
    configs.forward_config.cache_clear()
    configs.backward_configs.cache_clear()
    configs._decode_tiles.cache_clear()
    configs._decode_parts.cache_clear()
    try:
        yield found
    finally:
        for module, attribute, original in kept:
            setattr(module, attribute, original)
        lowering._lower_bare.cache_clear()
        if before is not None:
            driver.set_active(before)


def _fresh(kernel):
    # Compiled kernels are remembered per device number, and every target here is device 0.
    kernel.device_caches.clear()
    return kernel


def _longest(bound: BoundSpec) -> tuple[int, int]:
    """max_q and max_k, of packed sequences."""
    found = (0 if t is None else max(t.diff().tolist(), default=0) for t in (bound.cu_seqlens_q, bound.cu_seqlens_k))
    return next(found), next(found)


def compile_hopper(inputs: Inputs) -> list:
    """The compiled Gluon kernels of one call's forward pass."""
    forward = importlib.import_module("tilewise.backends.gluon").GluonForward().forward
    bound = bind(inputs)
    with compiling_for("sm_90") as found:
        forward(inputs.q, inputs.k, inputs.v, bound, *_longest(bound))
    return found


def compile_hopper_backward(inputs: Inputs) -> list:
    """The same of its backward pass."""
    backward = importlib.import_module("tilewise.backends.gluon.backward").backward
    bound, q = bind(inputs), inputs.q
    call = lower(q, inputs.k, bound, *_longest(bound))
    o = torch.empty(*q.shape[:-1], inputs.v.shape[-1], dtype=q.dtype)
    lse = torch.empty(call.lse_shape)
    needs = Needs(True, True, True, False, False, bound.sinks is not None)
    with compiling_for("sm_90") as found:
        backward(torch.empty_like(o), None, q, inputs.k, inputs.v, o, lse, call, needs)
    return found


def compile_call(inputs: Inputs, target: str) -> list:
    """The compiled Triton kernels of one call's forward and backward pass, every gradient asked for."""
    forward, backward = (
        importlib.import_module(f"tilewise.backends.triton.{name}") for name in ("forward", "backward")
    )
    bound = bind(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    call = lower(q, k, bound, *_longest(bound))
    needs = Needs(True, True, True, bound.bias is not None, bound.alibi_slopes is not None, bound.sinks is not None)
    with compiling_for(target) as found:
        o, lse, _ = forward.forward(q, k, v, call)
        backward.backward(torch.empty_like(o), None, q, k, v, o, lse, call, needs)
    return found


def compile_decode(inputs: Inputs, target: str) -> list:
    """The compiled Triton kernels of one call with few rows over many keys: of the parts, and what merges them."""
    decode = importlib.import_module("tilewise.backends.triton.decode").decode
    bound = bind(inputs)
    with compiling_for(target) as found:
        decode(inputs.q, inputs.k, inputs.v, lower(inputs.q, inputs.k, bound, *_longest(bound)))
    return found


@functools.lru_cache(maxsize=2)
def _assembled(kernel) -> tuple[str, str]:
    """What ptxas says about a kernel, and its disassembly."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.asm["ptx"])
        command = [NEWEST_PTXAS.path, "-v", "--gpu-name=sm_90a", source, "-o", target]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        sass = subprocess.run([tools / "nvdisasm", "-c", target], check=True, capture_output=True, text=True).stdout
    return told, sass


def sass_of(kernel) -> str:
    """The machine code of a kernel compiled for sm_90."""
    return _assembled(kernel)[1]


def spilled_bytes(kernel) -> int:
    """Bytes of spill stores of a kernel compiled for sm_90."""
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", _assembled(kernel)[0])))


def serialized(kernel) -> list[str]:
    """Where ptxas gave up on overlapping the products of a kernel with other work (its notes C7510 and up)."""
    return re.findall(r".*\(C75\d\d\).*", _assembled(kernel)[0])


def longest_chain(instructions: list[str], operation: str) -> int:
    """The most instructions of one kind of which each needs the result of another."""
    length = {}  # of the chain that ends in a register
    longest = 0
    for instruction in instructions:
        if found := re.match(r"(?:@\S+ )?(\S+) +(R\d+),(.*)", instruction):
            name, target, sources = found.groups()
            before = max((length.get(source, 0) for source in re.findall(r"R\d+", sources)), default=0)
            length[target] = before + 1 if name.startswith(operation) else 0
            longest = max(longest, length[target])
    return longest


def product_loops(kernel) -> list[list[str]]:
    """The instructions of every innermost loop with matrix products.

    Loops end in a jump on a condition; jumps without one return from the waiting that is moved out of the way.
    """
    instructions, labels, jumps = [], {}, []
    for line in sass_of(kernel).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            if jump := re.match(r"@.*BRA.*`\((\.L_x_\d+)\)", instruction[1]):
                jumps.append((len(instructions) - 1, jump[1]))
    loops = [(labels[label], end) for end, label in jumps if labels.get(label, end + 1) <= end]
    loops = [(a, b) for a, b in loops if any("HGMMA" in x for x in instructions[a : b + 1])]
    innermost = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [instructions[a : b + 1] for a, b in innermost]
