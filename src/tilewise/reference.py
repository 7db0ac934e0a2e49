"""The oracle: dense, differentiable attention in the dtype it is given. O(Sq * Sk) memory; autograd gives its gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import predicates
from tilewise.masks import Blocks, Rows, TileMask
from tilewise.mods import Alibi, Bias, Softcap
from tilewise.spec import BoundSpec


def attention(q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec) -> tuple[Tensor, Tensor]:
    """Softmax attention by its definition.

    Args:
        q: (B, Sq, H, D), or packed (total_q, H, D) when the spec names cu_seqlens.
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), or packed.
        bound: mask, modifiers and their tensors.

    Returns:
        o (B, Sq, H, Dv) and lse (B, H, Sq), or packed (total_q, H, Dv) and (H, total_q).
    """
    if not bound.spec.varlen:
        return _dense(q, k, v, bound, torch.arange(q.shape[0], device=q.device))
    o = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    for b, rows, keys in _slices(bound):
        o_b, lse_b = _dense(q[None, rows], k[None, keys], v[None, keys], bound, torch.tensor([b], device=q.device))
        o = torch.cat([o[: rows.start], o_b[0], o[rows.stop :]])
        lse = torch.cat([lse[:, : rows.start], lse_b[0], lse[:, rows.stop :]], dim=1)
    return o, lse


def max_logit(q: Tensor, k: Tensor, bound: BoundSpec) -> Tensor:
    """The largest visible score of each head over all sequences, (H,); -inf for a head that sees nothing."""
    best = q.new_full((q.shape[-2],), -torch.inf)
    for q_part, k_part, batch in parts(q, k, bound):
        s, visible = scores(q_part, k_part, bound, batch)
        if s.numel():
            best = torch.maximum(best, s.masked_fill(~visible, -torch.inf).amax((0, 2, 3)))
    return best


def parts(q: Tensor, k: Tensor, bound: BoundSpec) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and sequence indices of each dense piece of a call: the whole call, or every packed sequence."""
    if not bound.spec.varlen:
        return [(q, k, torch.arange(q.shape[0], device=q.device))]
    return [(q[None, rows], k[None, keys], torch.tensor([b], device=q.device)) for b, rows, keys in _slices(bound)]


def _slices(bound: BoundSpec) -> Iterator[tuple[int, slice, slice]]:
    """Rows and keys of each packed sequence."""
    assert bound.cu_seqlens_q is not None and bound.cu_seqlens_k is not None
    cu_q, cu_k = bound.cu_seqlens_q.tolist(), bound.cu_seqlens_k.tolist()
    for b in range(len(cu_q) - 1):
        q_len = cu_q[b + 1] - cu_q[b] if bound.seqused_q is None else int(bound.seqused_q[b])
        k_len = cu_k[b + 1] - cu_k[b] if bound.seqused_k is None else int(bound.seqused_k[b])
        yield b, slice(cu_q[b], cu_q[b] + q_len), slice(cu_k[b], cu_k[b] + k_len)


def scores(q: Tensor, k: Tensor, bound: BoundSpec, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Score matrix (B, H, Sq, Sk) after all modifiers, and which entries are visible.

    `batch` holds the index of each sequence in the call, for masks and modifiers that differ between sequences.
    """
    (Sq, H), (Sk, Hkv) = q.shape[1:3], k.shape[1:3]
    row, n = torch.arange(Sq, device=q.device), torch.arange(Sk, device=q.device)
    m = row + (Sk - Sq if bound.spec.align == "bottom_right" else 0)
    visible = torch.ones(len(batch), H, Sq, Sk, dtype=torch.bool, device=q.device)
    for mask in bound.interval_masks:
        rows = Rows(m.repeat(len(batch)), batch.repeat_interleave(Sq), row.repeat(len(batch)))
        lo, hi = (0 if x is None else x.reshape(len(batch), 1, Sq, 1) for x in mask.interval(rows))
        visible &= predicates.keep_interval(n, lo, hi if isinstance(hi, Tensor) else Sk)
    for mask in bound.tile_masks:
        visible &= _elements(mask, row, n, batch)
    seen = visible.any(2).transpose(1, 2)[..., None]  # a key that no row sees may hold NaN
    k = torch.where(seen, k.repeat_interleave(H // Hkv, dim=2), 0.0)
    q = torch.where(_sees(visible), q, 0.0)  # and so may a query that sees no key
    s = bound.softmax_scale * torch.einsum("bmhd,bnhd->bhmn", q, k)
    for mod in bound.mods:
        if isinstance(mod, Softcap):
            s = mod.apply(s)
        elif isinstance(mod, Alibi):
            slopes = mod.slopes.reshape(-1, H)
            s = Alibi(slopes if len(slopes) == 1 else slopes[batch]).apply(s, m, n)
        else:
            s = Bias(_pick(mod.bias, row, n, batch)).apply(s)
    return s, visible


def probabilities(q: Tensor, k: Tensor, bound: BoundSpec, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights before dropout (B, H, Sq, Sk), lse (B, H, Sq), and which entries are visible."""
    s, visible = scores(q, k, bound, batch)
    s = s.masked_fill(~visible, -torch.inf)
    peak = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    empty = peak == -torch.inf
    shifted = torch.where(visible & ~empty[..., None], s - peak.masked_fill(empty, 0.0)[..., None], -torch.inf)
    total = torch.exp(shifted).sum(-1)
    lse = torch.where(empty, -torch.inf, torch.log(torch.where(empty, 1.0, total)) + peak.masked_fill(empty, 0.0))
    if bound.sink is not None:
        lse = bound.sink.apply(lse)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    p = torch.exp(torch.where(visible, s, -torch.inf) - finite[..., None])
    return torch.where(visible & ~empty[..., None], p, 0.0), lse, visible


def signed_probabilities(q: Tensor, k: Tensor, bound: BoundSpec) -> Tensor:
    """Attention weights before dropout (B, H, Sq, Sk), negative where dropout drops them; for packed calls padded by 0."""
    signed = []
    for q_part, k_part, batch in parts(q, k, bound):
        p, _, _ = probabilities(q_part, k_part, bound, batch)
        dropped = ~keep_dropout(bound, batch, *p.shape[1:]) if bound.seed is not None else p < 0
        signed.append(torch.where(dropped, -p, p))
    Sq, Sk = (max((p.shape[dim] for p in signed), default=0) for dim in (2, 3))
    padded = [F.pad(p, (0, Sk - p.shape[3], 0, Sq - p.shape[2])) for p in signed]
    return torch.cat(padded) if padded else q.new_zeros(0, q.shape[-2], 0, 0)


def _dense(q, k, v, bound, batch):
    p, lse, visible = probabilities(q, k, bound, batch)
    if bound.seed is not None:
        p = p * keep_dropout(bound, batch, *p.shape[1:]) / (1 - bound.spec.dropout_p)
    seen = visible.any(2).transpose(1, 2)[..., None]
    v = torch.where(seen, v.repeat_interleave(q.shape[2] // v.shape[2], dim=2), 0.0)
    o = torch.einsum("bhmn,bnhd->bmhd", p, v)
    return torch.where(_sees(visible), o, 0.0), lse


def _sees(visible: Tensor) -> Tensor:
    """Which query rows see a key at all, (B, Sq, H, 1)."""
    return visible.any(3).transpose(1, 2)[..., None]


def keep_dropout(bound: BoundSpec, batch: Tensor, H: int, Sq: int, Sk: int) -> Tensor:
    """The dropout mask (B, H, Sq, Sk): True where the probability is kept."""
    assert bound.seed is not None
    head = torch.arange(H, device=batch.device)[None, :, None]
    row = torch.arange(Sq, device=batch.device)[None, None, :]
    keys = predicates.dropout_row_keys(bound.seed.reshape(1, 1, 1), batch[:, None, None], head, row)
    bits = predicates.dropout_bits(keys[0][..., None], keys[1][..., None], torch.arange(Sk, device=batch.device))
    return bits >= predicates.drop_threshold(bound.spec.dropout_p)


def _pick(t: Tensor, row: Tensor, n: Tensor, batch: Tensor) -> Tensor:
    """The part of a (B, H, Sq, Sk)-broadcastable tensor that belongs to these sequences, rows and keys."""
    t = t.reshape((1,) * (4 - t.dim()) + t.shape)
    t = t if t.shape[0] == 1 else t[batch]
    t = t if t.shape[2] == 1 else t[:, :, row]
    return t if t.shape[3] == 1 else t[..., n]


def _elements(mask: TileMask, row: Tensor, n: Tensor, batch: Tensor) -> Tensor:
    if isinstance(mask, Blocks):
        return _pick(mask.keep(), row // mask.block_m, n // mask.block_n, batch)
    return _pick(mask.keep(), row, n, batch)
