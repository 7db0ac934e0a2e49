"""Sizes at which 32 bits or 65,535 blocks no longer do: numbers of heads and sequences, elements, strides.

Some fill a large GPU's memory: run this file in one process (report.py sees to that).
"""

import pytest
import torch
import torch.nn.functional as F
from lane import CAUSAL, DEVICE, able, needs_cuda, on_gpu, same
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import attention, attention_varlen
from tilewise.testing import Case, Inputs, assert_matches_reference

MANY = 70_000
BEYOND = 2**31


def _needs_memory(gib: float) -> None:
    if torch.cuda.mem_get_info()[1] < gib * 2**30:
        pytest.skip(f"needs a GPU with {gib:.0f} GiB")


def _random(*shapes: tuple[int, ...], dtype=torch.bfloat16) -> list[Tensor]:
    g = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=DEVICE, generator=g) for shape in shapes]


def _results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, backend: str, **options) -> list[Tensor]:
    """o, lse and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = attention(*leaves, **options, return_lse=True, backend=backend)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether results are equal bit for bit; dq, which Hopper kernels sum in any order, but for rounding."""
    torch.testing.assert_close(found[2], expected[2])
    return same(found[:2] + found[3:], expected[:2] + expected[3:])


# ---- more than 65,535 ----


@pytest.mark.parametrize(
    "case",
    [
        Case("sequences", B=MANY, Sq=3, Sk=4, H=1, D=16, mask=CAUSAL),
        Case("heads", B=1, Sq=5, Sk=4, H=MANY, D=16, mask=CAUSAL, sinks=True, alibi="H"),
        Case("kv_heads", B=1, Sq=3, Sk=5, H=2 * MANY, Hkv=MANY, D=16, mask=CAUSAL),
        Case("bias", B=MANY, Sq=3, Sk=4, H=1, D=16, bias="BHQK"),
    ],
    ids=lambda case: case.name,
)
def test_many_sequences_and_heads(case, backend):
    assert_matches_reference(on_gpu(case, backend, torch.float32), backend=backend)


def test_many_packed_sequences(backend):
    q, k, v = _random(*[(2 * MANY, 1, 16)] * 3)
    cu = torch.arange(0, 2 * MANY + 1, 2, dtype=torch.int32, device=DEVICE)
    packed = attention_varlen(q, k, v, cu, None, 2, 2, causal=True, backend=backend)
    dense = attention(*(t.view(MANY, 2, 1, 16) for t in (q, k, v)), causal=True, backend=backend)
    torch.testing.assert_close(packed.view(MANY, 2, 1, 16), dense)


# ---- strides and elements beyond 2^31 ----


@needs_cuda
@pytest.mark.parametrize(
    "strides", [(BEYOND + 16, 32, 16), (32, BEYOND // 4, 16), (96, 16, BEYOND + 16)], ids=["sequences", "rows", "heads"]
)
def test_strides_beyond_32_bits(strides, backend):
    _needs_memory(40)
    shape = (2, 6, 2, 16)

    def far(t: Tensor) -> Tensor:
        memory = torch.empty(
            1 + sum((n - 1) * s for n, s in zip(shape, (*strides, 1), strict=True)), dtype=t.dtype, device=DEVICE
        )
        return memory.as_strided(shape, (*strides, 1)).copy_(t)

    near = _random(*[shape] * 4)
    expected = _results(*near, backend, causal=True)
    found = _results(*map(far, near), backend, causal=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@needs_cuda
def test_rows_of_very_many_heads(backend):
    """One row of all heads has 2^24 elements: tiles of 128 rows span more than 2^31."""
    _needs_memory(100)
    shape = (1, 130, MANY, 256)
    tensors = _random(*[shape] * 4)
    found = _results(*tensors, backend, causal=True)
    for heads in (slice(0, 2), slice(MANY - 2, MANY)):
        expected = _results(*(t[:, :, heads].contiguous() for t in tensors), backend, causal=True)
        parts = [t[:, heads] if t.dim() == 3 else t[:, :, heads] for t in found]
        assert _agree(parts, expected)


@needs_cuda
@pytest.mark.parametrize("S", [17476, 17477])
def test_B87_elements_just_below_and_above_32_bits(S, backend):
    """16 x S x 60 x 128 elements: each sequence as in a call of its own, and one head against dense attention in float64."""
    _needs_memory(80)
    tensors = _random(*[(16, S, 60, 128)] * 4)
    found = _results(*tensors, backend, causal=True)
    for b in (0, 7, 15):
        assert _agree([t[b : b + 1] for t in found], _results(*(t[b : b + 1] for t in tensors), backend, causal=True))
    one = [t[15:, :, 59:] for t in tensors]
    exact, dense = (_dense_head(*(t.to(dtype) for t in one)) for dtype in (torch.float64, torch.bfloat16))
    for x, y, ref in zip([found[0], *found[2:]], dense, exact, strict=True):
        limit = 2 * (y.double() - ref).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * ref.abs().max()
        assert (x[15:, :, 59:].double() - ref).abs().max() <= limit


def _dense_head(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return [t.transpose(1, 2) for t in (o.detach(), *torch.autograd.grad(o, leaves, do.transpose(1, 2)))]


@needs_cuda
@pytest.mark.parametrize("kind", ["bias", "dense"])
def test_score_sized_tensors_of_more_than_32_bits(kind, backend):
    """A bias, its gradient, and a boolean mask of 47,000 x 47,000; the last rows against float64."""
    _needs_memory(60)
    S, last = 47_000, slice(-16, None)
    q, k, v, do = (t.requires_grad_() for t in _random(*[(1, S, 1, 64)] * 4))
    if kind == "bias":
        (full,) = _random((S, S))
        options = {"bias": full.requires_grad_()}
    else:
        full = torch.rand(S, S, device=DEVICE, dtype=torch.bfloat16) < 0.5
        options = {"mask": full}
    able(Inputs(q, k, v, options), backend)
    o = attention(q, k, v, **options, backend=backend)
    grads = torch.autograd.grad(o, [q, full] if kind == "bias" else [q], do)
    x, y, z, g = (t.detach().double()[0, :, 0] for t in (q, k, v, do))
    s = x[last] @ y.T / 8
    s = s + full[last].double() if kind == "bias" else s.masked_fill(~full[last], -torch.inf)
    p = s.softmax(-1)
    exact = p @ z
    ds = p * (g[last] @ z.T - (g[last] * exact).sum(-1, keepdim=True))
    for found, ref in [(o[0, last, 0], exact), (grads[0][0, last, 0], ds @ y / 8), *[(t[last], ds) for t in grads[1:]]]:
        torch.testing.assert_close(found.double(), ref, rtol=2e-2, atol=4e-3 * float(ref.abs().max()))
