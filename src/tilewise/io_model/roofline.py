"""How long a pass takes at least on a GPU, and what sets that bound: memory, matrix units, exponentials or other arithmetic.

Everything is taken to overlap perfectly, at peak rates: a time no implementation can beat, not a forecast. Which bytes reach
memory depends on the L2 cache: the model counts what crosses into the chip's tiles; what one kernel loads again comes from L2
where the tensors it reads again, of all heads at work at one time, fit there. Then memory sees compulsory bytes only. Where
all tensors of a pass fit, each crosses once, also from one kernel to the next: S and P of small problems.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.io_model.gpus import Gpu
from tilewise.io_model.systems import PassReport
from tilewise.problem import Problem
from tilewise.tiles import cdiv


@dataclass(frozen=True)
class Prediction:
    """One pass on one GPU: least seconds by each resource."""

    seconds_by: dict[str, float]
    bytes: int  # loaded and stored by tiles: L2 to SM
    memory_bytes: int  # what of it reaches memory
    flops: int  # of products

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.seconds_by, key=self.seconds_by.__getitem__)

    @property
    def seconds(self) -> float:
        return self.seconds_by[self.bound]

    @property
    def intensity(self) -> float:
        """FLOPs of products per byte of memory."""
        return self.flops / max(self.memory_bytes, 1)


def predict(found: PassReport, problem: Problem, gpu: Gpu) -> Prediction:
    """The least time of one pass on a GPU."""
    account, again = found.account, read_again(found, problem, gpu)
    memory_bytes = account.compulsory_bytes if again <= gpu.l2 else account.bytes
    if (whole := account.footprint) <= gpu.l2:
        memory_bytes = min(memory_bytes, whole)
    seconds = {
        "memory": memory_bytes / gpu.bandwidth,
        "matrix units": account.matmul / gpu.peak(problem.dtype),
        # An addition or a comparison takes an issue slot that could have held a multiply-add, which counts as two.
        "other arithmetic": (account.other - account.exponentials) / (gpu.vector / 2),
    }
    if gpu.exponentials is not None:
        seconds["exponentials"] = account.exponentials / gpu.exponentials
    return Prediction(seconds, account.bytes, memory_bytes, account.matmul)


def read_again(found: PassReport, problem: Problem, gpu: Gpu) -> int:
    """Bytes of the tensors that one kernel loads or stores more than once, of all heads at work at one time."""
    heads = max(problem.B * problem.H, 1)
    at_work = min(heads, cdiv(gpu.sms, found.programs))
    again = {m.name: m.size * m.itemsize for m in found.account.moved if (m.loads, m.stores) != m.compulsory}
    return sum(again.values()) * at_work // heads
