"""The Hopper backend: Gluon kernels, in which producer and consumer warps, shared memory and barriers are explicit."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.device.launch import on_device
from tilewise.backends.device.lower import lower
from tilewise.backends.device.replay import Replays, call_key
from tilewise.backends.gluon.descriptors import as_boxes
from tilewise.backends.gluon.forward_sm90 import forward
from tilewise.spec import BoundSpec


class GluonForward:
    """The forward pass on Hopper."""

    def __init__(self):
        self._forwards = Replays()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor, Tensor]:
            x, y, z = map(as_boxes, (q, k, v))
            return forward(x, y, z, lower(x, y, bound, max_q, max_k))

        with on_device(q):
            o, lse, max_logit = self._forwards.call(call_key(bound, q, k, v), (q, k, v), make)
        return o, lse, max_logit  # pyright: ignore[reportReturnType]  all three are there
