"""The formulas of `predicates` and `tiles` as Triton device functions: the same source, compiled for the GPU.

A device function finds the names it calls among its module's globals, which there are plain Python functions. Each
formula gets a copy of itself whose globals hold the compiled ones. Module, name and source stay, so that caches and
tracebacks point to the formula itself.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from tilewise import predicates, tiles

_namespace: dict[str, Any] = {}


def _portable(function: Callable) -> Any:
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__, _namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    _namespace[function.__name__] = compiled = triton.jit(copy)
    return compiled


_namespace["tl"] = tl  # the interpreter wants to see it
_namespace["LOW32"] = tl.constexpr(predicates.LOW32)
_namespace["BEFORE_ALL_ROWS"] = tl.constexpr(predicates.BEFORE_ALL_ROWS)
_namespace["TileRange"] = tiles.TileRange

window_low = _portable(predicates.window_low)
window_high = _portable(predicates.window_high)
prefix_high = _portable(predicates.prefix_high)
window_first_row = _portable(predicates.window_first_row)
window_end_row = _portable(predicates.window_end_row)
prefix_first_row = _portable(predicates.prefix_first_row)
chunk_interval = _portable(predicates.chunk_interval)
keep_interval = _portable(predicates.keep_interval)
mix32 = _portable(predicates._mix32)
absorb = _portable(predicates._absorb)
dropout_row_keys = _portable(predicates.dropout_row_keys)
dropout_bits = _portable(predicates.dropout_bits)
cdiv = _portable(tiles.cdiv)
kv_tile_range = _portable(tiles.kv_tile_range)
work_order = _portable(tiles.work_order)
