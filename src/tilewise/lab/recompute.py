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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.lab.system import Explicit, parts
from tilewise.lab.tiling import Tiling
from tilewise.masks import Mask


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
        return Tiling(parts(mask), Sq, Sk, self.block_m or max(Sq, 1), self.block_n or max(Sk, 1), q.device)

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
        o, m, l = kept
        tiles, scale = self.tiling(q, k, mask), q.shape[-1] ** -0.5
        dq, dk, dv = (torch.zeros_like(t, dtype=m.dtype) for t in (q, k, v))
        # One pass over the rows saves one over every tile: exp(s - m) / l = exp(s - (m + log l)).
        lse, delta = finite(m) + at_least_one_key(l).log(), row_delta(do, o, m.dtype)
        for i, rows in enumerate(tiles.rows):
            q_i, do_i = q[..., rows, :] * scale, do[..., rows, :]
            for j in tiles.keys_of(i):
                keys = tiles.keys[j]
                k_j, v_j = k[..., keys, :], v[..., keys, :]
                s = tiles.hide((q_i @ k_j.mT).to(m.dtype), i, j)
                p = s.sub_(lse[..., rows, :]).exp_()
                add_gradients(
                    p, q_i, k_j, v_j, do_i, delta[..., rows, :], dq[..., rows, :], dk[..., keys, :], dv[..., keys, :]
                )
        return (dq * scale).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def add_gradients(p, q, k, v, do, delta, dq, dk, dv) -> None:
    """Add what one tile does to the gradients: dV += P^T dO, dS = P o (dO V^T - delta), dQ += dS K, dK += dS^T Q.

    `q` is scaled and `dq` not yet.
    """
    dv += p.mT.to(do.dtype) @ do
    ds = (do @ v.mT).to(p.dtype).sub_(delta).mul_(p).to(q.dtype)
    dq += ds @ k
    dk += ds.mT @ q


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
