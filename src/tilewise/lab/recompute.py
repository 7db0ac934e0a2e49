"""Recomputation without kernels: keep two numbers per row instead of P, and compute P again where it is needed.

FlashAttention (Dao et al. 2022), section 3.1. A row of P is known from its largest score m and the sum l of exponentials:

    m = max_n s_n        l = sum_n exp(s_n - m)        p_n = exp(s_n - m) / l

Nothing of this needs a whole row at once. Keys that come later change m and l, and what was summed up under the old maximum
is brought to the new one by a factor (online softmax; Milakov and Gimelshein 2018):

    m' = max(m, max_j s)     alpha = exp(m - m')     l' = alpha l + sum_j exp(s - m')     O' = alpha O + exp(S_j - m') V_j

The backward pass needs from every other key only ``delta``, because ``sum_n p_n dp_n = sum_n p_n (dO . v_n) = dO . O``:

    delta = rowsum(dO o O)        dS = P o (dP - delta)        with dV, dP, dQ, dK as in `standard`

So tiles of any size give the same result: all rows by all keys at once, some rows at a time, or some rows by some keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.cost import Memory, accumulator_bytes, tensor_bytes
from tilewise.lab.system import Explicit, parts
from tilewise.lab.tiling import Tiling, tiling
from tilewise.masks import Mask
from tilewise.problem import Problem


@dataclass(frozen=True)
class RecomputeAttention(Explicit):
    """Keeps q, k, v, o, m and l: 4 N D + 2 N numbers for every head.

    Args:
        block_m, block_n: rows and keys of a tile; None is all of them.
    """

    block_m: int | None = None
    block_n: int | None = None

    def tiling(self, q: Tensor, k: Tensor, mask: Mask | None) -> Tiling:
        Sq, Sk = q.shape[-2], k.shape[-2]
        return tiling(parts(mask), Sq, Sk, self.block_m or max(Sq, 1), self.block_n or max(Sk, 1), q.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        tiles, scale = self.tiling(q, k, mask), q.shape[-1] ** -0.5
        o, (m, l) = torch.empty_like(q), new_statistics(q)
        for i, rows in enumerate(tiles.rows):
            q_i, m_i, l_i = q[..., rows, :] * scale, m[..., rows, :], l[..., rows, :]
            acc = torch.zeros_like(q_i, dtype=m.dtype)
            for j in tiles.keys_of(i):
                keys = tiles.keys[j]
                s = tiles.hide((q_i @ k[..., keys, :].mT).to(m.dtype), i, j)
                m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
                p, alpha = s.sub_(finite(m_new)).exp_(), (m_i - finite(m_new)).exp_()
                l_i.mul_(alpha).add_(p.sum(-1, keepdim=True))
                acc.mul_(alpha).add_(p.to(v.dtype) @ v[..., keys, :])
                m_i.copy_(m_new)
            o[..., rows, :] = acc / at_least_one_key(l_i)
        return o, (o, m, l)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Tensor], mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles, work = self.tiling(q, k, mask), Gradients(do, q, k, v, kept)
        # One pass over the rows saves one over every tile: exp(s - m) / l = exp(s - (m + log l)).
        lse = (finite(work.m) + at_least_one_key(work.l).log()).mT
        delta = row_delta(work.do, work.o, work.m.dtype).mT
        for j, keys in enumerate(tiles.keys):
            with work.of_keys(keys):
                for i in tiles.rows_of(j):
                    rows = tiles.rows[i]
                    p = tiles.hide(work.scores(rows).mT, i, j).mT.sub_(lse[..., rows]).exp_()
                    work.add(rows, p, delta[..., rows])
        return work.results()

    def memory(self, problem: Problem) -> Memory:
        return tiled_memory(problem, self.block_m or problem.Sq, self.block_n or problem.Sk)


def tiled_memory(problem: Problem, block_m: int, block_n: int) -> Memory:
    """Two statistics per row and, for every head, the tile: S forward; P and dS, and what belongs to its keys, backward."""
    acc, heads, rows = accumulator_bytes(problem), problem.B * problem.H, problem.total_q * problem.H
    block_m, block_n = min(block_m, problem.Sq), min(block_n, problem.Sk)
    statistics, tile = 2 * rows * acc, heads * block_m * block_n * acc
    hidden = 3 * block_m * block_n if problem.spec.mask else 0  # bool: both bounds and what they come to
    of_keys = 4 * heads * block_n * problem.D * acc
    backward = 2 * statistics + 2 * tile + of_keys
    return Memory(tensor_bytes(problem) + statistics, statistics + tile + hidden, backward + hidden)


class Gradients:
    """dq, dk, dv as sums over tiles, keys outside. Tiles are transposed, keys down and rows across:

        dV_j += P^T dO_i        dS^T = P^T o (V_j dO_i^T - delta)        dK_j += dS^T Q_i        dQ_i += dS K_j

    so that K_j, V_j and their gradients stay where they are, and one product in five needs a transposition. The two tiles
    lie in the same memory all the time: a fresh megabyte for each would cost more than its products' additions.
    """

    def __init__(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Tensor]):
        self._shapes = q.shape, k.shape
        self.do, self.q, self.k, self.v = (t.flatten(0, 1) for t in (do, q, k, v))
        self.o, self.m, self.l = (t.flatten(0, 1) for t in kept)
        self.scale = q.shape[-1] ** -0.5
        self.dq = torch.zeros_like(self.q, dtype=self.m.dtype)
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self._space: dict[str, Tensor] = {}

    @contextmanager
    def of_keys(self, keys: slice) -> Iterator[None]:
        """Load K_j and V_j; at the end store dK_j and dV_j."""
        self._k, self._v = self.k[:, keys] * self.scale, self.v[:, keys]
        self._dk, self._dv = (torch.zeros_like(t, dtype=self.m.dtype) for t in (self._k, self._v))
        yield
        self.dk[:, keys], self.dv[:, keys] = self._dk.mul_(self.scale), self._dv

    def scores(self, rows: slice) -> Tensor:
        """S^T of the tile."""
        return self._product("s", self._k, self.q[:, rows])

    def add(self, rows: slice, p: Tensor, delta: Tensor) -> None:
        """What the tile adds, from P^T (keys, rows) and delta (1, rows)."""
        q, do = self.q[:, rows], self.do[:, rows]
        add_product(self._dv, p.to(do.dtype), do)
        ds = self._product("dp", self._v, do).sub_(delta).mul_(p).to(q.dtype)
        add_product(self._dk, ds, q)
        add_product(self.dq[:, rows], ds.mT, self._k)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        of_q, of_k = self._shapes
        return self.dq.to(self.q.dtype).view(of_q), self.dk.view(of_k), self.dv.view(of_k)

    def _product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a b^T in the precision of the statistics."""
        shape = (a.shape[0], a.shape[1], b.shape[1])
        if name not in self._space or self._space[name].shape != shape:
            self._space[name] = a.new_empty(shape)
        return torch.bmm(a, b.mT, out=self._space[name]).to(self.m.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, without a tensor in between where all have one dtype."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += a @ b


def new_statistics(q: Tensor) -> tuple[Tensor, Tensor]:
    """m = -inf and l = 0 of each row, (.., Sq, 1), in the precision of accumulators."""
    m = q.new_full((*q.shape[:-1], 1), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    return m, torch.zeros_like(m)


def row_delta(do: Tensor, o: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(dO o O), (.., Sq, 1)."""
    return (do.to(dtype) * o).sum(-1, keepdim=True)


def finite(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 for a row that has seen no key, whose -inf - -inf would be NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def at_least_one_key(l: Tensor) -> Tensor:
    """The sum to divide by: 1 for a row that has seen no key, whose o is 0."""
    return l.masked_fill(l == 0.0, 1.0)
