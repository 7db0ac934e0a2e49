"""The problems that `tilewise bench` runs: their shapes, their tensors, and whether a result may be shown at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import testing
from tilewise.cli.output import short

_FORMAT = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)(:causal)?")


@dataclass(frozen=True)
class Shape:
    """One problem: self-attention of `S` tokens."""

    B: int
    H: int
    Hkv: int
    S: int
    D: int
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.H}" if self.H == self.Hkv else f"{self.H}/{self.Hkv}"
        return f"{self.B}x{heads}x{self.S}x{self.D}" + (":causal" if self.causal else "")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape from ``BxHxSxD``, ``BxH/HkvxSxD``, with ``:causal`` behind it or not."""
        found = _FORMAT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"a shape is BxHxSxD or BxH/HkvxSxD, and may end in :causal; got {text!r}")
        B, H, Hkv, S, D = (int(found[i] or found[2]) for i in range(1, 6))
        return cls(B, H, Hkv, S, D, found[6] is not None)


PROBLEMS = tuple(Shape.parse(text) for text in ("1x8x2048x64", "1x8x2048x64:causal", "1x8x2048x128:causal"))
LONG = Shape.parse("1x8x8192x64:causal")


def draw(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and do in tilewise's layout."""
    g = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(shape.B, shape.S, heads, shape.D, generator=g).to(dtype)

    return normal(shape.H), normal(shape.Hkv), normal(shape.Hkv), normal(shape.H)


def sdpa(shape: Shape):
    """PyTorch's attention on tensors in its own layout (B, H, S, D)."""
    gqa = shape.H != shape.Hkv
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)


def ours(shape: Shape):
    """tilewise on tensors in its own layout (B, S, H, D)."""
    return lambda q, k, v: tilewise.attention(q, k, v, causal=shape.causal)


def check(shape: Shape, dtype: torch.dtype) -> str:
    """Compare with the float64 reference by the rule of `tilewise.testing`, unmodified, and say what was compared.

    Every row and every gradient of one kv head and its query heads: heads and sequences do not meet in attention.

    Raises:
        AssertionError: the results are wrong.
    """
    mask = (("causal",),) if shape.causal else ()
    one = testing.Case(str(shape), B=1, Sq=shape.S, Sk=shape.S, H=shape.H // shape.Hkv, Hkv=1, D=shape.D, mask=mask)
    testing.assert_matches_reference(one, dtype)
    return f"{shape} {short(dtype)}: all of one kv head"
