"""Tensor descriptors: how the copy engine (TMA) of Hopper sees q, k, v and their like."""

from __future__ import annotations

import triton.experimental.gluon.language as gl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tilewise.backends.device.descriptors import box_view
from tilewise.backends.device.launch import tma


def as_boxes(x: Tensor) -> Tensor:
    """`x` as descriptors take it, aligned and without strides of 0: a copy only where it is not so."""
    x = x.resolve_neg()
    fits = x.stride(-1) == 1 and tma(x) and all(x.stride())
    return x if fits else x.contiguous()


def boxes(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of `box_view`."""
    shape, strides, box = box_view(x, rows, columns)
    layout = gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(x.dtype).removeprefix("torch.")))
    return TensorDescriptor(x, shape, strides, box, layout)
