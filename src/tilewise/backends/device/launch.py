"""Starting kernels: what Triton needs around a launch, and a way past its analysis of arguments that it has seen."""

import threading
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .assembler import sound_assembler

MOST = 1024  # of anything that is remembered


class Launcher:
    """Starts one kernel and remembers what Triton compiled for each key.

    Triton looks at every argument of every launch, struct by struct, to find the compiled kernel: most of its time on
    the host. A key that says the same in a few words saves that. Where the key is new, as it is for each new length,
    `arguments_key` finds what serves it, too.
    """

    def __init__(self):
        self._compiled: dict[Hashable, Any] = {}
        self._alike: dict[Hashable, Any] = {}

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
            compiled = self._start_new(kernel, key, grid, args, options)
        else:
            run(compiled, grid, args)
        if (starts := getattr(_thread, "starts", None)) is not None:
            starts.append((compiled, grid, args))

    def _start_new(self, kernel, key, grid, args, options) -> Any:
        # A kernel that does not tell its constants, as those of other versions of Triton may not, is known by its key alone.
        constants = getattr(kernel, "constexprs", None)
        alike = None if constants is None else arguments_key(args, constants, options)
        compiled = None if alike is None else self._alike.get(alike)
        if compiled is None:
            with sound_assembler():
                compiled = kernel[(grid,)](*args, **options)
        else:
            run(compiled, grid, args)
        if compiled is not None:  # the interpreter compiles nothing
            for known, name in ((self._compiled, key), (self._alike, alike)):
                if name is not None:
                    make_room(known)
                    known[name] = compiled
        return compiled


def make_room(known: dict | set) -> None:
    """Forget all where there is no room for one more."""
    if len(known) >= MOST:
        known.clear()


def arguments_key(args: tuple, constants: Container[int], options: Mapping[str, int]) -> tuple:
    """Equal only for arguments for which Triton makes the same code, those at the places `constants` being constants."""
    return (*[arg if i in constants else _kind(arg) for i, arg in enumerate(args)], *options.items())


def _kind(arg: Any) -> Any:
    """What of an argument is in the code; at least that."""
    if arg is None:
        return None
    kind = type(arg)
    if kind is int:
        return "1" if arg == 1 else (arg % 16 == 0, arg.bit_length() // 32)
    if kind is float:
        return kind
    if isinstance(arg, tuple):
        return kind, *[None if x is None else _kind(x) for x in arg]
    if isinstance(arg, Tensor):  # AMD: offsets of 32 bits where all of the memory is within their reach
        return arg.dtype, arg.device, arg.data_ptr() % 16, arg.untyped_storage().size() < 2**31
    if hasattr(arg, "block_shape"):  # a tensor descriptor
        return arg.base.dtype, arg.base.device, tuple(arg.block_shape), arg.padding, getattr(arg, "layout", None)
    return kind, arg


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
