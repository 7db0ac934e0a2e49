"""A backend in plain torch, tile by tile with the formulas of docs/numerics.md, into which one fault can be planted.

Tests of the comparison rule run it: without a fault it must pass, with one it must not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import reference
from tilewise.backends.base import Grads, Needs
from tilewise.sequences import sequences
from tilewise.spec import BoundSpec

BLOCK = 16  # keys of a tile, and rows of a block: no length of the cases is a multiple


class Piece(NamedTuple):
    """One sequence of a call, its heads repeated for grouped queries, in the accumulation dtype."""

    rows: slice
    keys: slice
    q: Tensor  # (H, Sq, D)
    k: Tensor  # (H, Sk, D)
    v: Tensor  # (H, Sk, Dv)
    s: Tensor  # scores (H, Sq, Sk); -inf where masked
    slope: Tensor  # dt/dx of the softcap, (H, Sq, Sk)
    distance: Tensor  # |m - n|, (Sq, Sk)
    keep: Tensor  # what dropout multiplies probabilities by, (H, Sq, Sk)


class TorchBackend:
    """Forward and backward with the fault of the given name; "" for none."""

    def __init__(self, fault: str = ""):
        self.fault = fault

    def unless(self, right: Any, **wrong: Any) -> Any:
        """The right value, or the wrong one that bears the name of the fault."""
        return wrong.get(self.fault, right)

    # ---- forward ----

    def forward(self, q, k, v, bound: BoundSpec, max_q: int, max_k: int) -> tuple[Tensor, Tensor, Tensor]:
        acc = torch.promote_types(q.dtype, torch.float32)
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full((q.shape[-2], q.shape[:-2].numel()), -torch.inf, dtype=acc)
        max_logit = q.new_full((q.shape[-2],), -torch.inf, dtype=acc)
        for seq in self.sequences(q, k, v, bound, max_q, max_k):
            o_b, lse_b, peak = self.rows(seq, bound)
            o.flatten(0, -3)[seq.rows] = o_b.transpose(0, 1).to(o)
            lse[:, seq.rows] = lse_b
            max_logit = torch.maximum(max_logit, peak)
        return o, lse if bound.spec.varlen else lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous(), max_logit

    def rows(self, seq: Piece, bound: BoundSpec) -> tuple[Tensor, Tensor, Tensor]:
        """o (H, Sq, Dv), lse (H, Sq) and the largest score (H,) of one sequence, by the online softmax."""
        row_max = seq.q.new_full(seq.q.shape[:2], -torch.inf)
        row_sum, acc = torch.zeros_like(row_max), seq.q.new_zeros(*seq.q.shape[:2], seq.v.shape[-1])
        for start in range(0, seq.s.shape[-1], BLOCK):
            tile = slice(start, start + BLOCK)
            row_max, row_sum, acc = self.step(row_max, row_sum, acc, seq, tile)
        peak = row_max.amax(1) if row_max.shape[1] else row_max.new_full(row_max.shape[:1], -torch.inf)
        if bound.sinks is not None:
            sink = bound.sinks[:, None].to(row_max)
            new_max = torch.maximum(row_max, sink)
            alpha = torch.exp(row_max - new_max)
            joins = torch.exp(sink - new_max)
            row_max, acc = new_max, acc * alpha[..., None]
            row_sum = row_sum * alpha + self.unless(joins, no_sink=0.0, sink_twice=2 * joins)
        empty = row_sum == 0
        total = row_sum.masked_fill(empty, 1.0)
        lse = torch.where(empty, -torch.inf, row_max + torch.log(total))
        lse = self.unless(lse, lse_base_2=lse * 1.4426950408889634, lse_without_max=torch.log(row_sum))
        o = acc / total[..., None]
        mean = seq.v.nan_to_num(0.0).mean(1, keepdim=True)
        return self.unless(o, blind_rows_average=torch.where(empty[..., None], mean, o)), lse, peak

    def step(self, row_max, row_sum, acc, seq: Piece, tile: slice) -> tuple[Tensor, Tensor, Tensor]:
        s, keep, v = seq.s[..., tile], seq.keep[..., tile], seq.v[:, tile]
        new_max = torch.maximum(row_max, s.amax(-1))
        base = new_max.masked_fill(new_max == -torch.inf, 0.0)
        alpha, p = torch.exp(row_max - base)[..., None], torch.exp(s - base[..., None])
        p = self.unless(p, p_in_16_bits=p.bfloat16().to(p))
        seen = self.unless((p > 0).any(1)[..., None], zero_times_masked=torch.tensor(True))
        acc = acc * self.unless(alpha, no_rescale=1.0) + (p * keep) @ torch.where(seen, v, 0.0)
        kept = (p * keep).sum(-1)
        row_sum = row_sum * self.unless(alpha[..., 0], no_rescale_of_the_sum=1.0)
        row_sum = row_sum + self.unless(p.sum(-1), dropout_before_the_sum=kept)
        return new_max, row_sum, self.unless(acc, accumulator_in_16_bits=acc.bfloat16().to(acc))

    # ---- backward ----

    def backward(self, do, dlse, q, k, v, o, lse, bound: BoundSpec, max_q: int, max_k: int, needs: Needs) -> Grads:
        inputs = dict(zip(Grads._fields, (q, k, v, bound.bias, bound.alibi_slopes, bound.sinks), strict=True))
        found = {name: lse.new_zeros(t.shape) for name, t in inputs.items() if t is not None}
        packed = [torch.zeros_like(x) if t is None else t for t, x in ((do, o), (dlse, lse))]
        flat = [t.flatten(0, -3) for t in (packed[0], o)]
        do, o, (dlse, lse) = *flat, (t if bound.spec.varlen else t.transpose(0, 1).flatten(1) for t in (packed[1], lse))
        backward_bound = self.unless(bound, other_dropout_mask=_reseeded(bound))
        for b, seq in enumerate(self.sequences(q, k, v, backward_bound, max_q, max_k)):
            do_b, o_b = (t[seq.rows].transpose(0, 1).to(lse) for t in (do, o))
            self.add_gradients(found, b, seq, do_b, o_b, dlse[:, seq.rows], lse[:, seq.rows], bound)
        wanted = [name for name, need in needs._asdict().items() if need]
        return Grads(**{name: found[name].to(inputs[name]) for name in wanted})

    def add_gradients(self, found: dict[str, Tensor], b: int, seq: Piece, do, o, dlse, lse, bound: BoundSpec) -> None:
        sees = (lse > -torch.inf)[..., None]
        do, o = torch.where(sees, do, 0.0), torch.where(sees, o, 0.0)
        p = torch.exp(seq.s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        v = torch.where((p > 0).any(1)[..., None], seq.v, 0.0)
        dlse = torch.where(sees[..., 0], dlse, 0.0)
        do_o = (do * o).sum(-1)
        delta = self.unless(do_o - dlse, no_delta=-dlse, no_dlse=do_o, dlse_with_other_sign=do_o + dlse)
        dp = (do @ v.mT) * self.unless(seq.keep, dp_without_dropout=1.0)
        ds = p * (dp - delta[..., None])
        dx = ds * self.unless(seq.slope, no_softcap_derivative=1.0) * bound.softmax_scale
        whole = seq.q.shape[1] // BLOCK * BLOCK
        rows = self.unless(slice(None), last_rows_give_no_dk=slice(0, whole))
        keys = slice(0, self.unless(None, last_keys_give_no_dq=seq.k.shape[1] // BLOCK * BLOCK))
        dq = dx[..., keys] @ seq.k[:, keys]
        dk = dx[:, rows].mT @ seq.q[:, rows]
        dv = (p * self.unless(seq.keep, dv_without_dropout=1.0)).mT @ do
        unscale = 1 / bound.softmax_scale
        dq, dk = self.unless(dq, dq_without_scale=dq * unscale), self.unless(dk, dk_without_scale=dk * unscale)
        found["dq"].flatten(0, -3)[seq.rows] += dq.transpose(0, 1)
        for name, g in (("dk", dk), ("dv", dv)):
            found[name].flatten(0, -3)[seq.keys] += self.fold(g.transpose(0, 1), found[name].shape[-2])
        self.add_modifier_gradients(found, b, seq, ds, delta, lse, bound)

    def add_modifier_gradients(self, found, b: int, seq: Piece, ds, delta, lse, bound: BoundSpec) -> None:
        if "dbias" in found:
            whole = found["dbias"][(None,) * (4 - found["dbias"].dim())]
            part = whole[b if whole.shape[0] > 1 else 0]
            part = part[:, : ds.shape[1] if part.shape[1] > 1 else 1, : ds.shape[2] if part.shape[2] > 1 else 1]
            part += self.unless(ds, dbias_of_one_sequence=ds * (b == 0)).sum_to_size(part.shape)
        if "dslopes" in found:
            slopes = found["dslopes"] if found["dslopes"].dim() == 1 else found["dslopes"][b]
            one = (ds * seq.distance).sum((1, 2))
            slopes -= self.unless(one, dslopes_with_other_sign=-one)
        if "dsinks" in found:
            weight = torch.exp(bound.sinks[:, None].to(lse) - lse)
            one = torch.where(lse > -torch.inf, weight * delta, 0.0).sum(1)
            found["dsinks"] -= self.unless(one, dsinks_with_other_sign=-one)

    def fold(self, g: Tensor, Hkv: int) -> Tensor:
        """Gradients of repeated heads (S, H, D) summed over each group, (S, Hkv, D)."""
        H = g.shape[1]
        total = g.new_zeros(g.shape[0], Hkv, g.shape[2]).index_add_(1, self.kv_heads(H, Hkv), g)
        return self.unless(total, group_sum_of_last_head=g[:, H // Hkv - 1 :: H // Hkv], group_mean=total / (H // Hkv))

    # ---- what both passes read ----

    def kv_heads(self, H: int, Hkv: int) -> Tensor:
        """The kv head of each query head."""
        h = torch.arange(H)
        return self.unless(h // (H // Hkv), heads_interleaved=h % Hkv)

    def sequences(self, q, k, v, bound: BoundSpec, max_q: int, max_k: int) -> Iterator[Piece]:
        bound = self.misread(bound)
        seqs = sequences(bound, q.shape, k.shape, max_q, max_k)
        heads = self.kv_heads(q.shape[-2], k.shape[-2])
        acc = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (t.flatten(0, -3).to(acc) for t in (self.unless(q, q_in_16_bits=q.bfloat16()), k, v))
        for b, (q_start, q_len, k_start, k_len, shift) in enumerate(zip(*(t.tolist() for t in seqs[:5]))):
            apart = not bound.spec.varlen
            q_start, k_start = q_start + b * q_len * apart, k_start + b * k_len * apart
            rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
            yield self.one(rows, keys, q[rows], k[keys][:, heads], v[keys][:, heads], b, shift, bound)

    def one(self, rows, keys, q, k, v, b: int, shift: int, bound: BoundSpec) -> Piece:
        batch = torch.tensor([b])
        s, visible = (t[0] for t in reference.scores(q[None], k[None], bound, batch))
        bare = dataclasses.replace(bound, alibi_slopes=None, bias=None)
        capped = reference.scores(q[None], k[None], bare, batch)[0][0]
        cap = bound.spec.softcap
        visible = self.look(visible)
        keep = torch.ones_like(s)
        if bound.seed is not None:
            keep = reference.keep_dropout(bound, batch, *s.shape)[0].to(s)
            keep = keep * self.unless(1 / (1 - bound.spec.dropout_p), dropout_without_division=1.0)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        return Piece(
            *(rows, keys),
            torch.where(visible.any(2)[..., None], q, 0.0),
            torch.where(visible.any(1)[..., None], k, 0.0),
            v,
            s.masked_fill(~visible, -torch.inf),
            torch.ones_like(s) if cap is None else 1 - (capped / cap).square(),
            (torch.arange(len(q[0]))[:, None] + shift - torch.arange(s.shape[2])).abs(),
            keep,
        )

    def look(self, visible: Tensor) -> Tensor:
        """Which keys each row sees, (H, Sq, Sk)."""
        before, after = F.pad(visible, (1, 0))[..., :-1], F.pad(visible, (0, 1))[..., 1:]
        whole = torch.arange(visible.shape[2]) < visible.shape[2] // BLOCK * BLOCK
        return self.unless(
            visible,
            one_key_more=visible | before,
            last_key_unseen=visible & after,
            first_key_unseen=visible & before,
            last_partial_block_skipped=visible & whole,
        )

    def misread(self, bound: BoundSpec) -> BoundSpec:
        """The call as a fault understands it."""
        change = dataclasses.replace
        spec, scale = bound.spec, bound.softmax_scale
        wrong = {
            "scale_off_by_1_percent": {"softmax_scale": 1.01 * scale},
            "no_softcap": {"spec": change(spec, softcap=None)},
            "top_left": {"spec": change(spec, align="top_left")},
            "seqused_ignored": {"seqused_q": None, "seqused_k": None},
            "slopes_of_first_sequence": {"alibi_slopes": _first_everywhere(bound.alibi_slopes)},
            "bias_of_first_sequence": {"bias": _first_everywhere(bound.bias)},
        }
        return change(bound, **self.unless({}, **wrong))


def _reseeded(bound: BoundSpec) -> BoundSpec:
    return bound if bound.seed is None else dataclasses.replace(bound, seed=bound.seed ^ 1)


def _first_everywhere(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.dim() < 2 else t[:1].expand_as(t)
