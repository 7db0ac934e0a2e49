"""What all GPU tests share: the device, the backends on it, and calls made there."""

import os

import pytest
import torch

from tilewise import attention, attention_varlen, dispatch
from tilewise.testing import Case, Inputs, make_inputs, why_not

#: With TRITON_INTERPRET=1 the tests that need no GPU of their own run on the CPU, slowly: to try them out.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HAS_GPU = INTERPRETED or torch.cuda.is_available()
BACKENDS = [row.name for row in dispatch.BACKENDS if row.device == "cuda" or (INTERPRETED and row.name == "triton")]
CAUSAL = (("causal",),)
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # Triton 3.6's interpreter multiplies bfloat16 matrices wrongly

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here")


def on_gpu(case: Case, backend: str, dtype: torch.dtype = HALF, seed: int = 0) -> Inputs:
    """The tensors of a case on the GPU; the test is skipped where the backend does not take the call."""
    return able(make_inputs(case, dtype, seed).on(DEVICE), backend)


def able(inputs: Inputs, backend: str) -> Inputs:
    """The inputs; the test is skipped where the backend does not take the call."""
    if reasons := why_not(inputs, backend):
        pytest.skip(f"{backend}: " + "; ".join(reasons))
    return inputs


def call_of(inputs: Inputs, backend: str, deterministic: bool = True):
    """(function, leaves): outputs and gradients of the call as a function of nothing, which reads `leaves` anew each time.

    With `deterministic` the bits of all of them repeat. Nothing in it waits for the device, and dropout draws from the
    device's default generator.
    """
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.tensors().items()}
    do, dlse = (t.clone() for t in inputs.upstream())
    options = {**inputs.options, **leaves, "return_lse": True, "backend": backend, "deterministic": deterministic}
    q, k, v = (options.pop(name) for name in ("q", "k", "v"))
    attend = attention
    if inputs.varlen:
        attend = attention_varlen
        for side in "qk":
            options[f"max_seqlen_{side}"] = max(options[f"cu_seqlens_{side}"].diff().tolist())

    def function() -> list[torch.Tensor]:
        o, lse = attend(q, k, v, **options)
        return [o, lse, *torch.autograd.grad((o, lse), list(leaves.values()), (do, dlse))]

    return function, leaves


def same(found, expected) -> bool:
    """Whether all tensors are equal bit for bit."""
    return all(map(torch.equal, found, expected))


def refill(leaves: dict[str, torch.Tensor], seed: int) -> None:
    """Other values in the same tensors."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in leaves.values():
            t.copy_(torch.randn(t.shape, generator=g).to(t.dtype))
