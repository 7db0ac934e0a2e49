"""The Hopper backend: Gluon kernels, in which producer and consumer warps, shared memory and barriers are explicit."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.device.launch import on_device
from tilewise.backends.device.lower import lower
from tilewise.backends.gluon.descriptors import as_boxes
from tilewise.backends.gluon.forward_sm90 import forward
from tilewise.spec import BoundSpec


class GluonForward:
    """The forward pass on Hopper."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(as_boxes, (q, k, v))
        with on_device(q):
            return forward(q, k, v, lower(q, k, bound, max_q, max_k))
