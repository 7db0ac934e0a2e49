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
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api import attention, attention_varlen
from tilewise.dense import MAX_RATIO, bind, dense, dense_errors, expected, gradients_of, leaves_of, problem_of
from tilewise.sampling import Case, Inputs, draw

MAX_EPS = 2.0
RMS_RATIO, RMS_EPS = 1.5, 2.0
LARGE = 2**17  # elements of q from which dense attention's error is not luck


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


def why_not(inputs: Inputs, backend: str) -> Sequence[str]:
    """Every reason why a backend cannot take a call, by its capability table; tests skip with these words only."""
    return dispatch.capabilities(backend).why_not(problem_of(inputs))


def run(inputs: Inputs, backend: str | None = None) -> dict[str, Tensor]:
    """Outputs and gradients of a call: o, lse, max_logit, dq, dk, dv, and dbias, dalibi_slopes, dsinks if it has them."""
    named, leaves = leaves_of(inputs)
    q, k, v = (named.pop(name) for name in ("q", "k", "v"))
    options: dict[str, Any] = (
        inputs.options | named | {"return_lse": True, "return_max_logit": True, "backend": backend}
    )
    options["generator"] = torch.Generator().manual_seed(inputs.seed)
    if inputs.varlen:  # on a GPU the call cannot find them out
        cu = (inputs.options["cu_seqlens_q"], inputs.options.get("cu_seqlens_k", inputs.options["cu_seqlens_q"]))
        longest = (max(t.diff().tolist(), default=0) for t in cu)
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
    o, lse, max_logit = (attention_varlen if inputs.varlen else attention)(q, k, v, **options)
    return {"o": o, "lse": lse, "max_logit": max_logit} | gradients_of(inputs, o, lse, leaves)


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
    complaints = Judge(what.on("cpu")).complaints({name: t.cpu() for name, t in run(what, backend).items()})
    if complaints:
        end = f", backend={backend!r})" if what.repro.startswith("assert") else ""
        head = "import torch; from tilewise.testing import Case, assert_matches_reference; " if end else ""
        raise AssertionError("\n".join([*complaints, f"repro: {head}{what.repro}{end}"]))


class Verdict(NamedTuple):
    """What the rule of this module says of a function, and how far from float64 its o, dq, dk and dv are at most."""

    complaints: list[str]
    errors: dict[str, float]


def judge(what: Inputs, functions: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]) -> dict[str, Verdict]:
    """Apply the rule to attention that is computed elsewhere; the rule itself is computed where the tensors are.

    Args:
        what: a call without dropout; its `dlse` does not count.
        functions: by name, of q, k and v as in the call, returning o; they know its mask and other options.

    Example:
        >>> from torch.nn.functional import scaled_dot_product_attention as sdpa
        >>> from tilewise.testing import Case, judge, make_inputs
        >>> swap = lambda t: t.transpose(1, 2)
        >>> judge(make_inputs(Case()), {"sdpa": lambda q, k, v: swap(sdpa(swap(q), swap(k), swap(v)))})["sdpa"].complaints
        []
    """
    of_rule = judge_of(what)
    return {name: of_rule.verdict(function) for name, function in functions.items()}


def judge_of(what: Inputs) -> Judge:
    """The rule as `judge` applies it, for functions that are given one by one to its `verdict`."""
    return Judge(dataclasses.replace(what, dlse=torch.zeros_like(what.upstream()[1])))


class Judge:
    """The rule for one call: its exact results, and the errors of dense attention, which are found once."""

    def __init__(self, what: Inputs):
        self.what = what
        self.exact, self.sizes = expected(what)
        self._dense_errors = dense_errors(what, self.exact)

    def verdict(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Verdict:
        """Of a function as `judge` takes it, where `dlse` is 0."""
        named, leaves = leaves_of(self.what)
        o = function(named["q"], named["k"], named["v"])
        results = {"o": o.detach()} | gradients_of(self.what, o, torch.zeros(()), leaves)
        errors = {kind: _max(t.double() - self.exact[kind]) if t.numel() else 0.0 for kind, t in results.items()}
        return Verdict(self.complaints(results), errors)

    @cached_property
    def _lucky_errors(self) -> dict[str, tuple[Tensor, ...]]:
        return dense_errors(self.what, self.exact, lucky=True)

    def complaints(self, found: dict[str, Tensor]) -> list[str]:
        """What is wrong with results, in words."""
        complaints = _complaints(self.what, found, self.exact, self.sizes, self._dense_errors)
        if complaints and self.what.q.numel() < LARGE:  # the largest of many errors is not luck
            complaints = _complaints(self.what, found, self.exact, self.sizes, self._lucky_errors)
        return complaints


def _complaints(
    what: Inputs,
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    sizes: dict[str, Tensor],
    dense_errors: dict[str, tuple[Tensor, ...]],
) -> list[str]:
    """What is wrong with each tensor, in words."""
    saved = exact["lse"][exact["lse"].isfinite()]
    lse_error = torch.finfo(what.upstream()[1].dtype).eps * (_max(saved) if saved.numel() else 0.0)
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
        exact = dense(dataclasses.replace(inputs, options=inputs.options | {"dropout_p": 0.0}).to(torch.float64))
    return ((exact["dk"] == 0).all(-1) & (exact["dv"] == 0).all(-1))[..., None]


def _poisoned(inputs: Inputs) -> Inputs:
    """NaN wherever the float64 reference says that nothing depends on it."""
    run = dense(inputs.to(torch.float64))
    without_sinks = {name: option for name, option in inputs.options.items() if name != "sinks"}
    lse = dense(dataclasses.replace(inputs, options=without_sinks).to(torch.float64))["lse"]
    blind_q = (lse == -torch.inf).T if inputs.varlen else (lse == -torch.inf).transpose(1, 2)
    do, dlse = inputs.upstream()
    q, do = (t.masked_fill(blind_q[..., None], torch.nan) for t in (inputs.q, do))
    k, v = (t.masked_fill(_unseen_keys(inputs, run), torch.nan) for t in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v, do=do, dlse=dlse)
