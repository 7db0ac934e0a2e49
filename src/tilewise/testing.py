"""Conformance against the dense float64 reference: what tests, `tilewise bench` and downstream projects compare with.

One rule, no tolerances chosen per test. With the errors of the backend and of dense attention in the backend's own dtype,
both measured against dense attention in float64 on the same inputs:

    max|backend - ref64| <= 2   * max|dense - ref64| + 2 * eps * max|ref64|
    rms(backend - ref64) <= 1.5 * rms(dense - ref64) + 2 * eps * rms(ref64)

for the output, the logsumexp, the largest score and every gradient. What makes the rule fair to small problems:

- Dense attention's error is luck in a small tensor: the largest error of several orders of summation over the head dims
  counts, and for the largest score, a handful of numbers, the largest error of any score.
- A few scores may all round well by luck. Whoever computes them rounds each score and its exponential once, at least, so the
  errors of float64 attention on scores ``s`` that are off by ``(|s| + 1) eps / 2``, up or down at random, count as well:
  with the eps of the accumulators, so this is nothing beside the dense errors of 16-bit inputs.
- Gradients are recomputed from the saved logsumexp, one number per row with one rounding, as in every FlashAttention:
  ``p = exp(score - lse)`` is off by up to ``|lse| eps / 2`` in each row; twice that, since dk and dv add up rows, is added to
  the ``2 eps`` of gradients.
- ``ds = p (dp - delta)`` is a difference of two rounded numbers, and ``delta = do . o - dlse`` uses the saved, rounded o:
  these roundings, for one unit of probability, are added in dq, dk and dbias. They matter where few numbers cancel.
- The gradients of a broadcast bias and of slopes are sums that cancel: the sum of their terms' magnitudes stands for
  ``|ref64|``.
- In float64 the dense computation *is* the reference, rounded as well: the errors of float32 on the same problem, times the
  ratio of the two eps, stand for its own, and count once more for the reference's.

Rows that see no key and keys that no row sees must give exactly 0 (lse: -inf).

Example:
    >>> from tilewise.testing import Case, assert_matches_reference
    >>> assert_matches_reference(Case("mine", Sq=17, H=4, Hkv=2, mask=(("causal",),), sinks=True))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch, masks, predicates, reference
from tilewise.api import attention, attention_varlen
from tilewise.problem import Problem, Signature, make_problem
from tilewise.sampling import Case, Inputs, draw
from tilewise.sequences import row_bounds, sequences
from tilewise.spec import DIFFERENTIABLE, TENSORS, AttentionSpec, BoundSpec, MaskTerm

MAX_RATIO, MAX_EPS = 2.0, 2.0
RMS_RATIO, RMS_EPS = 1.5, 2.0
ORDERS = 4  # of summation in which dense attention is computed
DRAWS = 16  # of roundings of every score; ORDERS of them if there are many scores
SMALL = 2**10  # scores up to which chance decides
LARGE = 2**17  # elements of q from which dense attention's error is not luck
LARGEST_DENSE = 2**22  # entries of a score matrix that are computed at once
BY_ROWS = {"causal", "window_size", "softcap", "softmax_scale"}  # options with which dense rows can be computed apart


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Inputs:
    """Draw the tensors of a case: the same case, dtype and seed give the same tensors on every machine.

    Args:
        case: the problem.
        dtype: of q, k, v and bias; slopes and sinks are float32 (float64 for float64).
        seed: of everything random, dropout included.
        device: where the tensors go.
    """
    inputs = draw(case, dtype, seed, device)
    return _poisoned(inputs) if case.poison else inputs


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
    q, k, v, *rest = (Signature.of(t) for t in (inputs.q, inputs.k, inputs.v, *aux))
    cu_seqlens = (bound.cu_seqlens_q, bound.cu_seqlens_k)
    max_q, max_k = (0 if cu is None else max(cu.diff().tolist(), default=0) for cu in cu_seqlens)
    return make_problem(q, k, v, rest, bound.spec, max_q, max_k)


def why_not(inputs: Inputs, backend: str) -> Sequence[str]:
    """Every reason why a backend cannot take a call, by its capability table; tests skip with these words only."""
    return dispatch.capabilities(backend).why_not(problem_of(inputs))


def run(inputs: Inputs, backend: str | None = None) -> dict[str, Tensor]:
    """Outputs and gradients of a call: o, lse, max_logit, dq, dk, dv, and dbias, dalibi_slopes, dsinks if it has them."""
    named, leaves = _leaves(inputs)
    q, k, v = (named.pop(name) for name in ("q", "k", "v"))
    options: dict[str, Any] = (
        inputs.options | named | {"return_lse": True, "return_max_logit": True, "backend": backend}
    )
    options["generator"] = torch.Generator().manual_seed(inputs.seed)
    o, lse, max_logit = (attention_varlen if inputs.varlen else attention)(q, k, v, **options)
    return {"o": o, "lse": lse, "max_logit": max_logit} | _gradients(inputs, o, lse, leaves)


def _dense(inputs: Inputs) -> dict[str, Tensor]:
    """The same from the dense reference, in the dtype of the inputs; long sequences by blocks of rows."""
    if not inputs.varlen and inputs.q.shape[1] * inputs.k.shape[1] > LARGEST_DENSE and inputs.options.keys() <= BY_ROWS:
        return _dense_by_rows(inputs)
    named, leaves = _leaves(inputs)
    bound = dataclasses.replace(bind(inputs), **{name: t for name, t in named.items() if name in DIFFERENTIABLE})
    o, lse = reference.attention(named["q"], named["k"], named["v"], bound)
    with torch.no_grad():
        max_logit = reference.max_logit(named["q"], named["k"], bound)
    return {"o": o.detach(), "lse": lse.detach(), "max_logit": max_logit} | _gradients(inputs, o, lse, leaves)


def _dense_by_rows(inputs: Inputs) -> dict[str, Tensor]:
    bound = bind(inputs)
    Sq, Sk = inputs.q.shape[1], inputs.k.shape[1]
    bounds = row_bounds(bound, sequences(bound, inputs.q.shape, inputs.k.shape, 0, 0), 0)
    do, dlse = inputs.upstream()
    options = {name: value for name, value in inputs.options.items() if name not in ("causal", "window_size")}
    found = []
    for rows in torch.arange(Sq).split(max(LARGEST_DENSE // Sk, 1)):
        seen = predicates.keep_interval(torch.arange(Sk), bounds.lo[rows, None], bounds.hi[rows, None])
        part = {
            "q": inputs.q[:, rows],
            "do": do[:, rows],
            "dlse": dlse[:, :, rows],
            "options": options | {"mask": seen},
        }
        found.append(_dense(dataclasses.replace(inputs, **part)))
    joined = {"max_logit": torch.stack([part["max_logit"] for part in found]).amax(0)}
    joined |= {name: torch.cat([part[name] for part in found], dim) for name, dim in (("o", 1), ("lse", 2))}
    for name in found[0].keys() - joined.keys():
        parts = [part[name] for part in found]
        joined[name] = torch.cat(parts, 1) if name == "dq" else torch.stack(parts).sum(0)
    return joined


def _leaves(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    named = {name: t.detach() for name, t in inputs.tensors().items()}
    needs = named if inputs.needs is None else inputs.needs
    named |= {name: named[name].requires_grad_() for name in needs if name in named}
    return named, {name: t for name, t in named.items() if t.requires_grad}


def _gradients(inputs: Inputs, o: Tensor, lse: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
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


def assert_matches_reference(
    what: Case | Inputs, dtype: torch.dtype | None = None, *, seed: int = 0, backend: str | None = None
) -> None:
    """Assert that a backend's outputs and every gradient obey the rule of this module.

    Args:
        what: a case, or a call with its own tensors.
        dtype: for a case; default each of its dtypes.
        seed: for a case.
        backend: by name; default the one that dispatch chooses.

    Raises:
        AssertionError: with the tensor, its worst coordinates, both errors and a line that runs the comparison again.

    Example:
        >>> import torch
        >>> from tilewise.testing import Inputs, assert_matches_reference
        >>> q = k = v = torch.randn(1, 20, 2, 8)
        >>> assert_matches_reference(Inputs(q, k, v, {"causal": True, "window_size": (4, 0)}))
    """
    if isinstance(what, Case):
        for one in what.dtypes if dtype is None else (dtype,):
            assert_matches_reference(make_inputs(what, one, seed), backend=backend)
        return
    found, (exact, sizes) = run(what, backend), _exact(what)
    complaints = _complaints(what, found, exact, sizes, _dense_errors(what, exact))
    if complaints and what.q.numel() < LARGE:  # the largest of many errors is not luck
        complaints = _complaints(what, found, exact, sizes, _dense_errors(what, exact, lucky=True))
    if complaints:
        end = f", backend={backend!r})" if what.repro.startswith("assert") else ""
        head = "import torch; from tilewise.testing import Case, assert_matches_reference; " if end else ""
        raise AssertionError("\n".join([*complaints, f"repro: {head}{what.repro}{end}"]))


def _complaints(
    what: Inputs,
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    sizes: dict[str, Tensor],
    dense_errors: dict[str, tuple[Tensor, ...]],
) -> list[str]:
    """What is wrong with each tensor, in words."""
    saved = exact["lse"][exact["lse"].isfinite()]
    lse_error = torch.finfo(found["lse"].dtype).eps * (_max(saved) if saved.numel() else 0.0)
    delta_slack = _delta_slack(what, exact["o"])
    complaints = []
    for name, got in found.items():
        is_output = name in ("o", "lse", "max_logit")
        eps = torch.finfo(got.dtype if is_output else what.q.dtype).eps + (0.0 if is_output else lse_error / MAX_EPS)
        size = sizes.get(name, exact[name])
        slack = delta_slack.get(name, 0.0)
        complaint = _compare(got.detach().double(), exact[name], size, dense_errors[name], eps, slack)
        if complaint:
            complaints.append(f"{name} {tuple(got.shape)}: {complaint}")
    return complaints + _leaks(what, found, exact)


def _exact(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The float64 reference, and the sizes of tensors that are sums of larger terms: of ds, in a bias of full shape."""
    bias, slopes = inputs.options.get("bias"), inputs.options.get("alibi_slopes")
    problem = problem_of(inputs)
    if (bias is None and slopes is None) or not problem.B:
        return _dense(inputs.to(torch.float64)), {}
    full = (problem.B, problem.H, problem.Sq, problem.Sk)
    given = inputs.q.new_zeros(full) if bias is None else bias.expand(full).contiguous()
    needs = None if inputs.needs is None else (*inputs.needs, "bias")
    wide = dataclasses.replace(inputs, options=inputs.options | {"bias": given}, needs=needs)
    exact = _dense(wide.to(torch.float64))
    ds, sizes = exact.pop("dbias"), {}
    if bias is not None and (inputs.needs is None or "bias" in inputs.needs):
        exact["dbias"] = ds.sum_to_size(bias.shape)
        sizes["dbias"] = ds.abs().sum_to_size(bias.shape)
    if slopes is not None and "dalibi_slopes" in exact:
        seqs = sequences(bind(inputs), inputs.q.shape, inputs.k.shape, problem.Sq, problem.Sk)
        m = torch.arange(problem.Sq) + seqs.shift[:, None]
        distance = (m[:, None, :, None] - torch.arange(problem.Sk)).abs()
        sizes["dalibi_slopes"] = (ds.abs() * distance).sum((2, 3)).sum_to_size(slopes.shape)
    return exact, sizes


def _dense_errors(what: Inputs, exact: dict[str, Tensor], lucky: bool = False) -> dict[str, tuple[Tensor, ...]]:
    """Errors of dense attention in the dtype of the call; where they may be luck, of other orders and roundings as well."""
    single, shrink = what, 1.0
    if what.q.dtype == torch.float64:
        single = what.to(torch.float32)
        exact = _dense(single.to(torch.float64))
        shrink = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps * (MAX_RATIO + 1) / MAX_RATIO
    runs = [_dense(single)]
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
    found = _dense(dataclasses.replace(inputs, **moved, do=do[..., along_dv], dlse=dlse))
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
        up = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        rounded = torch.where(up, amplitude, -amplitude) + (0.0 if bias is None else bias)
        run = _dense(dataclasses.replace(wide, options=wide.options | {"bias": rounded}))
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
    errors = [torch.zeros(())]
    pieces = zip(reference.parts(inputs.q, inputs.k, bound), reference.parts(wide.q, wide.k, bound64), strict=True)
    for (q, k, batch), (q64, k64, _) in pieces:
        (s, visible), (s64, _) = reference.scores(q, k, bound, batch), reference.scores(q64, k64, bound64, batch)
        error = torch.where(visible & s64.isfinite(), s.double() - s64, 0.0)
        errors += [error.abs().max()] if error.numel() else []
    return torch.stack([e.double() for e in errors]).max()


def _delta_slack(what: Inputs, o: Tensor) -> dict[str, float]:
    """What the roundings of o, dp and delta can do, through ``dp - delta``, to one unit of probability in dq, dk and dbias."""
    if not o.numel():
        return {}
    do, dlse = (torch.where(t.isfinite(), t, 0.0).double() for t in what.upstream())
    of_o, of_sums = 0.5 * torch.finfo(what.q.dtype).eps, torch.finfo(what.upstream()[1].dtype).eps
    delta = (of_o + of_sums) * _max((do * o).abs().sum(-1)) + of_sums * _max(dlse)
    scale = abs(bind(what).softmax_scale)
    q, k = (_max(torch.where(t.isfinite(), t, 0.0)) if t.numel() else 0.0 for t in (what.q, what.k))
    return {"dq": scale * delta * k, "dk": scale * delta * q, "dbias": delta}


def _compare(
    got: Tensor, exact: Tensor, size: Tensor, dense_errors: tuple[Tensor, ...], eps: float, slack: float
) -> str | None:
    """What is wrong with one tensor, in words, or None."""
    if got.shape != exact.shape:
        return f"has the wrong shape, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    wrong = torch.where(finite, ~got.isfinite(), got != exact)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        return f"at {at} (of {int(wrong.sum())} such) got {got[at].item()}, expected {exact[at].item()}"
    if not bool(finite.any()):
        return None
    error = torch.where(finite, got - exact, 0.0)
    dense_errors = tuple(torch.where(finite & e.isfinite(), e, 0.0) for e in dense_errors)
    size = torch.where(finite, size, 0.0)
    for kind, norm, ratio, floor in (("max", _max, MAX_RATIO, MAX_EPS), ("rms", _rms, RMS_RATIO, RMS_EPS)):
        dense_error = max(norm(e) for e in dense_errors)
        limit = ratio * dense_error + floor * eps * norm(size) + slack
        if norm(error) > limit:
            at = tuple(int(i) for i in torch.unravel_index(error.abs().argmax(), error.shape))
            return (
                f"{kind} error {norm(error):.3g} > {limit:.3g} (dense error {dense_error:.3g}, size "
                f"{norm(size):.3g}); worst at {at}: got {got[at].item():.9g}, expected {exact[at].item():.9g}"
            )
    return None


def _max(t: Tensor) -> float:
    return float(t.abs().max())


def _rms(t: Tensor) -> float:
    return math.sqrt(float(t.square().mean()))


def _leaks(what: Inputs, found: dict[str, Tensor], exact: dict[str, Tensor]) -> list[str]:
    """Rows that see no key, and keys that no row sees, whose results are not exactly 0."""
    blind = exact["lse"] == -torch.inf
    blind = (blind.T if blind.dim() == 2 else blind.transpose(1, 2))[..., None]
    named = [(name, blind) for name in ("o", "dq") if name in found]
    if "dk" in found and "dv" in found:
        unseen = _unseen_keys(what, exact)
        named += [("dk", unseen), ("dv", unseen)]
    return [f"{name} is not 0 where nothing is seen" for name, none in named if bool((found[name] * none != 0).any())]


def _unseen_keys(inputs: Inputs, exact: dict[str, Tensor]) -> Tensor:
    """Keys that no row sees, in the shape of k with 1 for D: those without gradients, where dropout drops nothing."""
    if inputs.options.get("dropout_p"):
        exact = _dense(dataclasses.replace(inputs, options=inputs.options | {"dropout_p": 0.0}).to(torch.float64))
    return ((exact["dk"] == 0).all(-1) & (exact["dv"] == 0).all(-1))[..., None]


def _poisoned(inputs: Inputs) -> Inputs:
    """NaN wherever the float64 reference says that nothing depends on it."""
    run = _dense(inputs.to(torch.float64))
    blind_q = (run["lse"] == -torch.inf).T if inputs.varlen else (run["lse"] == -torch.inf).transpose(1, 2)
    do, dlse = inputs.upstream()
    q, do = (t.masked_fill(blind_q[..., None], torch.nan) for t in (inputs.q, do))
    k, v = (t.masked_fill(_unseen_keys(inputs, run), torch.nan) for t in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v, do=do, dlse=dlse)
