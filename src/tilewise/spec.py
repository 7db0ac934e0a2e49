"""AttentionSpec: what one call computes, without its tensors; BoundSpec: the same with its tensors.

The spec crosses the torch.library boundary as a string (`AttentionSpec.key`) beside a flat list of tensors (`aux`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch import Tensor

from tilewise.masks import KINDS, IntervalMask, Mask, TileMask
from tilewise.mods import Alibi, Bias, Sink, Softcap

#: The tensors a call can carry beside q, k, v, in `aux` order; those of its masks follow.
TENSORS = (
    "bias",
    "alibi_slopes",
    "sinks",
    "seed",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
)
#: Those of them that get gradients.
DIFFERENTIABLE = ("bias", "alibi_slopes", "sinks")


class MaskTerm(NamedTuple):
    """One part of the mask: its kind, its plain parameters, and how many tensors of `aux` belong to it."""

    name: str
    params: tuple
    tensors: int


@dataclass(frozen=True)
class AttentionSpec:
    """The semantics of one call: everything that is not a tensor, a shape or the softmax scale.

    The scale stays outside, a number of its own beside q, k, v: under torch.compile it may be symbolic (``D ** -0.5``).
    """

    mask: tuple[MaskTerm, ...] = ()
    align: str = "bottom_right"
    softcap: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    tensors: tuple[str, ...] = ()  # the names of TENSORS present in aux, in that order
    max_logit: bool = False  # whether the largest score of each head is asked for

    key: str = field(init=False, compare=False, repr=False)  # a string from which `parse` rebuilds the spec

    def __post_init__(self):
        terms = tuple(tuple(term) for term in self.mask)
        rest = self.align, self.softcap, self.dropout_p, self.deterministic, self.tensors, self.max_logit
        object.__setattr__(self, "key", repr((terms, *rest)))

    @staticmethod
    def parse(key: str) -> AttentionSpec:
        return _parse(key)

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.tensors

    @property
    def features(self) -> tuple[str, ...]:
        """The features a backend must have for this call, in the words of the capability table."""
        named = {
            "bias": "bias",
            "alibi_slopes": "alibi",
            "sinks": "sinks",
            "seed": "dropout",
            "cu_seqlens_q": "varlen",
            "seqused_q": "seqused",
            "seqused_k": "seqused",
        }
        found = [term.name for term in self.mask] + [named[t] for t in self.tensors if t in named]
        if self.softcap is not None:
            found.append("softcap")
        if self.align == "top_left":
            found.append("top_left")
        return tuple(dict.fromkeys(found))

    def bind(self, aux: Sequence[Tensor], softmax_scale: float) -> BoundSpec:
        """Give each tensor of `aux` its name and each mask its tensors."""
        named = dict(zip(self.tensors, aux, strict=False))
        masks, used = [], len(self.tensors)
        for term in self.mask:
            masks.append(KINDS[term.name].rebuild(term.params, aux[used : used + term.tensors]))
            used += term.tensors
        if used != len(aux):
            raise ValueError(f"the spec names {used} tensors, aux holds {len(aux)}")
        return BoundSpec(self, softmax_scale, tuple(masks), **named)


@lru_cache(maxsize=1024)
def _parse(key: str) -> AttentionSpec:
    terms, *rest = ast.literal_eval(key)
    return AttentionSpec(tuple(MaskTerm(*term) for term in terms), *rest)


@dataclass(frozen=True, eq=False)
class BoundSpec:
    """A spec with its tensors: what lowering, the reference and the cost model read."""

    spec: AttentionSpec
    softmax_scale: float
    masks: tuple[Mask, ...] = ()
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    @cached_property
    def has_tensors(self) -> bool:
        return bool(self.spec.tensors) or any(mask.tensors for mask in self.masks)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, as in `aux`."""
        named = [getattr(self, name) for name in self.spec.tensors]
        return (*named, *(t for mask in self.masks for t in mask.tensors))

    @property
    def interval_masks(self) -> list[IntervalMask]:
        return [m for m in self.masks if isinstance(m, IntervalMask)]

    @property
    def tile_masks(self) -> list[TileMask]:
        return [m for m in self.masks if isinstance(m, TileMask)]

    @property
    def mods(self) -> list[Softcap | Alibi | Bias]:
        """Score modifiers in the order in which they apply."""
        found: list[Softcap | Alibi | Bias] = []
        if self.spec.softcap is not None:
            found.append(Softcap(self.spec.softcap))
        if self.alibi_slopes is not None:
            found.append(Alibi(self.alibi_slopes))
        if self.bias is not None:
            found.append(Bias(self.bias))
        return found

    @property
    def sink(self) -> Sink | None:
        return None if self.sinks is None else Sink(self.sinks)


def bind(key: str, aux: Sequence[Tensor], softmax_scale: float) -> BoundSpec:
    """The spec named by `key` with its tensors. Calls without tensors, most of a training loop's, are bound once."""
    return AttentionSpec.parse(key).bind(aux, softmax_scale) if aux else _bind_bare(key, softmax_scale)


@lru_cache(maxsize=1024)
def _bind_bare(key: str, softmax_scale: float) -> BoundSpec:
    return AttentionSpec.parse(key).bind((), softmax_scale)
