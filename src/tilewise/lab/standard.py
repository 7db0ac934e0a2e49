"""Standard attention, and gradient checkpointing of it: the N x N matrices lie in memory.

FlashAttention (Dao et al. 2022), algorithm 0 and its backward pass, appendix B.2:

    S = scale Q K^T        P = softmax(S)        O = P V
    dV = P^T dO            dP = dO V^T           dS = P o (dP - rowsum(P o dP))        dQ = scale dS K     dK = scale dS^T Q

In a softmax row ``dp_j/ds_k = p_j ([j = k] - p_k)``, hence dS. PyTorch's autograd does just that from the P that it keeps, N^2
numbers for every head: at N = 4096, D = 128 they are 91% of what is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilewise.cost import Memory, standard_memory, tensor_bytes
from tilewise.lab.system import System, parts
from tilewise.lab.tiling import visible
from tilewise.masks import Mask
from tilewise.problem import Problem


class StandardAttention(System):
    """Keeps q (scaled), k, v and P: 3 N D + N^2 numbers for every head; N^2 more bytes with a mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        # As well as separate calls allow: scaling q and hiding in place are two passes less over S.
        S = (q * q.shape[-1] ** -0.5).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        if mask is None:
            P = S.softmax(-1)
        else:
            seen = visible(parts(mask), q.shape[1], k.shape[1], q.device)
            blind = ~seen.any(-1, keepdim=True)
            P = S.masked_fill_(seen.logical_not_(), -torch.inf).softmax(-1)
            if bool(blind.any()):  # the softmax of nothing is NaN
                P = P.masked_fill(blind, 0.0)
        return (P @ v.transpose(1, 2)).transpose(1, 2)

    def memory(self, problem: Problem) -> Memory:
        return standard_memory(problem)


class CheckpointedAttention(StandardAttention):
    """Keeps q, k, v, and runs the forward pass again in the backward pass: all of P comes back, but of one layer only.

    Gradient checkpointing (Chen et al. 2016), the older trade of time for memory: the peak stays quadratic.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        o = checkpoint(super().attend, q, k, v, mask, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(o, Tensor)
        return o

    def memory(self, problem: Problem) -> Memory:
        inputs = tensor_bytes(problem) - problem.total_q * problem.H * problem.Dv * problem.dtype.itemsize
        return standard_memory(problem)._replace(saved=inputs)
