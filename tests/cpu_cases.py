"""Calls of the CPU kernels: tensors and a `Plan` for each, below everything that `tilewise.attention` does."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

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
