"""Tensor descriptors: how the copy engine (TMA) of Hopper sees q, k, v and their like."""

from __future__ import annotations

import torch
import triton.experimental.gluon.language as gl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tilewise.backends.device.descriptors import box_view
from tilewise.backends.device.launch import tma
from tilewise.backends.device.lower import as_rows

from .configs import parts


def as_boxes(x: Tensor) -> Tensor:
    """`x` as descriptors and the kernels around them take it: `as_rows`, aligned and without strides of 0."""
    x = as_rows(x)
    if x.stride(-1) == 1 and tma(x) and all(x.stride()):
        return x
    # `contiguous` would leave a dim of one element with whatever stride it has.
    return as_rows(x.clone(memory_format=torch.contiguous_format))


def parted_boxes(x: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of the two parts of a tile that holds all columns: see `configs.parts`."""
    columns, tail = parts(x.shape[-1])
    return boxes(x, rows, columns), boxes(x, rows, tail) if tail else None


def boxes(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of `box_view`."""
    shape, strides, box = box_view(x, rows, columns)
    layout = gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(x.dtype).removeprefix("torch.")))
    return TensorDescriptor(x, shape, strides, box, layout)


def numbers(x: Tensor, box: list[int]) -> TensorDescriptor:
    """The descriptor of numbers of rows: one each, or a line of 16-bit ones that a product reads."""
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    matrix = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x, box, line if len(box) == 1 else matrix)


LINE = 256  # float32 numbers: the longest row of a box


def lines(x: Tensor, size: int) -> TensorDescriptor:
    """The descriptor of pieces of `size` float32 numbers of `x`, one after the other."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(x.view(-1, LINE), [size // LINE, LINE], layout)
