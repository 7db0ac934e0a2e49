"""Tensor descriptors: how the copy engine (TMA) of Hopper sees q, k, v and their like.

The host makes them: a kernel that makes its own waits microseconds for each.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from .launch import tma

RAGGED = tl.constexpr(2**30)  # see `tma_start`
SPAN = 2**34  # bytes: 2^30 of them are a multiple of 2^64, where addresses begin again
LONGEST = 2**31 - 1


def box_view(x: Tensor, rows: int, columns: int) -> tuple[list[int], list[int], list[int]]:
    """(shape, strides, box) of a descriptor of boxes of `rows` rows and all columns of one head: see `tma_start`.

    Args:
        x: (B, S, H, D), or packed (total, H, D).
        rows: of a box.
        columns: of a box, at least D; those beyond D are read as 0 and not written.
    """
    *batch, row, _, _ = x.stride()
    shape, strides, box = list(x.shape), list(x.stride()), [rows, 1, columns]
    if batch:
        return shape, strides, [1, *box]
    ragged = [SPAN // x.element_size() - row, row]
    return [LONGEST, LONGEST, RAGGED.value, *shape[1:]], ragged + strides, [1, 1, *box]


@triton.jit
def tma_start(desc, b, h, start, length, row, column=0):
    """Where the box of the rows from `row` on lies, of a sequence at `start`, in a descriptor of `box_view`.

    Copies must stop at the end of the sequence. Dense tensors (batch, rows, heads, columns) say so themselves. A packed
    one has its rows three times: with strides of minus one row, one row and one row, up to a multiple of 2^64. The
    last of these dims ends at RAGGED: counted from there backwards by `length`, rows beyond the sequence lie outside.
    """
    if len(desc.block_type.shape) == 4:
        return b, row, h, column
    else:
        return RAGGED, start + length, RAGGED - length + row, h, column


def boxable(*tensors: Tensor) -> bool:
    """Whether descriptors can say where the rows of all these tensors lie, and the GPU has an engine that reads them."""
    return all(x.numel() > 0 and all(x.stride()) for x in tensors) and tma(*tensors) and _has_engine(tensors[0].device)


@lru_cache(maxsize=16)
def _has_engine(device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # Triton's interpreter
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def boxes(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of `box_view`."""
    return TensorDescriptor(x, *box_view(x, rows, columns))
