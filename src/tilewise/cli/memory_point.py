"""One measured point of `tilewise memory`: a training step, on a CPU in a process of its own (`python -m
tilewise.cli.memory_point`), because the peak of a process never falls and freed memory of one point would serve the next.

On a GPU PyTorch's allocator counts what it hands out, exactly: there all points share the command's process.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import lab
from tilewise.cli.output import dtype_of
from tilewise.training.memory import SavedForBackward

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(
    who: str, B: int, H: int, N: int, D: int, dtype: str, causal: bool, threads: int, device: str = "cpu"
) -> dict[str, int]:
    """Bytes of one training step: saved for backward, the peak above inputs, outputs and gradients, and with these in all.

    `who` is "tilewise" or a system of the lab.
    """
    torch.set_num_threads(threads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if who == "tilewise":
            return tilewise.attention(q, k, v, causal=causal)
        return lab.find(who, device)(q, k, v, tilewise.Causal() if causal else None)

    def inputs(n: int) -> list[Tensor]:
        drawn = [torch.randn(B, n, H, D, dtype=dtype_of(dtype), device=device) for _ in range(4)]
        return [t.requires_grad_() for t in drawn[:3]] + drawn[3:]

    *leaves, do = inputs(64)  # compile, start threads, fill caches
    torch.autograd.grad(attend(*leaves), leaves, do)
    *leaves, do = inputs(N)
    base = _reset_peak(device)
    with SavedForBackward() as saved:
        o = attend(*leaves)
    gradients = torch.autograd.grad(o, leaves, do)
    given, made = (sum(t.numel() * t.element_size() for t in some) for some in ((*leaves, do), (o, *gradients)))
    peak = max(_peak(device) - base - made, 0)
    return {"saved": saved.bytes, "peak": peak, "in_all": given + made + peak}


def _reset_peak(device: str) -> int:
    """Bytes in use now; the peak counts from here where the system can reset it (GPUs, Linux)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if _CLEAR.exists():
        _CLEAR.write_text("5")
        return _status("VmRSS")
    return _peak(device)


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if _STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    point: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(measure(**point)))
