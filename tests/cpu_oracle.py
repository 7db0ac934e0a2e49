"""A dense oracle for the CPU kernels, from nothing but a `Plan`, and the comparison with it."""

import math

import torch
from cpu_cases import F32, F64, Case, Inputs
from torch import Tensor

from tilewise import predicates
from tilewise.backends.base import Needs
from tilewise.backends.cpu.backward import backward
from tilewise.backends.cpu.forward import forward
from tilewise.backends.cpu.plan import Plan
from tilewise.testing import MAX_EPS, MAX_RATIO, RMS_RATIO


def visible(plan: Plan, b: int, h: int) -> Tensor:
    """The boolean mask of one sequence and head."""
    q_start, q_len, _, k_len, _ = plan.seq[b].tolist()
    n = torch.arange(k_len)
    rows = slice(b * plan.bounds_stride + q_start, b * plan.bounds_stride + q_start + q_len)
    mask = predicates.keep_interval(n, plan.lo[rows, None], plan.hi[rows, None])
    return mask if plan.keep is None else mask & plan.keep[b, h, :q_len, :k_len]


def dropout_mask(plan: Plan, b: int, h: int) -> Tensor:
    """Which entries of one sequence and head dropout keeps."""
    _, q_len, _, k_len, _ = plan.seq[b].tolist()
    first, second = predicates.dropout_row_keys(plan.seed, b, h, torch.arange(q_len)[:, None])
    return predicates.dropout_bits(first, second, torch.arange(k_len)) >= predicates.drop_threshold(plan.dropout_p)


def oracle(case: Case, plan: Plan, q: Tensor, k: Tensor, v: Tensor, slopes=None, sinks=None, bias=None):
    """(o, lse, max_logit) by dense products in the dtype of q."""
    packed = q.dim() == 3
    o = q.new_zeros(*q.shape[:-1], v.shape[-1])
    real = q.dtype if q.dtype in (F32, F64) else F32
    lse = q.new_full((q.shape[1], len(q)) if packed else (q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=real)
    highest = q.new_full((q.shape[-2],), -math.inf, dtype=real)
    for b, (q_start, q_len, k_start, k_len, shift) in enumerate(plan.seq.tolist()):
        for h in range(q.shape[-2] if q_len else 0):
            hkv, index_b = h // (q.shape[-2] // k.shape[-2]), () if packed else (b,)
            rows = (*index_b, slice(q_start, q_start + q_len), h)
            keys = (*index_b, slice(k_start, k_start + k_len), hkv)
            s = (q[rows] @ k[keys].T).to(real) * plan.softmax_scale
            if plan.softcap is not None:
                s = plan.softcap * torch.tanh(s / plan.softcap)
            if slopes is not None:
                s = s - slopes[b, h] * (torch.arange(q_len)[:, None] + shift - torch.arange(k_len)).abs()
            if bias is not None:
                s = s + bias.expand(len(plan.seq), q.shape[-2], plan.max_q, plan.max_k)[b, h, :q_len, :k_len].to(real)
            s = s.masked_fill(~visible(plan, b, h), -math.inf)
            highest[h] = max(highest[h], s.max() if k_len else -math.inf)
            column = [] if sinks is None else [sinks[h].expand(q_len, 1)]
            total = (
                torch.logsumexp(torch.cat([s, *column], 1), 1) if k_len or column else s.new_full((q_len,), -math.inf)
            )
            empty = total == -math.inf
            p = torch.exp(s - total.masked_fill(empty, 0.0)[:, None])
            if plan.dropout_p:
                p = p * dropout_mask(plan, b, h) / (1 - plan.dropout_p)
            o[rows] = (p.to(q.dtype) @ v[keys]).to(q.dtype)
            lse[(h, rows[0]) if packed else (b, h, rows[1])] = total
    return o, lse, highest


def run_oracle(case: Case, inputs: Inputs, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Outputs and gradients of the oracle, in fp64 or in the dtype of the inputs."""
    leaves = {
        n: (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_() for n, x in inputs.leaves.items()
    }
    o, lse, highest = oracle(case, inputs.plan, **leaves)
    seen = lse != -math.inf
    loss = (o * inputs.do.to(o.dtype)).sum() + (lse[seen] * inputs.dlse.to(lse.dtype)[seen]).sum()
    if loss.requires_grad:  # not where there is no query at all
        loss.backward()
    grads = {f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {"o": o.detach(), "lse": lse.detach(), "max_logit": highest.detach(), **grads}


def run_kernels(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    plan = inputs.plan
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        o, lse, highest = forward(inputs.q, inputs.k, inputs.v, plan, lanes=case.lanes)
        needs = Needs(True, True, True, "bias" in inputs.leaves, "slopes" in inputs.leaves, "sinks" in inputs.leaves)
        dlse = torch.where(lse == -math.inf, 0, inputs.dlse)
        grads = backward(inputs.do, dlse, inputs.q, inputs.k, inputs.v, o, lse, plan, needs, lanes=case.lanes)
    finally:
        torch.set_num_threads(before)
    named = {name: grad for name, grad in grads._asdict().items() if grad is not None}
    return {"o": o, "lse": lse, "max_logit": highest, **named}


def assert_close(name: str, ours: Tensor, exact: Tensor, dense: Tensor) -> None:
    """The ratios of `tilewise.testing`, without its terms for small problems.

    In fp64 the dense computation is the exact one: it gets 16 ulp of the largest value.
    """
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)} is not {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(ours[~finite].double(), exact[~finite]), f"{name}: other infinities"
    if not finite.any():
        return
    ours_err, dense_err = ((x[finite].double() - exact[finite]).abs() for x in (ours, dense))
    slack = (16 if dense.dtype == F64 else MAX_EPS) * torch.finfo(ours.dtype).eps * exact[finite].abs().max()
    allowed = MAX_RATIO * dense_err.max() + slack
    assert ours_err.max() <= allowed, f"{name}: {ours_err.max():.3e}, dense {dense_err.max():.3e}"
    if len(ours_err) < 16:  # a mean over so few is the largest error again, under a stricter ratio
        return
    rms, dense_rms = (e.square().mean().sqrt() for e in (ours_err, dense_err))
    assert rms <= RMS_RATIO * dense_rms + slack, f"{name}: rms {rms:.3e}, dense {dense_rms:.3e}"
