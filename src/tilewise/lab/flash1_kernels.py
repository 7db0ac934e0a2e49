"""FlashAttention-1's two algorithms as Triton kernels: one program per batch and head walks everything, keys outside.

Symbols as in `flash1`. Scores are in base-2 units, ``s = scale log2(e) q.k``, so m is, too. Slow memory is the GPU's: O, l, m
and dQ live there, in float32, since they are read and written once per key tile. Only this program touches the rows of its
head; a barrier per key tile lets its threads see each other's writes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.device.assembler import sound_assembler
from tilewise.lab.recompute import new_statistics
from tilewise.lab.tiling import Tiling

LOG2E = math.log2(math.e)


@triton.jit
def load_tile(base, row_stride, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a matrix; 0 beyond its end and its width."""
    d = tl.arange(0, BLOCK_D)
    inside = (rows < length)[:, None] & (d < D)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * row_stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(base, row_stride, x, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The same the other way."""
    d = tl.arange(0, BLOCK_D)
    inside = (rows < length)[:, None] & (d < D)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * row_stride + d[None, :], x, mask=inside)


@triton.jit
def head_of(pointer, strides, head, heads):
    """The matrix of this program's batch and head, from strides (batch, head, row)."""
    return pointer + (head // heads).to(tl.int64) * strides[0] + (head % heads).to(tl.int64) * strides[1]


@triton.jit
def scores_of(q, k, rows, keys, lo, hi, Sq, factor, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """s = factor q.k^T, -inf where row does not see key."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if MASKED:
        first = tl.load(lo + rows, mask=rows < Sq, other=0)
        end = tl.load(hi + rows, mask=rows < Sq, other=0)
        s = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None]), s, -float("inf"))
    return s


@triton.jit
def finite_max(m):
    """The maximum to subtract: 0 for a row that has seen no key."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def flash1_forward_kernel(
    q, k, v, o, m, l, q_strides, k_strides, v_strides, o_strides, lo, hi, first, visits, heads, Sq, Sk, key_tiles, factor,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 1: for each K_j, V_j, for each Q_i: O_i = (l e^(m - m_new) O_i + e^(m~ - m_new) P~ V_j) / l_new."""
    head = tl.program_id(0)
    q, k, v = head_of(q, q_strides, head, heads), head_of(k, k_strides, head, heads), head_of(v, v_strides, head, heads)
    o = head_of(o, o_strides, head, heads)
    m, l = m + head.to(tl.int64) * Sq, l + head.to(tl.int64) * Sq
    for j in tl.range(0, key_tiles, num_stages=1):
        tl.debug_barrier()
        keys = j * BLOCK_N + tl.arange(0, BLOCK_N)
        k_j = load_tile(k, k_strides[2], keys, Sk, D, BLOCK_D)
        v_j = load_tile(v, v_strides[2], keys, Sk, D, BLOCK_D)
        for visit in tl.range(tl.load(first + j), tl.load(first + j + 1), num_stages=2):
            rows = tl.load(visits + visit) * BLOCK_M + tl.arange(0, BLOCK_M)
            q_i = load_tile(q, q_strides[2], rows, Sq, D, BLOCK_D)
            s = scores_of(q_i, k_j, rows, keys, lo, hi, Sq, factor, MASKED, PRECISION)
            m_tile = tl.max(s, 1)
            p = tl.math.exp2(s - finite_max(m_tile)[:, None])
            m_i = tl.load(m + rows, mask=rows < Sq, other=-float("inf"))
            m_new = tl.maximum(m_i, m_tile)
            new = tl.math.exp2(m_tile - finite_max(m_new))
            old = tl.math.exp2(m_i - finite_max(m_new)) * tl.load(l + rows, mask=rows < Sq, other=0.0)
            l_new = old + new * tl.sum(p, 1)
            norm = 1.0 / tl.where(l_new == 0.0, 1.0, l_new)
            o_i = load_tile(o, o_strides[2], rows, Sq, D, BLOCK_D) * (old * norm)[:, None]
            o_i += tl.dot(p.to(v_j.dtype), v_j, input_precision=PRECISION) * (new * norm)[:, None]
            store_tile(o, o_strides[2], o_i, rows, Sq, D, BLOCK_D)
            tl.store(m + rows, m_new, mask=rows < Sq)
            tl.store(l + rows, l_new, mask=rows < Sq)


@triton.jit
def flash1_backward_kernel(
    do, q, k, v, o, m, l, dq, dk, dv, do_strides, q_strides, k_strides, v_strides, o_strides, dq_strides, dk_strides,
    lo, hi, first, visits, heads, Sq, Sk, key_tiles, factor, scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 4: P = e^(S - m) / l; dV_j += P^T dO_i; dS = P o (dO_i V_j^T - delta_i); dQ_i += dS K_j; dK_j += dS^T Q_i."""
    head = tl.program_id(0)
    q, k, v = head_of(q, q_strides, head, heads), head_of(k, k_strides, head, heads), head_of(v, v_strides, head, heads)
    o, do, dq = (
        head_of(o, o_strides, head, heads), head_of(do, do_strides, head, heads), head_of(dq, dq_strides, head, heads)
    )  # fmt: skip
    dk, dv = head_of(dk, dk_strides, head, heads), head_of(dv, dk_strides, head, heads)
    m, l = m + head.to(tl.int64) * Sq, l + head.to(tl.int64) * Sq
    for j in tl.range(0, key_tiles, num_stages=1):
        tl.debug_barrier()
        keys = j * BLOCK_N + tl.arange(0, BLOCK_N)
        k_j = load_tile(k, k_strides[2], keys, Sk, D, BLOCK_D)
        v_j = load_tile(v, v_strides[2], keys, Sk, D, BLOCK_D)
        dk_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for visit in tl.range(tl.load(first + j), tl.load(first + j + 1), num_stages=2):
            rows = tl.load(visits + visit) * BLOCK_M + tl.arange(0, BLOCK_M)
            q_i = load_tile(q, q_strides[2], rows, Sq, D, BLOCK_D)
            do_i = load_tile(do, do_strides[2], rows, Sq, D, BLOCK_D)
            s = scores_of(q_i, k_j, rows, keys, lo, hi, Sq, factor, MASKED, PRECISION)
            m_i = tl.load(m + rows, mask=rows < Sq, other=0.0)
            l_i = tl.load(l + rows, mask=rows < Sq, other=1.0)
            p = tl.math.exp2(s - finite_max(m_i)[:, None]) / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
            dv_j = tl.dot(tl.trans(p).to(do_i.dtype), do_i, dv_j, input_precision=PRECISION)
            dp = tl.dot(do_i, tl.trans(v_j), input_precision=PRECISION)
            o_i = load_tile(o, o_strides[2], rows, Sq, D, BLOCK_D)
            delta = tl.sum(do_i.to(tl.float32) * o_i.to(tl.float32), 1)  # at every visit, as algorithm 4 has it
            ds = (p * (dp - delta[:, None]) * scale).to(q_i.dtype)
            dk_j = tl.dot(tl.trans(ds), q_i, dk_j, input_precision=PRECISION)
            dq_i = load_tile(dq, dq_strides[2], rows, Sq, D, BLOCK_D)
            store_tile(dq, dq_strides[2], tl.dot(ds, k_j, dq_i, input_precision=PRECISION), rows, Sq, D, BLOCK_D)
        store_tile(dk, dk_strides[2], dk_j, keys, Sk, D, BLOCK_D)
        store_tile(dv, dk_strides[2], dv_j, keys, Sk, D, BLOCK_D)


def forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiling) -> tuple[Tensor, Tensor, Tensor]:
    """o, m, l of q, k, v (B, H, S, D) with any strides but a dense last dim."""
    m, l = new_statistics(q)
    o = torch.zeros_like(q, dtype=m.dtype, memory_format=torch.contiguous_format)
    _launch(
        flash1_forward_kernel, tiles, q, k, (q, k, v, o, m, l), tuple(t.stride()[:3] for t in (q, k, v, o)),
        (_factor(q),),
    )  # fmt: skip
    return o.to(q.dtype), m, l


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, l: Tensor, tiles: Tiling
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    dq = torch.zeros_like(q, dtype=m.dtype, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
    do = do if do.stride(-1) == 1 else do.contiguous()
    _launch(
        flash1_backward_kernel, tiles, q, k, (do, q, k, v, o, m, l, dq, dk, dv),
        tuple(t.stride()[:3] for t in (do, q, k, v, o, dq, dk)), (_factor(q), q.shape[-1] ** -0.5),
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv


def _factor(q: Tensor) -> float:
    return q.shape[-1] ** -0.5 * LOG2E


def _launch(
    kernel: Any, tiles: Tiling, q: Tensor, k: Tensor, tensors: tuple, strides: tuple, factors: tuple[float, ...]
) -> None:
    B, H, Sq, D = q.shape
    first, visits = tiles.visits
    options = {
        "D": D, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "MASKED": tiles.masked or k.shape[2] % tiles.block_n != 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", "num_warps": 4 if tiles.block_m < 64 else 8,
    }  # fmt: skip
    with torch.cuda.device_of(q), sound_assembler():
        kernel[(B * H,)](
            *tensors, *strides, tiles.lo, tiles.hi, first, visits, H, Sq, k.shape[2], len(tiles.keys), *factors,
            **options,
        )  # fmt: skip
