"""What a backend is, and the capability table: one frozen row of data per backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.problem import Problem
from tilewise.spec import BoundSpec

#: Every feature a call can use, with the words in which tables show it.
FEATURES = {
    "causal": "causal mask",
    "window": "sliding window",
    "prefix": "prefix-LM mask",
    "document": "document mask",
    "chunk": "chunked-local mask",
    "blocks": "block-sparse tile lists",
    "dense": "dense boolean mask",
    "top_left": "top-left alignment",
    "varlen": "packed sequences (cu_seqlens)",
    "seqused": "seqused",
    "gqa": "GQA / MQA",
    "d_ne_dv": "Dv != D",
    "softcap": "softcap",
    "alibi": "ALiBi, slopes trainable",
    "bias": "bias with gradient",
    "sinks": "attention sinks with gradient",
    "dropout": "dropout",
    "deterministic": "deterministic backward",
}


class Needs(NamedTuple):
    """Which gradients a backward call must return."""

    dq: bool
    dk: bool
    dv: bool
    dbias: bool
    dslopes: bool
    dsinks: bool


class Grads(NamedTuple):
    """Gradients of one call; None where not needed."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dslopes: Tensor | None = None
    dsinks: Tensor | None = None

    def shaped_like(self, bound: BoundSpec) -> Grads:
        """With dbias, dslopes and dsinks in the shapes and dtypes of what the caller gave: summed over broadcast dims."""
        return self._replace(
            dbias=_like(self.dbias, bound.bias),
            dslopes=_like(self.dslopes, bound.alibi_slopes),
            dsinks=_like(self.dsinks, bound.sinks),
        )


def _like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if grad is None or tensor is None else grad.sum_to_size(tensor.shape).to(tensor.dtype)


#: A forward pass made again: from [q, k, v] of the layouts of the first and their addresses to o, lse and max_logit.
Repeat = Callable[[list[Tensor], list[int]], tuple[Tensor, Tensor, Tensor]]


class Forward(Protocol):
    """The forward pass for one family of hardware. Shapes as in `tilewise.attention`, layout (B, S, H, D) or packed.

    It may also have ``repeated(q, k, v, bound) -> Repeat | None``: how to make a call without other tensors again, given
    tensors of the same layouts, aligned to 16 bytes, on the current device.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return o, lse and max_logit: (H,), or (0,) where the spec does not ask for it."""
        ...


class Backward(Protocol):
    """The backward pass. It recomputes p from q, k and lse: whose forward pass these came from does not matter."""

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
    ) -> Grads: ...


class Backend(Forward, Backward, Protocol):
    """Both passes."""


class Composite:
    """A backend whose two passes come from different families of kernels."""

    def __init__(self, forward: Forward, backward: Backward):
        self.forward = forward.forward
        self.backward = backward.backward
        self.repeated = getattr(forward, "repeated", None)


@dataclass(frozen=True)
class Capabilities:
    """What one backend can do. Dispatch, error texts, test skips, `tilewise caps` and the docs all read this."""

    name: str
    title: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    features: frozenset[str]
    requires: Callable[[], str | None]  # why the backend cannot run on this machine, or None
    load: Callable[[], Backend]
    extra: Callable[[Problem], str | None] | None = None

    def __post_init__(self):
        if unknown := self.features - FEATURES.keys():
            raise ValueError(f"unknown features {sorted(unknown)}; known are {sorted(FEATURES)}")

    def why_not(self, problem: Problem) -> Sequence[str]:
        """Every reason why this backend cannot take the call; empty when it can."""
        reasons = []
        if problem.device != self.device:
            reasons.append(f"the tensors are on {problem.device}, this backend runs on {self.device}")
        if problem.dtype not in self.dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            reasons.append(f"dtype {str(problem.dtype).removeprefix('torch.')} is not among {names}")
        if max(problem.D, problem.Dv) > self.max_head_dim:
            reasons.append(f"head dims {problem.D}, {problem.Dv} exceed {self.max_head_dim}")
        reasons += [f"no {FEATURES[f]}" for f in problem.features if f not in self.features]
        for reason in (self.requires(), self.extra(problem) if self.extra else None):
            if reason is not None:
                reasons.append(reason)
        return reasons
