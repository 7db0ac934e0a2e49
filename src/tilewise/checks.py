"""Coercions of what users pass, and how error messages show it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor


def describe(value: Any) -> str:
    """How error messages show a value: shape and dtype of a tensor, else its repr."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return repr(value)


def as_int(value: Any, what: str) -> int:
    """An int from an int, numpy int or 0-dim integer tensor; anything else is a TypeError."""
    if isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if isinstance(value, torch.SymInt):
        return value  # pyright: ignore[reportReturnType]
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {describe(value)}") from None


def positive_int(value: Any, what: str) -> int:
    value = as_int(value, what)
    if value <= 0:
        raise ValueError(f"{what} must be > 0, got {value}")
    return value
