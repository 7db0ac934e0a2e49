"""In which order programs take up tiles: see `tiles.work_order`."""

from __future__ import annotations

from functools import lru_cache

import torch

from .lower import Lowered

CACHE_SHARE = 0.64  # of the cache, for streamed rows: 32 MB of an H200's 50


@lru_cache(maxsize=16)
def cache_bytes(device: torch.device) -> int:
    """Bytes of the cache that all programs share."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20


def heads_together(call: Lowered, rows: int, x: torch.Tensor, y: torch.Tensor, sharing: int = 1) -> int:
    """Heads to work on at one time: as many as fit in the cache with what their programs stream, `rows` of `x` and `y`.

    `sharing` heads stream the same rows. Where every tile takes as long as any other, one after the other.
    """
    if not call.bound.interval_masks:
        return 1
    streamed = rows * (x.shape[-1] + y.shape[-1]) * x.element_size()
    fitting = max(1, int(CACHE_SHARE * cache_bytes(call.device)) // max(1, streamed))
    together = (1 << (fitting.bit_length() - 1)) * sharing  # a power of two: the last heads are seldom fewer
    return min(together, call.B * call.H)  # kernels multiply it by the number of tiles, in 32 bits


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """How many programs that fill a multiprocessor run at one time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
