"""FlashAttention (Dao et al. 2022), algorithms 1 and 4, as a schedule of PyTorch calls: keys outside, rows inside.

Fast memory holds M numbers. A tile of Bc keys (K_j and V_j) stays there while tiles of Br rows pass by:

    Bc = ceil(M / 4d)        Br = min(ceil(M / 4d), d)

With rows inside, every row tile is met again for each key tile: its O, l and m live in slow memory, are read, brought to the
new maximum, normalised anew and written back (algorithm 1, lines 10 to 13, in the paper's symbols):

    m~ = rowmax(S)       P~ = exp(S - m~)       l~ = rowsum(P~)
    m_new = max(m, m~)   l_new = exp(m - m_new) l + exp(m~ - m_new) l~
    O = (l exp(m - m_new) O + exp(m~ - m_new) P~ V) / l_new

What it costs next to FlashAttention-2, which swaps the loops: Tc reads and writes of O instead of one write, a division
per visit, and no row tiles to share out, so that only batch x heads run in parallel (here: the leading dims of each product).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.cost import Memory
from tilewise.lab.recompute import Gradients, at_least_one_key, finite, new_statistics, row_delta, tiled_memory
from tilewise.lab.system import Explicit, parts
from tilewise.lab.tiling import Tiling, tiling
from tilewise.masks import Blocks, Mask
from tilewise.problem import Problem
from tilewise.tiles import cdiv


@dataclass(frozen=True)
class Flash1(Explicit):
    """Keeps q, k, v, o, m and l: 4 N D + 2 N numbers for every head.

    Args:
        fast_bytes: of fast memory.
    """

    fast_bytes: int = 512 << 10  # a CPU core's second-level cache

    def tiling(self, q: Tensor, k: Tensor, mask: Mask | None) -> Tiling:
        block_m, block_n = tile_sizes(self.fast_bytes // q.element_size(), q.shape[-1])
        return tiling(parts(mask), q.shape[-2], k.shape[-2], block_m, block_n, q.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        tiles, scale = self.tiling(q, k, mask), q.shape[-1] ** -0.5
        m, l = new_statistics(q)
        o = torch.zeros_like(q, dtype=m.dtype)
        for j, keys in enumerate(tiles.keys):
            k_j, v_j = k[..., keys, :], v[..., keys, :]
            for i in tiles.rows_of(j):
                rows = tiles.rows[i]
                o_i, m_i, l_i = o[..., rows, :], m[..., rows, :], l[..., rows, :]
                s = tiles.hide((q[..., rows, :] * scale @ k_j.mT).to(m.dtype), i, j)
                m_tile = s.amax(-1, keepdim=True)
                p = s.sub_(finite(m_tile)).exp_()
                m_new = torch.maximum(m_i, m_tile)
                old, new = (m_i - finite(m_new)).exp_() * l_i, (m_tile - finite(m_new)).exp_()
                l_new = old + new * p.sum(-1, keepdim=True)
                o_i.mul_(old).add_(new * (p.to(v.dtype) @ v_j)).div_(at_least_one_key(l_new))
                m_i.copy_(m_new)
                l_i.copy_(l_new)
        o = o.to(q.dtype)
        return o, (o, m, l)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Tensor], mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles, work = self.tiling(q, k, mask), Gradients(do, q, k, v, kept)
        for j, keys in enumerate(tiles.keys):
            with work.of_keys(keys):
                for i in tiles.rows_of(j):
                    rows = tiles.rows[i]
                    m, l, o, do_i = (t[:, rows] for t in (work.m, work.l, work.o, work.do))
                    p = tiles.hide(work.scores(rows).mT, i, j).mT.sub_(finite(m).mT).exp_().div_(at_least_one_key(l).mT)
                    work.add(rows, p, row_delta(do_i, o, m.dtype).mT)  # delta at every visit: algorithm 4, line 19
        return work.results()

    def memory(self, problem: Problem) -> Memory:
        return tiled_memory(problem, *tile_sizes(self.fast_bytes // problem.dtype.itemsize, problem.D))


@dataclass(frozen=True)
class Flash1Kernels(Flash1):
    """The same algorithms as Triton kernels (`flash1_kernels`). Their tiles are powers of two, the largest that fit."""

    fast_bytes: int = 227 << 10  # shared memory of a Hopper GPU's multiprocessor

    def why_not(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Sequence[str]:
        found = list(super().why_not(q, k, v, mask))
        sizes = [size for part in parts(mask) if isinstance(part, Blocks) for size in (part.block_m, part.block_n)]
        if any(size < SMALLEST or size != power_of_two(size) for size in sizes):
            found.append(f"takes Blocks of powers of two from {SMALLEST}, got {sizes}")
        if max(sizes, default=0) * q.shape[-1] > LARGEST:
            found.append(f"takes Blocks of up to {LARGEST // q.shape[-1]} rows and keys at this head dim, got {sizes}")
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            found.append(f"takes float32, bfloat16 and float16, not {q.dtype}")
        return found

    def kernel_tiling(self, q: Tensor, k: Tensor, mask: Mask | None, most: int) -> Tiling:
        """Tiles by the paper's rule, but of at most so many keys: what registers hold has no place in its formula."""
        d = max(q.shape[-1], SMALLEST)
        Bc = min(power_of_two(max(tile_sizes(self.fast_bytes // q.element_size(), d)[1], SMALLEST)), most)
        return tiling(parts(mask), q.shape[-2], k.shape[-2], min(Bc, power_of_two(d), ROWS), Bc, q.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        o, m, l = _kernels().forward(q, k, v, self.kernel_tiling(q, k, mask, KEYS_FORWARD))
        return o, (o, m, l)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Tensor], mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _kernels().backward(do, q, k, v, *kept, self.kernel_tiling(q, k, mask, KEYS_BACKWARD))

    def memory(self, problem: Problem) -> Memory:
        """No tile lies in slow memory, but O and dQ do, in float32."""
        return tiled_memory(problem, 0, 0)._replace(peak_forward=4 * problem.total_q * problem.H * (problem.Dv + 2))


SMALLEST = 16  # side of a tile that matrix units multiply
LARGEST = 128 * 64  # numbers of a tile of K: with twice as many, shared memory does not hold the backward pass
#: Largest tiles whose S and O_i, or S, dP, dK_j and dV_j, the compiler keeps in the registers of a Hopper GPU.
ROWS, KEYS_FORWARD, KEYS_BACKWARD = 64, 256, 64


def tile_sizes(M: int, d: int) -> tuple[int, int]:
    """(Br, Bc) for fast memory of M numbers."""
    Bc = cdiv(M, 4 * d)
    return min(Bc, d), Bc


def power_of_two(n: int) -> int:
    """The largest that is not larger."""
    return 1 << (n.bit_length() - 1)


def _kernels() -> Any:
    return importlib.import_module("tilewise.lab.flash1_kernels")  # Triton: only a call on a GPU needs it
