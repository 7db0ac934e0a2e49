"""The Hopper backend: Gluon kernels, in which producer and consumer warps, shared memory and barriers are explicit."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.base import Backward, Grads, Needs, Repeat
from tilewise.backends.device.lower import is_ordered
from tilewise.backends.device.replay import Replays, replayed_backward, replayed_forward
from tilewise.backends.gluon.backward import backward
from tilewise.backends.gluon.descriptors import as_boxes
from tilewise.backends.gluon.forward_sm90 import forward
from tilewise.masks import Blocks
from tilewise.spec import BoundSpec

BLOCK = 64  # rows, and keys: of what lies in one block of block-sparse attention


class GluonForward:
    """The forward pass on Hopper."""

    def __init__(self):
        self._forwards = Replays()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return replayed_forward(self._forwards, as_boxes, forward, q, k, v, bound, max_q, max_k)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec) -> Repeat | None:
        return self._forwards.repeated(q, k, v, bound)


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
        return replayed_backward(
            self._backwards, as_boxes, backward, do, dlse, q, k, v, o, lse, bound, max_q, max_k, needs
        )


def elsewhere(bound: BoundSpec, needs: Needs) -> bool:
    """Whether other kernels have to compute these gradients.

    Here dq adds up in any order, slopes have no gradient, rows that see a key are an interval, and a tile of rows lies in
    one block.
    """
    blocks = any(isinstance(mask, Blocks) and mask.block_m % BLOCK for mask in bound.tile_masks)
    return bound.spec.deterministic or needs.dslopes or blocks or not is_ordered(bound)
