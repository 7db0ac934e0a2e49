"""Score modifiers: what happens to ``softmax_scale * q.k`` before the mask, and what joins the denominator.

The order is fixed: ``score = softcap(softmax_scale * q.k) - slope * |m - n| + bias``, then the mask, then the
softmax, whose denominator a sink joins. Each object's `apply` is the formula; backends implement the same one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Softcap:
    """``cap * tanh(score / cap)``: scores stay within ``(-cap, cap)`` (Gemma 2, section 2)."""

    cap: float

    def apply(self, s: Tensor) -> Tensor:
        return self.cap * torch.tanh(s / self.cap)


@dataclass(frozen=True, eq=False)
class Alibi:
    """``score - slope * |m - n|`` with one slope per head, or per batch and head (ALiBi, Press et al. 2022, section 3)."""

    slopes: Tensor  # (H,) or (B, H)

    def apply(self, s: Tensor, m: Tensor, n: Tensor) -> Tensor:
        slope = self.slopes.to(s.dtype).reshape(-1, self.slopes.shape[-1])[:, :, None, None]
        return s - slope * (m[..., :, None] - n).abs().to(s.dtype)


@dataclass(frozen=True, eq=False)
class Bias:
    """``score + bias``, `bias` broadcast over any of B, H, Sq, Sk."""

    bias: Tensor  # broadcastable to (B, H, Sq, Sk)

    def apply(self, s: Tensor) -> Tensor:
        return s + self.bias.to(s.dtype)


@dataclass(frozen=True, eq=False)
class Sink:
    """``exp(sink)`` joins each row's denominator and no key's numerator (StreamingLLM; gpt-oss, section 2.3)."""

    sinks: Tensor  # (H,)

    def apply(self, lse: Tensor) -> Tensor:
        return torch.logaddexp(lse, self.sinks.to(lse.dtype)[:, None].expand_as(lse))
