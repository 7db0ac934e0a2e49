"""The Hopper backend: Gluon kernels, in which producer and consumer warps, shared memory and barriers are explicit."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.base import Backward, Grads, Needs
from tilewise.backends.device.launch import on_device
from tilewise.backends.device.lower import lower
from tilewise.backends.device.replay import Replays, call_key
from tilewise.backends.gluon.backward import backward
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


class GluonBackward:
    """The backward pass on Hopper, except for what its kernel lacks: see `elsewhere`."""

    def __init__(self, other: Backward):
        self._other, self._backwards = other, Replays()

    def backward(
        self,
        do: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        bound: BoundSpec,
        max_q: int,
        max_k: int,
        needs: Needs,
    ) -> Grads:
        if elsewhere(bound, needs):
            return self._other.backward(do, dlse, q, k, v, o, lse, bound, max_q, max_k, needs)

        def make() -> Grads:
            x, y, z = map(as_boxes, (q, k, v))
            upstream = None if do is None else as_boxes(do)
            return backward(upstream, dlse, x, y, z, o, lse, lower(x, y, bound, max_q, max_k), needs)

        inputs = tuple(x for x in (q, k, v, o, lse, do, dlse) if x is not None)
        key = call_key(bound, *inputs)
        with on_device(q):
            grads = self._backwards.call(key and (key, needs, do is None), inputs, make)
        return Grads(*grads).shaped_like(bound)


def elsewhere(bound: BoundSpec, needs: Needs) -> bool:
    """Whether other kernels have to compute these gradients: dq adds up in any order here, and slopes have no gradient."""
    return bound.spec.deterministic or needs.dslopes
