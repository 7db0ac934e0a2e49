"""The CPU kernels against a dense fp64 oracle written here, from nothing but a `Plan`."""

import dataclasses
import importlib.util
import math
import os
import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tilewise import predicates
from tilewise.backends.base import Needs
from tilewise.backends.cpu import key_tiles
from tilewise.backends.cpu.backward import backward
from tilewise.backends.cpu.forward import forward
from tilewise.backends.cpu.plan import Plan, TileRanges
from tilewise.backends.cpu.simd import Lanes

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """One call; `window` is (left, right) with None for no limit, `lengths` makes it packed: [(Sq, Sk), ...]."""

    B: int = 1
    Sq: int = 65
    Sk: int = 97
    H: int = 2
    Hkv: int = 2
    D: int = 40
    Dv: int = 40
    dtype: torch.dtype = F32
    window: tuple[int | None, int | None] = (None, None)
    lengths: tuple[tuple[int, int], ...] | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None  # the bias's dims that are not broadcast, of "bhmn"
    bias_dtype: torch.dtype | None = None
    sinks: bool = False
    keep: bool = False
    tiles: bool = False
    dropout_p: float = 0.0
    gain: float = 1.0  # scales q: large logits
    strided: bool = False
    threads: int = 1
    lanes: Lanes | None = None


CASES = {
    "plain": Case(),
    "causal": Case(window=(None, 0)),
    "causal, long queries": Case(Sq=130, Sk=33, window=(None, 0)),  # the first rows see no key
    "window": Case(Sq=200, Sk=200, window=(30, 5)),
    "one query": Case(Sq=1, Sk=513, D=128, Dv=128, H=8, Hkv=1),
    "one key": Case(Sq=77, Sk=1),
    "no keys": Case(Sk=0),
    "no queries": Case(Sq=0),
    "D 1, Dv 3": Case(D=1, Dv=3),
    "D 3, Dv 1": Case(D=3, Dv=1, dtype=F64),
    "D 64, Dv 128": Case(D=64, Dv=128, window=(None, 0)),
    "D 72, Dv 111": Case(D=72, Dv=111, dtype=BF16),
    "D 512": Case(Sq=30, Sk=50, D=512, Dv=512, H=1, Hkv=1),
    "long": Case(Sq=700, Sk=900, H=1, Hkv=1, D=64, Dv=64, window=(None, 0)),
    "fp64": Case(Sq=130, Sk=300, dtype=F64, window=(None, 0), D=64, Dv=64),
    "bf16": Case(Sq=130, Sk=300, dtype=BF16, window=(None, 0), D=64, Dv=64),
    "fp16": Case(Sq=130, Sk=300, dtype=F16, window=(None, 0), D=64, Dv=64),
    "GQA 3": Case(B=2, H=6, Hkv=2, window=(None, 0)),
    "GQA 4, bf16": Case(B=2, H=4, Hkv=1, dtype=BF16),
    "GQA 8": Case(H=8, Hkv=1, Sq=100, Sk=130, window=(20, 0)),
    "strided": Case(B=2, H=4, Hkv=2, strided=True),
    "strided, fp16": Case(B=2, H=4, Hkv=2, strided=True, dtype=F16),
    "packed": Case(lengths=((5, 9), (0, 4), (130, 200), (7, 0), (33, 33)), H=4, window=(None, 0)),
    "packed, everything": Case(
        lengths=((40, 60), (100, 90)), H=4, window=(50, 3), softcap=20.0, alibi=True, sinks=True, dropout_p=0.2
    ),
    "softcap": Case(softcap=5.0),
    "softcap, fp64": Case(softcap=0.7, dtype=F64, gain=10.0),
    "alibi": Case(B=2, alibi=True, window=(None, 0)),
    "sinks": Case(B=2, H=4, sinks=True, window=(None, 0), Sq=130, Sk=60),
    "bias": Case(B=2, bias="bhmn"),
    "bias over heads": Case(B=2, H=4, bias="bmn"),
    "bias over the batch": Case(B=3, H=4, bias="hmn", window=(None, 0)),
    "bias over all": Case(B=2, H=4, bias="mn", threads=2, Sq=300, Sk=400),
    "bias over keys": Case(B=2, H=4, bias="hm"),
    "bias over queries": Case(B=2, H=4, bias="bn", threads=2, Sq=300, Sk=500),
    "bias bf16": Case(bias="hmn", dtype=BF16, bias_dtype=BF16),
    "bias fp32 in fp64": Case(bias="hmn", dtype=F64, bias_dtype=F32),
    "keep": Case(B=2, keep=True),
    "tiles and keep": Case(Sq=150, Sk=170, H=4, Hkv=2, keep=True, tiles=True, window=(None, 0)),
    "dropout": Case(B=2, H=4, dropout_p=0.3),
    "dropout, fp64": Case(H=4, dropout_p=0.3, dtype=F64),
    "logits of 1e5": Case(gain=3e4, window=(None, 0)),
    "everything": Case(
        B=2,
        H=4,
        Sq=100,
        Sk=130,
        window=(60, 2),
        softcap=10.0,
        alibi=True,
        bias="hmn",
        sinks=True,
        keep=True,
        dropout_p=0.1,
        threads=2,
    ),
    "bf16 by fp32": Case(Sq=130, Sk=300, dtype=BF16, window=(None, 0), D=64, Dv=64, lanes=Lanes(32, 8)),
    "bf16, D 1, Dv 3": Case(D=1, Dv=3, dtype=BF16),
    "bf16, D 512": Case(Sq=30, Sk=50, D=512, Dv=512, H=1, Hkv=1, dtype=BF16),
    "bf16, long": Case(Sq=700, Sk=900, H=1, Hkv=1, D=64, Dv=64, window=(100, 0), dtype=BF16, threads=2),
    "bf16, strided": Case(B=2, H=4, Hkv=2, strided=True, dtype=BF16),
    "bf16, logits of 1e5": Case(gain=3e4, window=(None, 0), dtype=BF16),
    "bf16, tiles": Case(Sq=150, Sk=170, H=4, Hkv=2, keep=True, tiles=True, window=(None, 0), dtype=BF16),
    "bf16, packed": Case(lengths=((5, 9), (0, 4), (130, 200), (7, 0), (33, 33)), H=4, window=(None, 0), dtype=BF16),
    "bf16, everything": Case(
        lengths=((40, 60), (100, 90)),
        H=4,
        window=(50, 3),
        softcap=20.0,
        alibi=True,
        bias="hmn",
        sinks=True,
        dropout_p=0.2,
        dtype=BF16,
    ),
    "4 lanes": Case(lanes=Lanes(32, 4), window=(None, 0), softcap=9.0, bias="mn", keep=True, dropout_p=0.1),
    "16 lanes": Case(lanes=Lanes(32, 16), window=(None, 0), softcap=9.0, bias="mn", keep=True, dropout_p=0.1),
    "2 lanes, fp64": Case(lanes=Lanes(64, 2), dtype=F64, window=(None, 0)),
    "two threads": Case(Sq=700, Sk=700, H=1, Hkv=1, window=(None, 0), threads=2),
}


@dataclass
class Inputs:
    """Tensors of a case; `leaves` are those whose gradients are compared."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: Plan
    do: Tensor
    dlse: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)


def sequence_table(case: Case) -> Tensor:
    """Plan.seq: one row per sequence."""
    if case.lengths is None:
        return torch.tensor([[0, case.Sq, 0, case.Sk, case.Sk - case.Sq]] * case.B)
    rows, q_start, k_start = [], 2, 1  # tokens before the first sequence belong to none
    for q_len, k_len in case.lengths:
        rows.append([q_start, q_len, k_start, k_len, k_len - q_len])
        q_start, k_start = q_start + q_len, k_start + k_len
    return torch.tensor(rows)


def intervals(case: Case, seq: Tensor) -> tuple[Tensor, Tensor]:
    """Plan.lo and Plan.hi, for every query row in order."""
    lows, highs = [], []
    left, right = case.window
    for _, q_len, _, k_len, shift in seq.tolist() if case.lengths else seq[:1].tolist():
        m = torch.arange(q_len) + shift
        lo = torch.zeros_like(m) if left is None else (m - left).clamp(0, k_len)
        hi = torch.full_like(m, k_len) if right is None else (m + right + 1).clamp(0, k_len)
        lows.append(torch.minimum(lo, hi))
        highs.append(hi)
    before = torch.zeros(int(seq[0, 0]), dtype=torch.int64)
    return torch.cat([before, *lows]).int(), torch.cat([before, *highs]).int()


def make_tiles(keep: Tensor, block_m: int, block_n: int) -> TileRanges:
    """Ranges of the tiles that `keep` touches."""
    batch, heads, rows, keys = keep.shape
    starts, ends, full = [], [], []
    table = torch.zeros(batch, heads, -(-rows // block_m) + 1, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads):
            table[b, h, 0] = len(starts)
            for i in range(-(-rows // block_m)):
                for start in range(0, keys, block_n):
                    end = min(start + block_n, keys)
                    tile = keep[b, h, i * block_m : (i + 1) * block_m, start:end]
                    if tile.any():
                        starts.append(start), ends.append(end), full.append(bool(tile.all()))
                table[b, h, i + 1] = len(starts)
    as_int = [torch.tensor(x, dtype=torch.int32) for x in (starts, ends)]
    return TileRanges(block_m, table, *as_int, torch.tensor(full, dtype=torch.uint8))


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=case.dtype):
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

    seq = sequence_table(case)
    max_q, max_k = (int(seq[:, c].max()) for c in (1, 3))
    rows_q, rows_k = ((case.B, case.Sq), (case.B, case.Sk)) if case.lengths is None else ((200,), (350,))
    real = F64 if case.dtype == F64 else F32
    if case.strided:  # heads outside, and one batch shared by all
        q = normal(case.B, case.H, case.Sq, case.D).transpose(1, 2)
        k = normal(1, case.Sk, case.Hkv, 2 * case.D)[..., 1 : case.D + 1].expand(case.B, -1, -1, -1)
        v = normal(case.B, case.Sk, case.Dv, case.Hkv).transpose(2, 3)
    else:
        q = normal(*rows_q, case.H, case.D) * case.gain
        k, v = normal(*rows_k, case.Hkv, case.D), normal(*rows_k, case.Hkv, case.Dv)
    batch = len(seq)
    leaves = {"q": q, "k": k, "v": v}
    extra = {}
    if case.alibi:
        leaves["slopes"] = extra["slopes"] = normal(batch, case.H, dtype=real).abs() * 0.1
    if case.sinks:
        leaves["sinks"] = extra["sinks"] = normal(case.H, dtype=real)
    if case.bias is not None:
        sizes = dict(zip("bhmn", (batch, case.H, max_q, max_k), strict=True))
        shape = [size if dim in case.bias else 1 for dim, size in sizes.items()]
        leaves["bias"] = normal(*shape, dtype=case.bias_dtype or real)
        extra["bias"] = leaves["bias"].expand(*sizes.values())
    if case.keep:
        extra["keep"] = torch.rand(batch, 1, max_q, max_k, generator=generator).gt(0.3).expand(-1, case.H, -1, -1)
    if case.tiles:
        keep = torch.rand(batch, case.H, max_q, max_k, generator=generator) > 0.3
        for n in range(0, max_k, 60):  # some tiles empty, some full
            keep[:, :, : 64 + n, n : n + 30] = n % 120 == 0
        extra.update(keep=keep, tiles=make_tiles(keep, 64, 30))
    lo, hi = intervals(case, seq)
    scale = case.D**-0.5
    plan = Plan(
        seq=seq,
        max_q=max_q,
        max_k=max_k,
        lo=lo,
        hi=hi,
        bounds_stride=0,
        softmax_scale=scale,
        **dict(softcap=case.softcap, dropout_p=case.dropout_p, seed=-12345678901234567, **extra),
    )
    do = normal(*rows_q, case.H, case.Dv)
    shape = (case.H, *rows_q) if case.lengths else (case.B, case.H, case.Sq)
    return Inputs(q, k, v, plan, do, normal(*shape, dtype=real), leaves)


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
    """Our error is at most twice that of the dense computation in the same dtype, and 2 ulp of the largest value.

    In fp64 the dense computation is the exact one: it gets 16 ulp of the largest value.
    """
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)} is not {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(ours[~finite].double(), exact[~finite]), f"{name}: other infinities"
    if not finite.any():
        return
    ours_err, dense_err = ((x[finite].double() - exact[finite]).abs() for x in (ours, dense))
    slack = (16 if dense.dtype == F64 else 2) * torch.finfo(ours.dtype).eps * exact[finite].abs().max()
    assert ours_err.max() <= 2 * dense_err.max() + slack, f"{name}: {ours_err.max():.3e}, dense {dense_err.max():.3e}"
    rms, dense_rms = (e.square().mean().sqrt() for e in (ours_err, dense_err))
    assert rms <= 2 * dense_rms + slack, f"{name}: rms {rms:.3e}, dense {dense_rms:.3e}"


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle(name):
    case = CASES[name]
    inputs = make_inputs(case)
    exact, dense, ours = run_oracle(case, inputs, F64), run_oracle(case, inputs, None), run_kernels(case, inputs)
    assert exact.keys() == ours.keys()
    for output, value in ours.items():
        assert_close(output, value, exact[output], dense[output])


def without_masked(case: Case, poison: float) -> dict[str, Tensor]:
    """A causal call whose last ten keys no row sees, and ten more only the last rows; `poison` sits in those."""
    inputs = make_inputs(case)
    hi = inputs.plan.hi.clamp(max=case.Sk - 10)
    for x in (inputs.k, inputs.v):
        x[:, case.Sk - 10 :] = poison
    return run_kernels(case, dataclasses.replace(inputs, plan=dataclasses.replace(inputs.plan, hi=hi)))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(("D", "softcap"), [(40, None), (37, 5.0)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_unseen_keys_do_not_leak(dtype, poison, D, softcap):
    case = Case(Sq=150, Sk=150, D=D, Dv=D, window=(None, 0), softcap=softcap, dtype=dtype)
    clean, poisoned = without_masked(case, 0.0), without_masked(case, poison)
    for name in clean:
        assert torch.equal(clean[name], poisoned[name]), name


@pytest.mark.parametrize("where", ["k", "v", "bias"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_bad_key_reaches_only_rows_that_see_it(dtype, where):
    case, key = Case(Sq=150, Sk=150, window=(20, 0), bias="mn", dtype=dtype), 77
    clean, bad = make_inputs(case), make_inputs(case)
    if where == "bias":
        bad.leaves["bias"][:, :, :, key] = math.nan
    else:
        getattr(bad, where)[:, key] = math.nan
    expected, got = run_kernels(case, clean), run_kernels(case, bad)
    rows = torch.arange(150)
    sees = (rows >= key) & (rows <= key + 20)
    for name in ("o", "dq"):
        assert torch.equal(expected[name][:, ~sees], got[name][:, ~sees]), name
    assert got["o"][:, sees].isnan().all()
    touched = (rows >= key - 20) & (rows <= key + 20)  # keys that one of those rows sees
    for name in ("dk", "dv"):
        assert torch.equal(expected[name][:, ~touched], got[name][:, ~touched]), name


@pytest.mark.parametrize("case", [Case(Sq=500, Sk=700), Case(Sq=500, Sk=500, H=4, window=(150, 3)), CASES["packed"]])
def test_held_key_tiles_change_nothing(case, monkeypatch):
    """A thread that stays with a head packs its keys once: the same bits, Inf and NaN included, as packing per block."""
    inputs, again = make_inputs(case), make_inputs(case)
    for x in (inputs, again):
        x.k[..., 150, 1, 5], x.v[..., 120, 0, 7] = math.nan, math.inf
    held = run_kernels(case, inputs)
    monkeypatch.setattr(key_tiles, "KEPT_BYTES", 0)
    for name, value in run_kernels(case, again).items():
        torch.testing.assert_close(held[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_plan_serves_tensors_of_other_strides_and_threads():
    case = Case(B=2, Sq=150, Sk=150, H=4, Hkv=2, window=(None, 0))
    inputs = make_inputs(case)
    expected = run_kernels(case, inputs)
    strided = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "do")}
    got = run_kernels(dataclasses.replace(case, threads=2), dataclasses.replace(inputs, **strided))
    for name in ("o", "lse", "max_logit"):
        assert torch.equal(expected[name], got[name]), name


def test_bias_of_minus_infinity_masks():
    case = Case(bias="mn")
    inputs = make_inputs(case)
    inputs.leaves["bias"][:, :, 3] = -math.inf  # row 3 sees nothing
    inputs.leaves["bias"][:, :, 5, ::2] = -math.inf
    inputs.leaves["bias"][:, :, 6] = torch.finfo(F32).min  # finite: uniform over all keys
    got = run_kernels(case, inputs)
    assert (got["o"][:, 3] == 0).all() and (got["lse"][:, :, 3] == -math.inf).all() and (got["dq"][:, 3] == 0).all()
    torch.testing.assert_close(got["o"][0, 6], inputs.v[0].mean(0))
    assert all(x.isfinite().all() for name, x in got.items() if name not in ("lse", "max_logit"))


@pytest.mark.parametrize("name", ["packed, everything", "bias over all", "two threads"])
def test_bitwise_reproducible(name):
    case = dataclasses.replace(CASES[name], threads=3)
    inputs = make_inputs(case)
    first, second = run_kernels(case, inputs), run_kernels(case, inputs)
    for output in first:
        assert torch.equal(first[output], second[output]), output


def test_only_needed_gradients():
    inputs = make_inputs(Case())
    o, lse, _ = forward(inputs.q, inputs.k, inputs.v, inputs.plan)
    call = (inputs.do, None, inputs.q, inputs.k, inputs.v, o, lse, inputs.plan)
    full = backward(*call, Needs(True, True, True, False, False, False))
    for name in ("dq", "dk", "dv"):
        needs = Needs(*(field_name == name for field_name in Needs._fields))
        grads = backward(*call, needs)._asdict()
        assert torch.equal(grads.pop(name), getattr(full, name))
        assert all(grad is None for grad in grads.values())


def test_no_output_gradient():
    inputs = make_inputs(Case())
    o, lse, _ = forward(inputs.q, inputs.k, inputs.v, inputs.plan)
    call = (inputs.q, inputs.k, inputs.v, o, lse, inputs.plan, Needs(True, True, True, False, False, False))
    only_lse = backward(None, inputs.dlse, *call)
    zeros = backward(torch.zeros_like(o), inputs.dlse, *call)
    assert all(torch.equal(a, b) for a, b in zip(only_lse[:3], zeros[:3], strict=True))


def test_concurrent_callers():
    """Several Python threads call at once, each with parallel regions of its own."""
    case = Case(Sq=400, Sk=400, H=4, Hkv=4, threads=2)
    inputs = [make_inputs(case, seed) for seed in range(4)]
    expected = [run_kernels(case, x) for x in inputs]
    got = [None] * 4

    def work(i):
        for _ in range(3):
            got[i] = run_kernels(case, inputs[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for want, have in zip(expected, got, strict=True):
        assert all(torch.equal(want[name], have[name]) for name in want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_fork():
    case = Case(Sq=400, Sk=400, H=4, Hkv=4, threads=2)
    inputs = make_inputs(case)
    expected = run_kernels(case, inputs)["o"]
    child = os.fork()
    if child == 0:
        o, _, _ = forward(inputs.q, inputs.k, inputs.v, inputs.plan)
        same = (o.numpy() == expected.numpy()).all()  # torch's own parallel loops hang after fork
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_edited_helpers_leave_no_stale_cache(tmp_path):
    """Numba's disk cache knows only the kernel's own file; the hash of all sources in `Lanes` tells it of the others."""
    path = tmp_path / "cached_kernel.py"
    path.write_text(
        "from tilewise.backends.cpu.launch import compile_kernel\n"
        "from tilewise.backends.cpu.simd import Lanes, vector_width\n\n\n"
        "def build(sources):\n"
        "    lanes = Lanes(32, 4, sources)\n\n"
        "    def kernel(address):\n"
        "        vector_width(lanes)\n\n"
        '    return compile_kernel(kernel, "test").stats\n'
    )
    module_spec = importlib.util.spec_from_file_location("cached_kernel", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert module.build("before").cache_misses and module.build("before").cache_hits
    assert module.build("after").cache_misses
