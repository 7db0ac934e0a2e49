"""What a system of the lab is: attention as a function of q, k, v and a mask, and what it keeps for the backward pass.

Every system is called alike, ``o = system(q, k, v, mask)``, and every one is exact. They differ in the order of the work and
in the tensors that live between forward and backward. A system is a row of data (name, source, masks, device) and a method;
where the backward pass is written out (`Explicit`), both passes are methods, and what is kept is what `forward` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.cost import Memory
from tilewise.lab.tiling import BLOCKS, shared_by_all
from tilewise.masks import Mask
from tilewise.problem import Problem


@dataclass(frozen=True)
class System:
    """One way to compute attention.

    Args:
        name: on the command line and in results.
        title: in words.
        source: paper and algorithm.
        masks: kinds of mask (`Mask.name`) that it takes; full attention all take.
        device: where it runs.
    """

    name: str
    title: str
    source: str
    masks: frozenset[str]
    device: str = "cpu"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Attention.

        Args:
            q: (B, Sq, H, D).
            k, v: (B, Sk, H, D), as many heads as q: the papers know no others.
            mask: of the kinds in `masks`, the same for every sequence and head; None sees all.

        Returns:
            o (B, Sq, H, D); a row that sees no key is 0.

        Raises:
            ValueError: with every reason why this system cannot take the call.
        """
        if reasons := self.why_not(q, k, v, mask):
            raise ValueError(f"{self.name}: " + "; ".join(reasons))
        return self.attend(q, k, v, mask)

    def why_not(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Sequence[str]:
        """Every reason against a call; none if it can be taken."""
        found = [] if q.device.type == self.device else [f"runs on {self.device}, not on {q.device.type}"]
        if k.shape != v.shape or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
            found.append(f"q, k, v must agree in all but Sq, got {[tuple(t.shape) for t in (q, k, v)]}")
        found += [f"has no {part.name} mask" for part in parts(mask) if part.name not in self.masks]
        return found + shared_by_all(parts(mask))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """`__call__` without checks."""
        raise NotImplementedError

    def memory(self, problem: Problem) -> Memory:
        """Bytes kept for the backward pass, exactly, and the peak of each pass beyond q, k, v, o and gradients."""
        raise NotImplementedError


class Explicit(System):
    """A system whose backward pass is written out. Tensors come as (B, H, S, D)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """o, and the tensors kept for `backward` beside q, k and v."""
        raise NotImplementedError

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Tensor], mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        o = _WrittenOut.apply(*(t.transpose(1, 2) for t in (q, k, v)), self, mask)
        assert isinstance(o, Tensor)
        return o.transpose(1, 2)


class _WrittenOut(torch.autograd.Function):
    """Where PyTorch calls the two passes: the only autograd code of the lab."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, system: Explicit, mask: Mask | None) -> Tensor:
        o, kept = system.forward(q, k, v, mask)
        ctx.system, ctx.mask = system, mask
        ctx.save_for_backward(q, k, v, *kept)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        return (*ctx.system.backward(grads[0], q, k, v, kept, ctx.mask), None, None)


def parts(mask: Mask | None) -> tuple[Mask, ...]:
    """The masks that a mask joins."""
    return () if mask is None else mask.parts()


#: Kinds of mask: two numbers per row; with tiles that are kept or left out whole.
INTERVALS = frozenset({"causal", "window", "prefix", "chunk", "document"})
TILED = INTERVALS | {BLOCKS}
