"""The portable GPU backend: Triton kernels for every GPU that Triton reaches, every feature."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.base import Grads, Needs
from tilewise.backends.device.launch import on_device
from tilewise.backends.device.lower import lower
from tilewise.backends.device.replay import Replays, call_key
from tilewise.backends.triton.backward import backward
from tilewise.backends.triton.configs import decodes
from tilewise.backends.triton.decode import decode
from tilewise.backends.triton.forward import forward
from tilewise.spec import BoundSpec

FAR = 2**23  # elements between rows from which 256 of them no longer fit in the 32-bit offsets inside a tile


def as_rows(x: Tensor) -> Tensor:
    """`x` as kernels read it, consecutive along its last dim and rows not FAR apart: a copy only where it is not so."""
    x = x.resolve_neg()
    if (x.stride(-1) == 1 or x.size(-1) == 1) and x.stride(-3) < FAR:
        return x
    # Rows of many thousand heads are far apart in a contiguous tensor, too: heads outside rows.
    near = x.shape[-2] * x.shape[-1] < FAR
    return x.contiguous() if near else x.transpose(-3, -2).contiguous().transpose(-3, -2)


class TritonBackend:
    """Forward and backward on any GPU that Triton reaches; every sum has one owner, so results repeat bit by bit."""

    def __init__(self):
        self._forwards, self._backwards = Replays(), Replays()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor, Tensor]:
            x, y, z = map(as_rows, (q, k, v))
            call = lower(x, y, bound, max_q, max_k)
            return (decode if decodes(call, x.shape[-2] // y.shape[-2]) else forward)(x, y, z, call)

        with on_device(q):
            o, lse, max_logit = self._forwards.call(call_key(bound, q, k, v), (q, k, v), make)
        return o, lse, max_logit  # pyright: ignore[reportReturnType]  all three are there

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
        def make() -> Grads:
            x, y, z = map(as_rows, (q, k, v))
            upstream = None if do is None else as_rows(do)
            return backward(upstream, dlse, x, y, z, o, lse, lower(x, y, bound, max_q, max_k), needs)

        inputs = tuple(x for x in (q, k, v, o, lse, do, dlse) if x is not None)
        key = call_key(bound, *inputs)
        with on_device(q):
            grads = self._backwards.call(key and (key, needs, do is None), inputs, make)
        return Grads(*grads).shaped_like(bound)
