"""The lab: the systems of the papers side by side, each a real implementation with one interface, forward and backward.

Example:
    >>> import torch
    >>> from tilewise import Causal, lab
    >>> q = torch.randn(1, 64, 2, 16, requires_grad=True)
    >>> results = {name: lab.find(name)(q, q, q, Causal()) for name in lab.names()}
    >>> all(torch.allclose(o, results["standard"], atol=1e-5) for o in results.values())
    True
"""

from __future__ import annotations

from tilewise.lab.flash1 import Flash1, Flash1Kernels
from tilewise.lab.product import Product
from tilewise.lab.recompute import RecomputeAttention
from tilewise.lab.standard import CheckpointedAttention, StandardAttention
from tilewise.lab.system import INTERVALS, TILED, Explicit, System

__all__ = [
    "SYSTEMS",
    "CheckpointedAttention",
    "Explicit",
    "Flash1",
    "Flash1Kernels",
    "Product",
    "RecomputeAttention",
    "StandardAttention",
    "System",
    "find",
    "names",
]

_PAPER = "FlashAttention (Dao et al. 2022)"


def _portable(device: str) -> tuple[System, ...]:
    """The systems made of PyTorch calls, which run anywhere."""

    def recompute(name: str, title: str, masks: frozenset[str], *tile: int | None) -> RecomputeAttention:
        return RecomputeAttention(name, title, f"{_PAPER}, section 3.1", masks, device, *tile)

    return (
        StandardAttention("standard", "S and P in memory, P kept", f"{_PAPER}, algorithm 0", TILED, device),
        CheckpointedAttention("checkpointed", "standard, run twice", "Chen et al. 2016", TILED, device),
        recompute("recompute", "m and l kept, P again", INTERVALS),
        recompute("recompute-rows", "the same, 512 rows at a time", INTERVALS, 512),
        recompute("recompute-tiles", "the same, tiles of 512 x 512", TILED, 512, 512),
    )


#: Every system on every device; `find` picks one.
SYSTEMS: tuple[System, ...] = (
    *_portable("cpu"),
    Flash1("flash1", "keys outside, rows inside", f"{_PAPER}, algorithms 1 and 4", TILED, "cpu"),
    Product("flash2", "rows outside: tilewise", "FlashAttention-2 (Dao 2023)", TILED, "cpu", "cpu"),
    *_portable("cuda"),
    Flash1Kernels("flash1", "keys outside, rows inside", f"{_PAPER}, algorithms 1 and 4", TILED, "cuda"),
    Product("flash2", "rows outside: tilewise, Triton", "FlashAttention-2 (Dao 2023)", TILED, "cuda", "triton"),
    Product("flash3", "for Hopper: tilewise, Gluon", "FlashAttention-3 (Shah et al. 2024)", INTERVALS, "cuda", "gluon"),
)


def names(device: str = "cpu") -> list[str]:
    """The systems that run on a device."""
    return [system.name for system in SYSTEMS if system.device == device]


def find(name: str, device: str = "cpu") -> System:
    """A system by name.

    Raises:
        ValueError: there is none of this name on this device.
    """
    for system in SYSTEMS:
        if (system.name, system.device) == (name, device):
            return system
    raise ValueError(f"systems on {device} are {', '.join(names(device))}; got {name!r}")
