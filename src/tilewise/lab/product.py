"""FlashAttention-2 and -3 are what the product is: its backends, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewise.api import attention
from tilewise.cost import Memory, memory, workers_of
from tilewise.lab.system import System
from tilewise.masks import Mask
from tilewise.problem import Problem
from tilewise.testing import Inputs, why_not


@dataclass(frozen=True)
class Product(System):
    """Keeps q, k, v, o and lse: 4 N D + N numbers for every head.

    Rows outside, so that row tiles run in parallel as well, keys inside, O unnormalised on chip until the end, and
    ``lse = m + log l`` instead of both (FlashAttention-2, Dao 2023, section 3.1).

    Args:
        backend: the name of a backend.
    """

    backend: str = "cpu"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Sequence[str]:
        own = super().why_not(q, k, v, mask)
        return own or why_not(Inputs(q, k, v, {} if mask is None else {"mask": mask}), self.backend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        return attention(q, k, v, mask=mask, backend=self.backend)

    def memory(self, problem: Problem) -> Memory:
        return memory(problem, 0, workers_of(problem))
