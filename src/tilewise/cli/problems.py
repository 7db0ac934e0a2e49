"""The problems that `tilewise bench` runs: their shapes, their tensors, and whether a result may be shown at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import predicates, reference, testing
from tilewise.cli.output import short

FULL_CHECK = 384  # the longest sequence compared whole: its reference takes less than a second
SAMPLED_ROWS = 32
SAMPLING = 1.5  # the largest error of a few rows scatters more than that of all; wrong results are off by far more
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
    """Compare with the float64 reference by the rule of `tilewise.testing`; say what was compared.

    Short sequences are compared whole. Of long ones a shorter problem with the same features is compared whole, and the
    problem itself on some of its rows: o and dq there, and the dk and dv that those rows alone give.

    Raises:
        AssertionError: the results are wrong.
    """
    mask = (("causal",),) if shape.causal else ()
    small = testing.Case(
        str(shape), B=1, Sq=min(shape.S, FULL_CHECK), H=shape.H // shape.Hkv, Hkv=1, D=shape.D, mask=mask
    )
    testing.assert_matches_reference(small, dtype)
    if shape.S <= FULL_CHECK:
        return f"{shape} {short(dtype)}: all rows, one kv head"
    _check_rows(shape, dtype)
    return f"{shape} {short(dtype)}: all rows of {small.Sq}, {SAMPLED_ROWS} rows of {shape.S}"


def _check_rows(shape: Shape, dtype: torch.dtype) -> None:
    q, k, v, do = draw(shape, dtype)
    # Not the first rows: under a causal mask their gradients vanish by cancellation, in dense attention exactly.
    rows = torch.linspace(shape.S // 8, shape.S - 1, SAMPLED_ROWS).long()
    upstream = torch.zeros_like(do)  # no other row contributes to dk and dv
    upstream[:, rows] = do[:, rows]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = ours(shape)(*leaves)
    dq, dk, dv = torch.autograd.grad(o, leaves, upstream)
    found = {"o": o[:, rows].detach(), "dq": dq[:, rows], "dk": dk, "dv": dv}
    options = {}
    if shape.causal:
        lo, hi = predicates.causal_interval(rows[:, None])
        options["mask"] = predicates.keep_interval(torch.arange(shape.S), lo or 0, hi)
    dlse = torch.zeros(shape.B, shape.H, SAMPLED_ROWS)
    inputs = testing.Inputs(q[:, rows].detach(), k.detach(), v.detach(), options, do[:, rows], dlse)
    exact, dense = _reference(inputs.to(torch.float64)), _reference(inputs)
    for name, got in found.items():
        size, error = exact[name].abs().max(), (got - exact[name]).abs().max()
        # The rule for the largest error; that for the rms needs more rows than these.
        limit = testing.MAX_RATIO * (dense[name] - exact[name]).abs().max()
        limit += testing.MAX_EPS * torch.finfo(dtype).eps * size
        if not error <= SAMPLING * limit:
            raise AssertionError(
                f"{name} of {shape} {short(dtype)}, sampled rows: error {error:.3g} > {SAMPLING * limit:.3g}"
            )


def _reference(inputs: testing.Inputs) -> dict[str, Tensor]:
    q, k, v = leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    o, _ = reference.attention(q, k, v, testing.bind(inputs))
    gradients = torch.autograd.grad(o, leaves, inputs.do)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True))
