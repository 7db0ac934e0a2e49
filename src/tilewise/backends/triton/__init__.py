"""The portable GPU backend: Triton kernels for every GPU that Triton reaches, every feature."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.base import Grads, Needs, Repeat
from tilewise.backends.device.lower import Lowered, as_rows
from tilewise.backends.device.replay import Replays, replayed_backward, replayed_forward
from tilewise.backends.triton.backward import backward
from tilewise.backends.triton.configs import decodes
from tilewise.backends.triton.decode import decode
from tilewise.backends.triton.forward import forward
from tilewise.spec import BoundSpec


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Lowered) -> tuple[Tensor, Tensor, Tensor]:
    group, dim = q.shape[-2] // k.shape[-2], max(q.shape[-1], v.shape[-1])
    return (decode if decodes(call, group, dim) else forward)(q, k, v, call)


class TritonBackend:
    """Forward and backward on any GPU that Triton reaches; every sum has one owner, so results repeat bit by bit."""

    def __init__(self):
        self._forwards, self._backwards = Replays(), Replays()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return replayed_forward(self._forwards, as_rows, _forward, q, k, v, bound, max_q, max_k)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec) -> Repeat | None:
        return self._forwards.repeated(q, k, v, bound)

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
        return replayed_backward(
            self._backwards, as_rows, backward, do, dlse, q, k, v, o, lse, bound, max_q, max_k, needs
        )
