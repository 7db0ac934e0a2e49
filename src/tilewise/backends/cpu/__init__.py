"""The CPU backend: Numba kernels whose inner loops are LLVM vector code. See `plan` for what a call becomes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tilewise.backends.base import Grads, Needs
from tilewise.backends.cpu.backward import backward
from tilewise.backends.cpu.forward import forward
from tilewise.backends.cpu.lower import lower
from tilewise.spec import BoundSpec


class CpuBackend:
    """Forward and backward on the host's vector units; deterministic for a given number of threads."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(q, k, v, lower(q, k, bound, max_q, max_k))

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
        if needs.dbias and bound.bias is not None:
            bound = replace(bound, bias=_own_memory(bound.bias))
        grads = backward(do, dlse, q, k, v, o, lse, lower(q, k, bound, max_q, max_k), needs)
        return grads.shaped_like(bound)


def _own_memory(bias: Tensor) -> Tensor:
    """The bias with memory of its own for every element: kernels sum the gradients of elements that share memory."""
    shared = any(stride == 0 and size > 1 for stride, size in zip(bias.stride(), bias.shape, strict=True))
    return bias.contiguous() if shared else bias
