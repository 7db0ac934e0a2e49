"""Dense attention on the inputs of a test: the exact results, and the errors that rounding alone makes in a dtype."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilewise import masks, predicates, reference
from tilewise.problem import Problem, Signature, make_problem
from tilewise.sampling import Inputs
from tilewise.sequences import row_bounds, sequences
from tilewise.spec import DIFFERENTIABLE, TENSORS, AttentionSpec, BoundSpec, MaskTerm

MAX_RATIO = 2.0  # of a backend's largest error to dense attention's
ORDERS = 4  # of summation in which dense attention is computed
DRAWS = 16  # of roundings of every score; ORDERS of them if there are many scores
SMALL = 2**10  # scores up to which chance decides
LARGEST_DENSE = 2**22  # entries of a score matrix that are computed at once
BY_ROWS = {"causal", "window_size", "softcap", "softmax_scale"}  # options with which dense rows can be computed apart


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
    q, k, v, *rest = (Signature.of(t) for t in (inputs.q, inputs.k, inputs.v, *bound.tensors))
    cu_seqlens = (bound.cu_seqlens_q, bound.cu_seqlens_k)
    max_q, max_k = (0 if cu is None else max(cu.diff().tolist(), default=0) for cu in cu_seqlens)
    return make_problem(q, k, v, rest, bound.spec, max_q, max_k)


def dense(inputs: Inputs) -> dict[str, Tensor]:
    """The same from the dense reference, in the dtype of the inputs; long sequences by blocks of rows."""
    if not inputs.varlen and inputs.q.shape[1] * inputs.k.shape[1] > LARGEST_DENSE and inputs.options.keys() <= BY_ROWS:
        return _dense_by_rows(inputs)
    named, leaves = leaves_of(inputs)
    bound = dataclasses.replace(bind(inputs), **{name: t for name, t in named.items() if name in DIFFERENTIABLE})
    o, lse = reference.attention(named["q"], named["k"], named["v"], bound)
    with torch.no_grad():
        max_logit = reference.max_logit(named["q"], named["k"], bound)
    return {"o": o.detach(), "lse": lse.detach(), "max_logit": max_logit} | gradients_of(inputs, o, lse, leaves)


def _dense_by_rows(inputs: Inputs) -> dict[str, Tensor]:
    bound = bind(inputs)
    Sq, Sk = inputs.q.shape[1], inputs.k.shape[1]
    device = inputs.q.device
    bounds = row_bounds(bound, sequences(bound, inputs.q.shape, inputs.k.shape, 0, 0, device), 0)
    keys = torch.arange(Sk, device=device)
    do, dlse = inputs.upstream()
    options = {name: value for name, value in inputs.options.items() if name not in ("causal", "window_size")}
    by_rows: dict[str, list[Tensor]] = {"o": [], "lse": [], "dq": []}
    joined: dict[str, Tensor] = {}
    for rows in torch.arange(Sq, device=device).split(max(LARGEST_DENSE // Sk, 1)):
        seen = predicates.keep_interval(keys, bounds.lo[rows, None], bounds.hi[rows, None])
        part = {
            "q": inputs.q[:, rows],
            "do": do[:, rows],
            "dlse": dlse[:, :, rows],
            "options": options | {"mask": seen},
        }
        for name, t in dense(dataclasses.replace(inputs, **part)).items():
            if name in by_rows:
                by_rows[name].append(t)
            elif name not in joined:
                joined[name] = t
            else:
                joined[name] = torch.maximum(joined[name], t) if name == "max_logit" else joined[name] + t
    return joined | {name: torch.cat(parts, 2 if name == "lse" else 1) for name, parts in by_rows.items() if parts}


def leaves_of(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    named = {name: t.detach() for name, t in inputs.tensors().items()}
    needs = named if inputs.needs is None else inputs.needs
    named |= {name: named[name].requires_grad_() for name in needs if name in named}
    return named, {name: t for name, t in named.items() if t.requires_grad}


def gradients_of(inputs: Inputs, o: Tensor, lse: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    if not leaves:
        return {}
    # Without a single sequence the dense output depends on nothing: its gradients are 0.
    flows = [(t, g.to(t)) for t, g in zip((o, lse), inputs.upstream(), strict=True) if t.requires_grad]
    found = [None] * len(leaves)
    if flows:
        outputs, upstream = zip(*flows, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    zeros = (torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves.values(), strict=True))
    return {f"d{name}": g for name, g in zip(leaves, zeros, strict=True)}


def expected(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The float64 reference, and the sizes of tensors that are sums of larger terms: of ds, in a bias of full shape."""
    bias, slopes = inputs.options.get("bias"), inputs.options.get("alibi_slopes")
    problem = problem_of(inputs)
    if (bias is None and slopes is None) or not problem.B:
        return dense(inputs.to(torch.float64)), {}
    full = (problem.B, problem.H, problem.Sq, problem.Sk)
    given = inputs.q.new_zeros(full) if bias is None else bias.expand(full).contiguous()
    needs = None if inputs.needs is None else (*inputs.needs, "bias")
    wide = dataclasses.replace(inputs, options=inputs.options | {"bias": given}, needs=needs)
    exact = dense(wide.to(torch.float64))
    ds, sizes = exact.pop("dbias"), {}
    if bias is not None and (inputs.needs is None or "bias" in inputs.needs):
        exact["dbias"] = ds.sum_to_size(bias.shape)
        sizes["dbias"] = ds.abs().sum_to_size(bias.shape)
    if slopes is not None and "dalibi_slopes" in exact:
        device = inputs.q.device
        seqs = sequences(bind(inputs), inputs.q.shape, inputs.k.shape, problem.Sq, problem.Sk, device)
        m = torch.arange(problem.Sq, device=device) + seqs.shift[:, None]
        distance = (m[:, None, :, None] - torch.arange(problem.Sk, device=device)).abs()
        sizes["dalibi_slopes"] = (ds.abs() * distance).sum((2, 3)).sum_to_size(slopes.shape)
    return exact, sizes


def dense_errors(what: Inputs, exact: dict[str, Tensor], lucky: bool = False) -> dict[str, tuple[Tensor, ...]]:
    """Errors of dense attention in the dtype of the call; where they may be luck, of other orders and roundings as well."""
    single, shrink = what, 1.0
    if what.q.dtype == torch.float64:
        single = what.to(torch.float32)
        exact = dense(single.to(torch.float64))
        shrink = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps * (MAX_RATIO + 1) / MAX_RATIO
    runs = [dense(single)]
    if lucky:
        runs += [_dense_in_order(single, seed) for seed in range(ORDERS - 1)]
        runs += _dense_of_rounded_scores(single)
    errors = {name: tuple((run[name].double() - exact[name]) * shrink for run in runs) for name in exact}
    return errors | {"max_logit": (_score_error(single) * shrink,)}


def _dense_in_order(inputs: Inputs, seed: int) -> dict[str, Tensor]:
    """Dense attention with the head dims in a random order, its results put back in place."""
    g = torch.Generator().manual_seed(seed)
    along_d, along_dv = (torch.randperm(t.shape[-1], generator=g) for t in (inputs.q, inputs.v))
    do, dlse = inputs.upstream()
    moved = {"q": inputs.q[..., along_d], "k": inputs.k[..., along_d], "v": inputs.v[..., along_dv]}
    found = dense(dataclasses.replace(inputs, **moved, do=do[..., along_dv], dlse=dlse))
    places = {"o": along_dv, "dq": along_d, "dk": along_d, "dv": along_dv}
    return {name: t[..., places[name].argsort()] if name in places else t for name, t in found.items()}


def _dense_of_rounded_scores(inputs: Inputs) -> list[dict[str, Tensor]]:
    """Dense attention in float64 on scores that were rounded once, up or down at random, in the accumulators' precision."""
    wide = inputs.to(torch.float64)
    scores = _scores(wide)
    amplitude = 0.5 * torch.finfo(torch.float32).eps * (1 + scores.abs())
    bias = wide.options.get("bias")
    found = []
    for seed in range(DRAWS if scores.numel() < SMALL else ORDERS):
        up = (torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) < 0.5).to(scores.device)
        rounded = torch.where(up, amplitude, -amplitude) + (0.0 if bias is None else bias)
        run = dense(dataclasses.replace(wide, options=wide.options | {"bias": rounded}))
        ds = run.pop("dbias", None)
        found.append(run if bias is None or ds is None else run | {"dbias": ds.sum_to_size(bias.shape)})
    return found


@torch.no_grad()
def _scores(inputs: Inputs) -> Tensor:
    """Scores (B, H, Sq, Sk) after all modifiers; 0 where they are not finite, and beyond the ends of packed sequences."""
    problem, bound = problem_of(inputs), bind(inputs)
    scores = inputs.q.new_zeros(problem.B, problem.H, problem.Sq, problem.Sk)
    for q, k, batch in reference.parts(inputs.q, inputs.k, bound):
        s, _ = reference.scores(q, k, bound, batch)
        scores[batch, :, : s.shape[2], : s.shape[3]] = s.nan_to_num(0.0, 0.0, 0.0)
    return scores


@torch.no_grad()
def _score_error(inputs: Inputs) -> Tensor:
    """The largest error of a visible, finite score of dense attention in the dtype of the inputs."""
    wide = inputs.to(torch.float64)
    bound, bound64 = bind(inputs), bind(wide)
    errors = [inputs.q.new_zeros(())]
    pieces = zip(reference.parts(inputs.q, inputs.k, bound), reference.parts(wide.q, wide.k, bound64), strict=True)
    for (q, k, batch), (q64, k64, _) in pieces:
        (s, visible), (s64, _) = reference.scores(q, k, bound, batch), reference.scores(q64, k64, bound64, batch)
        error = torch.where(visible & s64.isfinite(), s.double() - s64, 0.0)
        errors += [error.abs().max()] if error.numel() else []
    return torch.stack([e.double() for e in errors]).max()
