"""Memory of a training step, measured: bytes kept for the backward pass, and the peak.

`SavedForBackward` counts what autograd holds between forward and backward, exactly, on any device. `PeakMemory` measures the
most memory that was in use at once: on a GPU what PyTorch's allocator handed out; on a CPU the resident memory of the whole
process, which includes Python, PyTorch and compiled kernels, so give each variant a process of its own and compare the growth.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_SAMPLE_SECONDS = 0.001
_STATM = Path("/proc/self/statm")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class SavedForBackward:
    """Bytes that autograd saves while this context is open, each storage counted once.

    Args:
        exclude: tensors that exist anyway and so do not count, such as the model's parameters.

    Example:
        >>> import torch, tilewise
        >>> q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
        >>> with SavedForBackward() as saved:
        ...     o = tilewise.attention(q, k, v, causal=True)
        >>> saved.bytes == 4 * q.nbytes + 64 * 2 * 4  # q, k, v, o and one fp32 logsumexp per row and head
        True
    """

    def __init__(self, exclude: Iterable[Tensor] = ()):
        self._storages: dict[int, int] = {}
        self._exclude = {t.untyped_storage().data_ptr() for t in exclude}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._exclude:
            # A view keeps its whole storage alive, so that is what counts.
            self._storages[storage.data_ptr()] = storage.nbytes()
        return t


class PeakMemory:
    """Peak memory while this context is open, in bytes; `before` is what was in use when it opened.

    `method` says how it was measured: "torch.cuda.max_memory_allocated"; "VmHWM", the kernel's own high-water mark of
    resident memory, reset at the start (exact; Linux); "sampled RSS", a thread that reads it every millisecond (Linux
    where the mark cannot be reset; may miss short peaks); "ru_maxrss", the highest since the process began (elsewhere).
    """

    def __init__(self, device: str = "cpu"):
        self.device = device
        self.before = self.peak = 0
        self.method = _method(device)

    @property
    def growth(self) -> int:
        return self.peak - self.before

    def __enter__(self) -> PeakMemory:
        release_memory()
        self.before = used_memory(self.device)
        if self.method == "torch.cuda.max_memory_allocated":
            torch.cuda.reset_peak_memory_stats()
        elif self.method == "VmHWM":
            _CLEAR_REFS.write_text("5")
        elif self.method == "sampled RSS":
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.method == "torch.cuda.max_memory_allocated":
            self.peak = torch.cuda.max_memory_allocated()
        elif self.method == "VmHWM":
            self.peak = _status_bytes("VmHWM")
        elif self.method == "sampled RSS":
            self._stop.set()
            self._sampler.join()
        else:
            self.peak = _highest_rss()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, used_memory("cpu"))


def used_memory(device: str = "cpu") -> int:
    """Bytes in use now: allocated by PyTorch on a GPU, resident memory of the process on a CPU."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _highest_rss()


def release_memory() -> None:
    """Give freed memory back to the system, so that what is resident is what is used."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def _method(device: str) -> str:
    if device == "cuda":
        return "torch.cuda.max_memory_allocated"
    if not _STATM.exists():
        return "ru_maxrss"
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return "sampled RSS"
    return "VmHWM"


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _highest_rss() -> int:
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def _unpack(t: Tensor) -> Tensor:
    return t
