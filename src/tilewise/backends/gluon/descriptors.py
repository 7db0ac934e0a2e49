"""Tensor descriptors: how the copy engine (TMA) of Hopper sees q, k, v and their like."""

from __future__ import annotations

import triton.experimental.gluon.language as gl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tilewise.backends.device.launch import tma

from .pipeline import RAGGED

SPAN = 2**34  # bytes: 2^30 of them are a multiple of 2^64, where addresses begin again
LONGEST = 2**31 - 1


def as_boxes(x: Tensor) -> Tensor:
    """`x` as descriptors take it, aligned and without strides of 0: a copy only where it is not so."""
    x = x.resolve_neg()
    fits = x.stride(-1) == 1 and tma(x) and all(x.stride())
    return x if fits else x.contiguous()


def boxes(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Boxes of `rows` rows and all columns (up to `columns`) of one head: see `pipeline.tma_start`.

    Args:
        x: (B, S, H, D), or packed (total, H, D).
        rows: of a box.
        columns: of a box, at least D; those beyond D are read as 0 and not written.
    """
    *batch, row, _, _ = x.stride()
    shape, strides, box = list(x.shape), list(x.stride()), [rows, 1, columns]
    if batch:
        box = [1, *box]
    else:
        shape = [LONGEST, LONGEST, RAGGED.value, *shape[1:]]
        strides = [SPAN // x.element_size() - row, row, *strides]
        box = [1, 1, *box]
    layout = gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(x.dtype).removeprefix("torch.")))
    return TensorDescriptor(x, shape, strides, box, layout)
