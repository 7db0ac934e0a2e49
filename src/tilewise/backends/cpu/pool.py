"""Threads for kernels: one parallel region per call, jobs handed out by the kernel's own atomic counter.

Not `prange`: Numba's workqueue layer aborts when two Python threads enter it, its GNU OpenMP layer aborts after fork.
"""

import os
import queue
import threading
from collections.abc import Callable


class Region:
    """One call of a kernel by several threads. Threads may join until the caller closes it."""

    def __init__(self, kernel: Callable[[int], None], address: int):
        self._kernel, self._address = kernel, address
        self._changed = threading.Condition()
        self._running, self._open = 0, True
        self._error: BaseException | None = None

    def join(self) -> None:
        """Work until no job is left. The kernel itself takes the jobs."""
        with self._changed:
            if not self._open:
                return
            self._running += 1
        try:
            self._kernel(self._address)
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more, wait for those inside, raise what any of them raised."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: self._running == 0)
        if self._error is not None:
            raise self._error


class Pool:
    """Daemon threads that join the regions put in one queue; the caller of `run` always takes part."""

    def __init__(self):
        self._regions: queue.SimpleQueue[Region] = queue.SimpleQueue()
        self._growing = threading.Lock()
        self._workers = 0

    def _work(self) -> None:
        while True:
            self._regions.get().join()

    def run(self, kernel: Callable[[int], None], address: int, threads: int) -> None:
        """Call `kernel(address)` on the calling thread and on up to `threads - 1` others at once."""
        with self._growing:
            while self._workers < threads - 1:
                self._workers += 1
                threading.Thread(target=self._work, name=f"tilewise-{self._workers}", daemon=True).start()
        region = Region(kernel, address)
        for _ in range(threads - 1):
            self._regions.put(region)
        try:
            region.join()
        finally:
            region.close()


_pool = Pool()


def _forget_threads() -> None:
    """After fork the child has none of the parent's threads."""
    global _pool
    _pool = Pool()


os.register_at_fork(after_in_child=_forget_threads)


def run(kernel: Callable[[int], None], address: int, threads: int) -> None:
    """Run a kernel that takes its jobs from an atomic counter, on `threads` threads, the caller among them."""
    if threads == 1:
        kernel(address)
    else:
        _pool.run(kernel, address, threads)
