"""Conformance against the dense float64 reference: what tests, `tilewise bench` and downstream projects compare with.

One rule, no tolerances chosen per test. With the errors of the backend and of dense attention in the backend's own dtype,
both measured against dense attention in float64 on the same inputs:

    max|backend - ref64| <= 2 * max|dense - ref64| + 2 * eps * max|ref64|
    rms(backend - ref64) <= 1.5 * rms(dense - ref64) + eps * rms(ref64)

for the output, the logsumexp, the largest score and every gradient. In float64, where the dense computation *is* the
reference, its error is that of float32 on the same problem times the ratio of the two eps. Rows that see no key and keys
that no row sees must be exactly 0 (lse: -inf).

Example:
    >>> from tilewise.testing import Case, assert_matches_reference
    >>> assert_matches_reference(Case("mine", Sq=17, H=4, Hkv=2, mask=(("causal",),), sinks=True))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch, masks, reference
from tilewise.api import attention, attention_varlen
from tilewise.problem import DTYPES, Problem, Signature, make_problem
from tilewise.spec import DIFFERENTIABLE, TENSORS, AttentionSpec, BoundSpec, MaskTerm

MAX_RATIO, MAX_EPS = 2.0, 2.0
RMS_RATIO, RMS_EPS = 1.5, 1.0
#: Keyword arguments that are tensors with a gradient, as they appear in `Inputs.options`.
LEAVES = ("q", "k", "v", *DIFFERENTIABLE)


@dataclass(frozen=True, repr=False)
class Case:
    """One named problem: plain values only, so that its repr rebuilds it. Inputs are drawn by `make_inputs`.

    Args:
        name: how tests show it.
        B, Sq, Sk, H, Hkv, D, Dv: sizes; None means like q (Sk = Sq, Hkv = H, Dv = D).
        lengths_q, lengths_k: lengths of packed sequences: the call becomes `attention_varlen`, and B, Sq, Sk are ignored.
        used_q, used_k: seqused of each packed sequence.
        spare: rows and keys behind the last packed sequence, which belong to none.
        mask: recipes joined by ``&``: ("causal", align), ("window", left, right, align), ("chunk", size),
            ("prefix", length or "B"), ("document", "S" or "BS"), ("blocks", block_m, block_n, dims, density) and
            ("dense", dims, density). Trailing entries have defaults.
        softcap, softmax_scale, dropout: as in `attention`.
        alibi: dims of the slopes, "H" or "BH".
        bias: its dims: any of B, H, Q, K or 1 for broadcast, as "BHQK", "1HQK", "11Q1", "K" or "" for a scalar tensor.
        sinks: whether there are sinks.
        dtypes: dtypes to run in.
        strides: "contiguous", "transposed" (made as (B, H, S, D)), "sliced" (parts of a larger buffer), "expanded" (one
            kv head and one sequence of memory for all) or "reversed" (head dim not the innermost in memory).
        magnitude: factor on q and k: logits grow with its square.
        offset: added to every element of q and k.
        poison: NaN where no result may depend on it: keys that no row sees, rows that see no key and their do.
        needs: the tensors that require grad; default all there are.
    """

    name: str = ""
    B: int = 2
    Sq: int = 33
    Sk: int | None = None
    H: int = 2
    Hkv: int | None = None
    D: int = 16
    Dv: int | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    spare: int = 0
    mask: tuple[tuple, ...] = ()
    softcap: float | None = None
    softmax_scale: float | None = None
    alibi: str | None = None
    bias: str | None = None
    sinks: bool = False
    dropout: float = 0.0
    dtypes: tuple[torch.dtype, ...] = DTYPES
    strides: str = "contiguous"
    magnitude: float = 1.0
    offset: float = 0.0
    poison: bool = False
    needs: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        parts = [f.name + "=" + repr(getattr(self, f.name)) for f in dataclasses.fields(self) if self._differs(f)]
        return f"Case({', '.join(parts)})"

    def _differs(self, f: dataclasses.Field) -> bool:
        return getattr(self, f.name) != f.default

    def sizes(self) -> dict[str, int]:
        """The sizes with defaults filled in; lengths are the longest ones of packed sequences."""
        B, Sq, Sk = self.B, self.Sq, self.Sq if self.Sk is None else self.Sk
        if self.lengths_q is not None:
            lengths_k = self.lengths_q if self.lengths_k is None else self.lengths_k
            B, Sq, Sk = len(self.lengths_q), max(self.lengths_q, default=0), max(lengths_k, default=0)
        Hkv, Dv = self.H if self.Hkv is None else self.Hkv, self.D if self.Dv is None else self.Dv
        return {"B": B, "Sq": Sq, "Sk": Sk, "H": self.H, "Hkv": Hkv, "D": self.D, "Dv": Dv}


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call with its tensors, and the gradients that flow into its outputs.

    Args:
        q, k, v: as in `attention`, or packed when `options` holds cu_seqlens_q.
        options: keyword arguments of `attention` or `attention_varlen`.
        do, dlse: gradients of o and lse; drawn from `seed` when None.
        seed: of the dropout mask, and of do and dlse.
        needs: names of q, k, v, bias, alibi_slopes, sinks that require grad; default all there are.
        repro: what a failure shows as the way to run it again.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    do: Tensor | None = None
    dlse: Tensor | None = None
    seed: int = 0
    needs: Sequence[str] | None = None
    repro: str = "(inputs given as tensors)"

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.options

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v and those of bias, alibi_slopes, sinks that the call has."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        return found | {name: self.options[name] for name in DIFFERENTIABLE if self.options.get(name) is not None}

    def upstream(self) -> tuple[Tensor, Tensor]:
        """do and dlse."""
        acc = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        g = torch.Generator().manual_seed(self.seed + 1)
        do, dlse = self.do, self.dlse
        if do is None:
            do = torch.randn(*self.q.shape[:-1], self.v.shape[-1], generator=g, dtype=acc).to(self.q)
        if dlse is None:
            rows = self.q.shape[:-1].numel() // self.q.shape[-2]
            shape = (self.q.shape[1], rows) if self.varlen else (self.q.shape[0], self.q.shape[2], self.q.shape[1])
            dlse = torch.randn(shape, generator=g, dtype=acc).to(self.q.device)
        return do, dlse

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same call with every floating-point tensor in `dtype`."""
        cast = {name: t.to(dtype) for name, t in self.tensors().items()}
        do, dlse = (t.to(dtype) for t in self.upstream())
        q, k, v = (cast.pop(name) for name in ("q", "k", "v"))
        return dataclasses.replace(self, q=q, k=k, v=v, options=self.options | cast, do=do, dlse=dlse)


def bind(inputs: Inputs) -> BoundSpec:
    """The semantics of a call as the reference takes it: translated here, independently of `tilewise.api`."""
    options = dict(inputs.options)
    parts = [] if options.get("mask") is None else list(masks.as_mask(options["mask"]).parts())
    causal = options.get("causal", False)
    if causal is not False:
        parts.append(masks.Causal(None if causal is True else causal))
    if options.get("window_size") is not None:
        parts.append(masks.Window(*options["window_size"]))
    align = "top_left" if any(getattr(part, "align", None) == "top_left" for part in parts) else "bottom_right"
    p = float(options.get("dropout_p", 0.0))
    if p:
        g = torch.Generator().manual_seed(inputs.seed)
        options["seed"] = torch.randint(0, 2**63 - 1, (1,), generator=g, dtype=torch.int64)
    if inputs.varlen and options.get("cu_seqlens_k") is None:
        options["cu_seqlens_k"] = options["cu_seqlens_q"]
    named = {name: options[name] for name in TENSORS if options.get(name) is not None}
    terms = tuple(MaskTerm(part.name, part.params, len(part.tensors)) for part in parts)
    softcap = options.get("softcap") or None
    spec = AttentionSpec(terms, align, softcap, p, bool(options.get("deterministic")), tuple(named))
    scale = options.get("softmax_scale")
    return BoundSpec(spec, inputs.q.shape[-1] ** -0.5 if scale is None else scale, tuple(parts), **named)


def problem_of(inputs: Inputs) -> Problem:
    """The problem that dispatch sees for a call."""
    bound = bind(inputs)
    aux = [getattr(bound, name) for name in bound.spec.tensors] + [t for mask in bound.masks for t in mask.tensors]
    lengths = [0, 0]
    if inputs.varlen:
        lengths = [
            int(cu.diff().max()) if len(cu) > 1 else 0
            for cu in (bound.cu_seqlens_q, bound.cu_seqlens_k)
            if cu is not None
        ]
    signatures = (Signature.of(t) for t in (inputs.q, inputs.k, inputs.v))
    return make_problem(*signatures, [Signature.of(t) for t in aux], bound.spec, *lengths)


def why_not(inputs: Inputs, backend: str) -> Sequence[str]:
    """Every reason why a backend cannot take a call, by its capability table; tests skip with these words only."""
    return dispatch.capabilities(backend).why_not(problem_of(inputs))


# ---- inputs ----


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Inputs:
    """Draw the tensors of a case. The same case, dtype and seed give the same tensors on every machine.

    Args:
        case: the problem.
        dtype: of q, k, v and bias; slopes and sinks are float32 (float64 for float64).
        seed: of everything random, dropout included.
        device: where the tensors go.
    """
    g = torch.Generator().manual_seed(seed)
    n = case.sizes()
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    draw = _Draw(g, n)
    options: dict[str, Any] = {}
    if case.lengths_q is None:
        shapes = [(n["B"], n["Sq"], n["H"], n["D"])] + [(n["B"], n["Sk"], n["Hkv"], d) for d in (n["D"], n["Dv"])]
    else:
        lengths_k = case.lengths_q if case.lengths_k is None else case.lengths_k
        total_q, total_k = sum(case.lengths_q) + case.spare, sum(lengths_k) + case.spare
        shapes = [(total_q, n["H"], n["D"])] + [(total_k, n["Hkv"], d) for d in (n["D"], n["Dv"])]
        options |= {"cu_seqlens_q": _cumulative(case.lengths_q), "cu_seqlens_k": _cumulative(lengths_k)}
        for name, used in (("seqused_q", case.used_q), ("seqused_k", case.used_k)):
            if used is not None:
                options[name] = torch.tensor(used, dtype=torch.int32)
    q, k, v = (_strided(draw.normal(s), case.strides) for s in shapes)
    q, k = (t * case.magnitude + case.offset for t in (q, k)) if case.magnitude != 1 or case.offset else (q, k)
    if case.mask:
        options["mask"] = draw.mask(case.mask[0])
        for recipe in case.mask[1:]:
            options["mask"] = options["mask"] & draw.mask(recipe)
    if case.bias is not None:
        options["bias"] = draw.normal(draw.shape(case.bias)).to(dtype)
    if case.alibi is not None:
        options["alibi_slopes"] = draw.normal(draw.shape(case.alibi)).abs().mul(0.2).to(acc)
    if case.sinks:
        options["sinks"] = draw.normal((n["H"],)).to(acc)
    plain = {"softcap": case.softcap, "softmax_scale": case.softmax_scale, "dropout_p": case.dropout or None}
    options |= {name: value for name, value in plain.items() if value is not None}
    q, k, v = (_like_strides(t.to(dtype), t) for t in (q, k, v))
    repro = (
        'python -c "import torch; from tilewise.testing import Case, assert_matches_reference; '
        f"assert_matches_reference({case!r}, {dtype}, seed={seed}"
    )
    inputs = Inputs(q, k, v, options, seed=seed, needs=case.needs, repro=repro.replace('"mine"', "'mine'"))
    return _poisoned(inputs) if case.poison else inputs
