"""The public functions: describe what was given as a `Call`, choose a backend, run the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import again, dispatch, ops
from tilewise.call import Call, dense_call, packed_call, select_backend
from tilewise.masks import Mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool | str = False,
    window_size: Any = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Exact softmax attention with memory linear in sequence length.

    ``score = softcap(softmax_scale * q.k) - slope * |m - n| + bias``, then the mask, then the softmax over keys, whose
    denominator a sink joins; ``o = softmax(score) @ v``. ``m`` counts queries bottom-right aligned (``m = row + Sk - Sq``)
    unless ``"top_left"``. A row that sees no key gives o = 0, lse = -inf and zero gradients.

    Args:
        q: (B, Sq, H, D), float32, float64, bfloat16 or float16; D in 1..576. Any strides.
        k: (B, Sk, Hkv, D); H must be a multiple of Hkv, query head h reads kv head ``h // (H // Hkv)``.
        v: (B, Sk, Hkv, Dv); Dv may differ from D.
        mask: a mask object (`Causal`, `Window`, `Prefix`, `Document`, `Chunk`, `Blocks`, `Dense`), several combined with
            ``&``, or a bool tensor broadcastable to (B, H, Sq, Sk) where True means "seen". Default: all keys.
        causal: "bottom_right" (the last query sees the last key), "top_left" (query 0 sees key 0), or True: the alignment
            of the call, bottom-right unless a mask says otherwise.
        window_size: (left, right): keys from ``m - left`` to ``m + right`` are seen; None or -1 is no limit on that side.
        bias: added to the scores, any float dtype, broadcastable to (B, H, Sq, Sk). Gets its gradient.
        alibi_slopes: (H,) or (B, H). Gets its gradient.
        softcap: scores are squashed to ``softcap * tanh(score / softcap)``. Default None: not at all.
        sinks: (H,), one logit per head that joins the denominator only. Gets its gradient.
        dropout_p: probability in [0, 1) of dropping an attention weight; kept ones are scaled by ``1 / (1 - p)``.
        softmax_scale: default ``D ** -0.5``.
        return_lse: also return lse, natural log, (B, H, Sq) float32 (float64 for float64). Differentiable.
        return_max_logit: also return the largest visible score of each head over the batch, (H,). Not differentiable.
        deterministic: ask for a bitwise repeatable backward pass (only dq on Hopper GPUs is not so by default).
        layout: "bshd", or "bhsd" for q, k, v and o as (B, H, S, D).
        backend: a name from `tilewise caps`; default the first that can take the call. Never falls back.
        generator: where the dropout seed is drawn from, on either device; default torch's own of q's device (the CPU's
            for all but CUDA). The same seed drops the same weights on every backend. One of your own is not set back by
            torch.utils.checkpoint, whose recomputation would then drop other weights.

    Returns:
        o in q's dtype, (B, Sq, H, Dv); with return_lse or return_max_logit a tuple (o, lse, max_logit) of those asked for.

    Raises:
        TypeError, ValueError: an argument is not what is accepted; the message names it and says what is.
        NoBackendError: no backend can take the call; the message gives every reason.

    Source: FlashAttention (Dao et al. 2022, section 3.1), FlashAttention-2 (Dao 2023, section 3.1).

    Example:
        >>> import torch, tilewise
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 128, 2, 64).unbind()
        >>> o = tilewise.attention(q, k, v, causal=True, window_size=(32, 0))
        >>> o.shape
        torch.Size([2, 128, 8, 64])
        >>> o.sum().backward(); q.grad.shape
        torch.Size([2, 128, 8, 64])
    """
    bare = mask is window_size is bias is alibi_slopes is softcap is sinks is generator is None
    key = None
    if bare and not torch.compiler.is_compiling():
        key = again.key_of(q, k, v, causal, softmax_scale, dropout_p, deterministic, layout, backend, return_max_logit)
    found = None if key is None else again.attention(key, q, k, v, layout == "bhsd")
    if found is None:
        call = dense_call(
            q, k, v, mask, causal, window_size, bias, alibi_slopes, softcap, sinks, dropout_p, softmax_scale, deterministic,
            layout, generator, return_max_logit,
        )  # fmt: skip
        name = _backend_of(call, backend)
        found = _run(call, name)
        if key is not None:
            again.remember(key, call, name)
    o, lse, max_logit = found
    return _select_outputs(o.transpose(1, 2) if layout == "bhsd" else o, lse, max_logit, return_lse, return_max_logit)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool | str = False,
    window_size: Any = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """`attention` over packed sequences: each attends to its own keys only, and lengths may differ, zero included.

    Args:
        q: (total_q, H, D): all sequences one after another.
        k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv).
        cu_seqlens_q: int32 (B + 1,): ``[0, l0, l0 + l1, ...]``, the rows of each sequence in q.
        cu_seqlens_k: the same for k and v; default `cu_seqlens_q`.
        max_seqlen_q, max_seqlen_k: the longest sequence; default read from cu_seqlens (CPU only; elsewhere required).
            A GPU cannot check them without a stall: there a sequence that is longer counts up to them and no farther.
        seqused_q, seqused_k: int32 (B,): only the first so many rows or keys of each sequence are used.
        bias, mask: broadcastable to (B, H, max_seqlen_q, max_seqlen_k), indexed by row and key inside a sequence.
        others: as in `attention`; positions and alignment count within each sequence.

    Returns:
        o (total_q, H, Dv); with return_lse also lse (H, total_q); with return_max_logit also (H,). Rows that belong to no
        sequence give o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError, NoBackendError: as in `attention`; cu_seqlens that do not fit q, k or each other.

    Example:
        >>> import torch, tilewise
        >>> q = k = v = torch.randn(10, 2, 16)
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> tilewise.attention_varlen(q, k, v, cu, causal=True).shape
        torch.Size([10, 2, 16])
    """
    call = packed_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, mask, causal, window_size,
        bias, alibi_slopes, softcap, sinks, dropout_p, softmax_scale, deterministic, generator, return_max_logit,
    )  # fmt: skip
    o, lse, max_logit = _run(call, _backend_of(call, backend))
    return _select_outputs(o, lse, max_logit, return_lse, return_max_logit)


def _backend_of(call: Call, backend: str | None) -> str:
    return select_backend(call.signatures, call.spec, call.max_q, call.max_k, backend or dispatch.preferred())


def _run(call: Call, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return ops.attention(call.q, call.k, call.v, call.aux, call.spec.key, call.scale, backend, call.max_q, call.max_k)


def _select_outputs(o, lse, max_logit, return_lse, return_max_logit):
    if not return_lse and not return_max_logit:
        return o
    return (o, *([lse] if return_lse else []), *([max_logit] if return_max_logit else []))
