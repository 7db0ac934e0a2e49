"""What `tilewise io --measure` runs under ncu: one pass of one system on a GPU, warmed up, between profiler marks.

python -m tilewise.io_model.workload --system triton --shape 64x16x1024x64 --pass backward
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import tilewise
from tilewise.cli.output import dtype_of
from tilewise.cli.problems import Shape

PASSES = ("forward", "backward")
WARM_UP = 3
#: Systems that are a backend of the product.
BACKENDS = {"flash3": "gluon", "triton": "triton"}


def attention_of(system: str, dropout: float, causal: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention on tensors (B, S, H, D) as a system computes it.

    Raises:
        ValueError: no such system, or it is not installed.
    """
    mask = tilewise.Causal() if causal else None
    if system == "standard":
        return lambda q, k, v: standard(q, k, v, dropout, causal)
    if system in BACKENDS:
        options: dict[str, Any] = {"dropout_p": dropout, "mask": mask, "backend": BACKENDS[system]}
        return lambda q, k, v: tilewise.attention(q, k, v, **options)
    if system == "flash1" and importlib.util.find_spec("tilewise.lab") is not None:
        if dropout:
            raise ValueError("flash1 knows no dropout")
        return lambda q, k, v: importlib.import_module("tilewise.lab").find("flash1", q.device.type)(q, k, v, mask)
    raise ValueError(
        f"{system!r} is no kernel here: measure standard, {', '.join(BACKENDS)}, or with tilewise.lab flash1; flash2 is "
        "triton's forward pass with flash3's schedule of the backward pass"
    )


def standard(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False) -> Tensor:
    """Standard attention with S and P in memory, one PyTorch operation per step."""
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    p = torch.nn.functional.dropout(torch.softmax(s, -1), dropout)
    return (p @ v.transpose(1, 2)).transpose(1, 2)


def main(
    system: Annotated[str, typer.Option(help="standard, flash1, flash3 or triton.")],
    shape: Annotated[str, typer.Option(help="BxHxSxD, with :causal behind it or not.")],
    which: Annotated[str, typer.Option("--pass", help="forward or backward.")] = "forward",
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "fp16",
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    device: Annotated[str, typer.Option(help="cuda; cpu only tries the program out.")] = "cuda",
) -> None:
    """Run one pass of one system between cudaProfilerStart and cudaProfilerStop.

    Example: `python -m tilewise.io_model.workload --system triton --shape 64x16x1024x64 --pass backward`
    """
    if which not in PASSES:
        raise ValueError(f"--pass must be forward or backward, got {which!r}")
    one, attention = Shape.parse(shape), attention_of(system, dropout, Shape.parse(shape).causal)
    g = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        size = (one.B, one.S, heads, one.D)
        return torch.randn(size, generator=g, device=device, dtype=dtype_of(dtype)).requires_grad_(which == "backward")

    q, k, v = normal(one.H), normal(one.Hkv), normal(one.Hkv)
    do = torch.randn_like(q)
    for round in range(WARM_UP + 1):
        marked = round == WARM_UP and device == "cuda"
        _step(attention, (q, k, v, do), which == "backward", marked)
        q.grad = k.grad = v.grad = None  # accumulating into old gradients would count as traffic


def _step(attention: Callable[..., Tensor], tensors: tuple[Tensor, ...], backward: bool, marked: bool) -> None:
    """One forward pass, or one backward pass after a forward pass that is not marked."""
    q, k, v, do = tensors
    if not backward:
        _mark(marked, True)
        attention(q, k, v)
    else:
        o = attention(q, k, v)
        _mark(marked, True)
        o.backward(do)
    _mark(marked, False)


def _mark(marked: bool, start: bool) -> None:
    if marked:
        torch.cuda.synchronize()
        (torch.cuda.profiler.start if start else torch.cuda.profiler.stop)()


if __name__ == "__main__":
    typer.run(main)
