"""The GPU's side of `tilewise bench`: TFLOP/s on a grid of problems, next to PyTorch's own kernels in the same run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise.cli import measure
from tilewise.cli.output import console, short, stderr, table
from tilewise.cli.problems import Shape, ours
from tilewise.testing import Inputs, Judge, judge_of

TOKENS, HIDDEN = 16384, 2048
IDLE, BURST = 0.12, 0.025  # seconds: without idling the power limit decides who is fast
DEVICE = "cuda"
MOST_COMPILED = 1024  # sizes and masks of FlexAttention in one process
PASSES = {"forward": 1.0, "backward": 2.5}  # FLOPs of a pass, in those of the forward pass
OURS, PORTABLE = "tilewise", "triton"

#: B x S = 16,384 tokens, H x D = 2048: the grid of the FlashAttention papers.
GRID = tuple(
    Shape(max(1, TOKENS // S), HIDDEN // D, HIDDEN // D, S, D, causal)
    for D in (64, 128, 256)
    for S in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (True, False)
)


def _sdpa(backend: SDPBackend) -> Callable[[Shape], Callable[..., Tensor]]:
    def of(shape: Shape) -> Callable[..., Tensor]:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.H != shape.Hkv)

        return attention

    return of


def compiled_flex() -> Callable[..., Any]:
    """FlexAttention for tensors of one size, whose backward pass can be timed again and again."""
    from torch._dynamo import config as dynamo  # noqa: PLC0415
    from torch._functorch import config  # noqa: PLC0415
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    config.donated_buffer = False  # by default a backward pass may write over what it was given, once
    # By default the ninth size or mask in one process would run uncompiled, and with a warning only.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = MOST_COMPILED
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(shape: Shape) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415  imports a compiler

    compiled = compiled_flex()
    mask = None
    if shape.causal:
        mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, shape.S, shape.S)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=shape.H != shape.Hkv)  # pyright: ignore


@lru_cache(maxsize=1)
def _hidden(S: int, device: torch.device) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool, device=device).triu(1)


def _eager(shape: Shape) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * shape.D**-0.5
        if shape.causal:
            s = s.masked_fill_(_hidden(shape.S, s.device), -torch.inf)
        return torch.softmax(s, -1) @ v

    return attention


def _portable(shape: Shape) -> Callable[..., Tensor]:
    return lambda q, k, v: tilewise.attention(q, k, v, causal=shape.causal, layout="bhsd", backend="triton")


#: What we compare with: functions of q, k, v in (B, H, S, D). One is our own: what GPUs that are not Hopper's get.
PEERS: dict[str, Callable[[Shape], Callable[..., Tensor]]] = {
    PORTABLE: _portable,
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "eager": _eager,
}


def bench(
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    peers: Sequence[str],
    rounds: int,
    on_problem: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Check and time every problem; prints a table, returns what the JSON holds.

    `on_problem` is given as much as there is after each problem: a run cut short leaves its part.
    """
    results, refused = [], []
    problems = [(shape, dtype) for dtype in dtypes for shape in shapes]
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        checking = progress.add_task("compiling and checking", total=len(problems))
        right = []
        complaints = measure.in_processes(_complaint, [(*problem, peers) for problem in problems], measure.WORKERS)
        for (shape, dtype), complaint in zip(problems, complaints, strict=True):
            if complaint:
                refused.append(f"{shape} {short(dtype)}: {complaint}")
                stderr.print(f"refused: {refused[-1]}", style="bold red", markup=False)
            else:
                right.append((shape, dtype))
            progress.advance(checking)
        task = progress.add_task("measuring", total=len(right))
        for shape, dtype in right:
            progress.update(task, description=f"{shape} {short(dtype)}")
            results += _measure(shape, dtype, _draw(shape, dtype), peers, rounds)
            progress.advance(task)
            on_problem(_data(results, refused, peers, rounds))
    _show(results, peers)
    return _data(results, refused, peers, rounds)


def _data(results: list[dict[str, Any]], refused: list[str], peers: Sequence[str], rounds: int) -> dict[str, Any]:
    about = {"gpu": torch.cuda.get_device_name(), "idle_s": IDLE, "burst_s": BURST, "rounds": rounds}
    return about | {"refused": refused, "geometric_means": _means(results, peers), "results": results}


def _draw(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and do, (B, S, H, D)."""
    return [torch.randn(shape.B, shape.S, shape.H, shape.D, device=DEVICE, dtype=dtype) for _ in "qkvo"]


def _complaint(shape: Shape, dtype: torch.dtype, peers: Sequence[str]) -> str:
    """What is wrong, be it that our kernels do not even start; "" if nothing: other problems are still timed."""
    try:
        return _check(shape, dtype, peers)
    except Exception as error:  # whatever a kernel's compiler throws
        return measure.first_line(error)


def _check(shape: Shape, dtype: torch.dtype, peers: Sequence[str]) -> str:
    """What is wrong with our outputs and gradients of one head; "" if nothing.

    What is compiled for the problem lies in a cache on disk after this.
    """
    tensors = _draw(shape, dtype)
    attends = {OURS: ours(shape)} | ({PORTABLE: swapped(_portable(shape))} if PORTABLE in peers else {})
    rule = judge_head(shape, *tensors)
    verdicts = {who: rule.verdict(attend) for who, attend in attends.items()}
    for attend in attends.values():
        measure.passes(attend, *tensors[:3], do=tensors[3])["backward"]()
    if "flex" in peers:
        with suppress(RuntimeError, torch.OutOfMemoryError):  # `_measure` says so
            measure.passes(swapped(_flex(shape)), *tensors[:3], do=tensors[3])["backward"]()
    return "; ".join(f"{who}: {line}" for who, verdict in verdicts.items() for line in verdict.complaints)


def swapped(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention on tensors (B, H, S, D) as one on (B, S, H, D)."""
    return lambda *x: attention(*(t.transpose(1, 2) for t in x)).transpose(1, 2)


def judge_head(shape: Shape, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Judge:
    """The rule of `tilewise.testing`, for functions of the first head of the first sequence: what a check can afford."""
    q, k, v, do = (x[:1, :, :1] for x in (q, k, v, do))
    return judge_of(Inputs(q, k, v, {"causal": shape.causal}, do=do))


def _measure(
    shape: Shape, dtype: torch.dtype, tensors: Sequence[Tensor], peers: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    theirs = [x.transpose(1, 2).contiguous() for x in tensors]
    contestants = {OURS: measure.passes(ours(shape), *tensors[:3], do=tensors[3])}
    missing = {}
    for peer in peers:
        try:
            made = measure.passes(PEERS[peer](shape), *theirs[:3], do=theirs[3])
            made["forward"]()
            made["backward"]()
            contestants[peer] = made
        except (RuntimeError, torch.OutOfMemoryError) as error:  # a peer that cannot take this problem
            missing[peer] = measure.first_line(error)
    flops = 4.0 * shape.B * shape.H * shape.S * shape.S * shape.D * (0.5 if shape.causal else 1.0)
    found = []
    for name, share in PASSES.items():
        seconds: dict[str, list[float]] = {who: [] for who in contestants}
        for i in range(rounds):
            for who in list(contestants)[:: 1 if i % 2 == 0 else -1]:
                seconds[who].append(burst(contestants[who][name]))
        rates = {who: share * flops / statistics.median(times) / 1e12 for who, times in seconds.items()}
        head = {"shape": str(shape), "dtype": short(dtype), "pass": name, "flops": share * flops}
        found.append(head | {"tflops": rates, "seconds": seconds, "missing": missing})
    return found


def burst(function: Callable[[], Any]) -> float:
    """Seconds of one call on the GPU: the mean over a burst after a rest."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    function()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    calls = max(2, round(BURST / (start.elapsed_time(end) * 1e-3)))
    time.sleep(IDLE)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def _means(results: Sequence[dict[str, Any]], peers: Sequence[str]) -> dict[str, float]:
    """Geometric means of our rates over each peer's, by pass."""
    found = {}
    for name in PASSES:
        for who, title in ((OURS, name), (PORTABLE, f"{name} of {PORTABLE}")):
            for peer in peers:
                rates = [r["tflops"] for r in results if r["pass"] == name and {who, peer} <= r["tflops"].keys()]
                if rates and who != peer:
                    logs = [math.log(rate[who] / rate[peer]) for rate in rates]
                    found[f"{title} over {peer}"] = math.exp(sum(logs) / len(logs))
    return found


def _show(results: Sequence[dict[str, Any]], peers: Sequence[str]) -> None:
    columns = ["shape", "dtype", "pass", OURS, *peers, "over the best"]
    rows = []
    for r in results:
        rates = r["tflops"]
        best = max((rates[peer] for peer in peers if peer in rates and peer != PORTABLE), default=math.nan)
        shown = [f"{rates[who]:.0f}" if who in rates else "-" for who in (OURS, *peers)]
        rows.append((r["shape"], r["dtype"], r["pass"], *shown, f"{rates[OURS] / best:.2f}x"))
    console.print(table("TFLOP/s, bursts after a rest, in turns", columns, rows, left=3))
    means = _means(results, peers)
    console.print("geometric means: " + ", ".join(f"{name} {mean:.2f}x" for name, mean in means.items()))
