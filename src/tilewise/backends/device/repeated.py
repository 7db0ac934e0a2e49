"""Starts of kernels made again, past what Triton does in Python at each of them.

Triton's launcher for NVIDIA GPUs is a function in C below a layer of Python, which encodes every tensor descriptor and gets
ready for hooks at each start: half the host's time of a small call. Here arguments are laid out once, as that function
takes them, and descriptors are encoded once for each address.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton  # pyright: ignore[reportMissingImports]

from .launch import run

STREAM, HOOKS = 3, slice(10, 13)  # places among the arguments of Triton's launcher
MOST_MAPS = 256


class Repeated:
    """One start of a kernel, to be made again with other addresses.

    Args:
        compiled, grid: as for `run`.
        args: arguments, tensor descriptors with any tensor.
    """

    def __init__(self, compiled: Any, grid: int, args: Sequence):
        self._compiled, self._grid = compiled, grid
        self._launch, self._knobs = _below(compiled), triton.knobs.runtime
        #: Of each argument: where it stands in `args`, and its `Maps` if it is a descriptor of which those are made.
        self.places: list[tuple[int, Maps | None]] = []
        self.args: list = []
        if self._launch is None:
            self.args, self.places = list(args), [(i, None) for i in range(len(args))]
            return
        launcher, driver = compiled.run, triton.runtime.driver.active
        self._stream, self._device = driver.get_current_stream, driver.get_current_device()
        self.args = [
            grid, 1, 1, None, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for arg in args:
            maps = Maps(arg, next(described)) if hasattr(arg, "block_shape") else None
            self.places.append((len(self.args), maps))
            self.args += [arg] if maps is None else [None, *arg.shape, *arg.strides]

    def start(self, args: list) -> None:
        """Start the kernel on the current stream with `args`, a copy of those here with addresses filled in."""
        if self._launch is None:
            run(self._compiled, self._grid, args)
            return
        enter, leave = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        args[STREAM] = stream = self._stream(self._device)
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a chain of hooks may be empty
            args[HOOKS] = self._compiled.launch_metadata((self._grid, 1, 1), stream), enter, leave
        self._launch(*args)


def _below(compiled: Any) -> Callable | None:
    """The C function below Triton's launcher, where it is the one known here and has no memory to provide."""
    try:
        from triton.backends.nvidia.driver import (  # noqa: PLC0415  absent from builds for other GPUs  # pyright: ignore
            CudaLauncher,
        )
    except ImportError:
        return None
    launcher = compiled.run
    if not triton.__version__.startswith("3.6.") or type(launcher) is not CudaLauncher:
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch = launcher.launch  # of kernels that take descriptors a function around the one in C
    return inspect.getclosurevars(launch).nonlocals["launcher"] if inspect.isfunction(launch) else launch


class Maps:
    """What a tensor descriptor becomes for the copy engine, at each address where its tensor has been."""

    def __init__(self, descriptor: Any, metadata: Any):
        self._descriptor, self._metadata = copy.copy(descriptor), metadata
        self._descriptor.base = None
        self.known: dict[int, Any] = {}  # by address: training loops come back to the same few

    def encode(self, address: int) -> Any:
        """For a tensor at an address that is not known yet."""
        from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415  # pyright: ignore  see `_below`

        described = copy.copy(self._descriptor)
        described.base = _Address(address)
        if len(self.known) >= MOST_MAPS:
            self.known.clear()
        found = self.known[address] = make_tensordesc_arg(described, self._metadata)[0]
        return found


class _Address(int):
    """An address that stands for its tensor."""

    def data_ptr(self) -> int:
        return int(self)
