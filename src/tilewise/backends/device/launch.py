"""Starting kernels: what Triton needs around a launch, and a way past its analysis of arguments that it has seen."""

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .assembler import sound_assembler


class Launcher:
    """Starts one kernel and remembers what Triton compiled for each key.

    Triton looks at every argument of every launch, struct by struct, to find the compiled kernel: most of its time on
    the host. A key that says the same in a few words saves that.
    """

    def __init__(self):
        self._compiled: dict[Hashable, Any] = {}

    def start(self, kernel: Any, key: Hashable, grid: int, args: tuple, options: Mapping[str, int]) -> None:
        """Launch `kernel` over `grid` programs.

        Args:
            kernel: the Triton kernel.
            key: equal only for calls whose args have the same types, Nones, constants, divisibilities and device.
            grid: programs.
            args: all its arguments, constants included.
            options: num_warps and what else the compiler is told.
        """
        compiled = self._compiled.get(key)
        if compiled is None:
            with sound_assembler():
                compiled = kernel[(grid,)](*args, **options)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[key] = compiled
        else:
            run(compiled, grid, args)
        if (starts := getattr(_thread, "starts", None)) is not None:
            starts.append((compiled, grid, args))


def run(compiled: Any, grid: int, args: Sequence) -> None:
    """Start a compiled kernel on the current stream of the current device."""
    driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
    stream = driver.get_current_stream(driver.get_current_device())
    told = compiled.launch_metadata((grid, 1, 1), stream, *args)
    compiled.run(
        grid, 1, 1, stream, compiled.function, compiled.packed_metadata, told, hooks.launch_enter_hook,
        hooks.launch_exit_hook, *args,
    )  # fmt: skip


_thread = threading.local()


@contextmanager
def started() -> Iterator[list[tuple[Any, int, tuple]]]:
    """Within it, this thread's starts are kept in the list: (compiled kernel, programs, args)."""
    before, _thread.starts = getattr(_thread, "starts", None), []
    try:
        yield _thread.starts
    finally:
        _thread.starts = before


def layout_key(*tensors: Tensor | None) -> tuple:
    """What of each tensor decides which compiled kernel takes it, and a little more: shape, strides, dtype, alignment."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device) for x in tensors)


_HERE = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager:
    """Make the device of `x` the current one: kernels start there. Nothing to do where it already is, which is cheaper."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def tma(*tensors: torch.Tensor) -> bool:
    """Whether tiles of all these tensors can be loaded through tensor descriptors: rows aligned to 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and _aligned(x.stride(), x.element_size()) for x in tensors)


@lru_cache(maxsize=4096)
def _aligned(strides: tuple[int, ...], element_size: int) -> bool:
    return all(stride * element_size % 16 == 0 for stride in strides[:-1])
