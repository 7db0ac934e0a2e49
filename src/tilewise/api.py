"""The public functions: check what was given, describe it as a spec, choose a backend, run the op."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch, ops
from tilewise.checks import as_int, describe
from tilewise.masks import ALIGNMENTS, Causal, Mask, Window, as_mask, window_side
from tilewise.problem import Problem, Signature, check_cu_seqlens, check_number, make_problem
from tilewise.spec import TENSORS, AttentionSpec, MaskTerm

LAYOUTS = ("bshd", "bhsd")


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
        q: (B, Sq, H, D), float32, float64, bfloat16 or float16; D in 1..512. Any strides.
        k: (B, Sk, Hkv, D); H must be a multiple of Hkv, query head h reads kv head ``h // (H // Hkv)``.
        v: (B, Sk, Hkv, Dv); Dv may differ from D.
        mask: a mask object (`Causal`, `Window`, `Prefix`, `Document`, `Chunk`, `Blocks`, `Dense`), several combined with
            ``&``, or a bool tensor broadcastable to (B, H, Sq, Sk) where True means "seen". Default: all keys.
        causal: True or "bottom_right" (the last query sees the last key), or "top_left" (query 0 sees key 0).
        window_size: (left, right): keys from ``m - left`` to ``m + right`` are seen; None or -1 is no limit on that side.
        bias: added to the scores, any float dtype, broadcastable to (B, H, Sq, Sk). Gets its gradient.
        alibi_slopes: (H,) or (B, H). Gets its gradient.
        softcap: scores are squashed to ``softcap * tanh(score / softcap)``. Default None: not at all.
        sinks: (H,), one logit per head that joins the denominator only. Gets its gradient.
        dropout_p: probability in [0, 1) of dropping an attention weight; kept ones are scaled by ``1 / (1 - p)``.
        softmax_scale: default ``D ** -0.5``.
        return_lse: also return lse, natural log, (B, H, Sq) float32 (float64 for float64). Differentiable.
        return_max_logit: also return the largest visible score of each head over the batch, (H,). Not differentiable.
        deterministic: ask for a bitwise repeatable backward pass (the CPU backend's always is).
        layout: "bshd", or "bhsd" for q, k, v and o as (B, H, S, D).
        backend: a name from `tilewise caps`; default the first that can take the call. Never falls back.
        generator: where the dropout seed is drawn from; default torch's global CPU generator.

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
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    _check_tensors(q, k, v)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) if t.dim() == 4 else t for t in (q, k, v))
    masks, align = _collect_masks(mask, causal, window_size)
    named = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    o, lse, max_logit = _run(
        q, k, v, masks, align, named, softcap, dropout_p, softmax_scale, deterministic, backend, generator, 0, 0
    )
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
    _check_tensors(q, k, v)
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"attention_varlen takes packed q (total_q, H, D) and k, v (total_k, Hkv, D), got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}; use attention for (B, S, H, D)"
        )
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], _optional_int(max_seqlen_q), seqused_q)
    max_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0], _optional_int(max_seqlen_k), seqused_k)
    masks, align = _collect_masks(mask, causal, window_size)
    named = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    named |= {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    o, lse, max_logit = _run(
        q, k, v, masks, align, named, softcap, dropout_p, softmax_scale, deterministic, backend, generator, max_q, max_k
    )
    return _select_outputs(o, lse, max_logit, return_lse, return_max_logit)


def _run(
    q, k, v, masks, align, named, softcap, dropout_p, softmax_scale, deterministic, backend, generator, max_q, max_k
):
    if dropout_p:
        named["seed"] = torch.randint(0, 2**63 - 1, (1,), generator=generator, dtype=torch.int64)
    present = tuple(name for name in TENSORS if named.get(name) is not None)
    terms, mask_tensors = _terms(masks)
    aux = [named[name] for name in present] + mask_tensors
    for name, t in zip(present, aux, strict=False):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {describe(t)}")
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    make_spec, checked = (_make_spec, _checked) if not torch.compiler.is_compiling() else _UNCACHED
    spec = make_spec(terms, align, softcap, dropout_p, bool(deterministic), present)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else check_number(softmax_scale, "softmax_scale", -inf, inf)
    signatures = tuple((t.shape, t.dtype, t.device) for t in (q, k, v, *aux))
    name = checked(signatures, spec, max_q, max_k, backend or dispatch.preferred())
    return ops.attention(q, k, v, aux, spec.key, scale, name, max_q, max_k)


def _make_spec_uncached(terms, align, softcap, dropout_p, deterministic, present) -> AttentionSpec:
    cap = None if softcap is None or softcap == 0 else check_number(softcap, "softcap", 0.0, inf)
    p = check_number(dropout_p, "dropout_p", 0.0, 1.0)
    return AttentionSpec(terms, align, cap, p, deterministic, present)


def _checked_uncached(signatures, spec, max_q, max_k, backend) -> str:
    return dispatch.select(problem_of(signatures, spec, max_q, max_k), backend)


# A training loop makes the same few calls for ever: their spec, checks and backend are found here.
_make_spec = lru_cache(maxsize=1024)(_make_spec_uncached)
_checked = lru_cache(maxsize=4096)(_checked_uncached)
_UNCACHED = (_make_spec_uncached, _checked_uncached)


def problem_of(signatures: tuple, spec: AttentionSpec, max_q: int, max_k: int) -> Problem:
    """Check one call given as (shape, dtype, device) of q, k, v and each aux tensor."""
    q, k, v, *aux = (Signature(*s) for s in signatures)
    return make_problem(q, k, v, aux, spec, max_q, max_k)


def _terms(masks: tuple[Mask, ...]) -> tuple[tuple[MaskTerm, ...], list[Tensor]]:
    if not masks:
        return (), []
    terms = tuple(MaskTerm(mask.name, mask.params, len(mask.tensors)) for mask in masks)
    return terms, [t for mask in masks for t in mask.tensors]


def _collect_masks(mask: Mask | Tensor | None, causal: bool | str, window_size: Any) -> tuple[tuple[Mask, ...], str]:
    """All mask parts of a call, and its one alignment."""
    parts = [] if mask is None else list(as_mask(mask).parts())
    if causal is not False:
        if causal is not True and causal not in ALIGNMENTS:
            raise ValueError(f"causal must be False, True, 'bottom_right' or 'top_left', got {causal!r}")
        parts.append(Causal(None if causal is True else causal))
    if window_size is not None:
        parts.append(_window(window_size))
    stated = {part.align for part in parts if isinstance(part, (Causal, Window)) and part.align is not None}
    if len(stated) > 1:
        raise ValueError(f"one call has one alignment, its masks ask for {sorted(stated)}")
    return tuple(parts), stated.pop() if stated else "bottom_right"


def _window(window_size: Any) -> Window:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), got {describe(window_size)}") from None
    return Window(window_side(left, "left"), window_side(right, "right"))


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")


def _optional_int(value: Any) -> int | None:
    return None if value is None else as_int(value, "max_seqlen")


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast like scaled_dot_product_attention under autocast: to the autocast dtype, float64 left alone."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors]


def _select_outputs(o, lse, max_logit, return_lse, return_max_logit):
    if not return_lse and not return_max_logit:
        return o
    return (o, *([lse] if return_lse else []), *([max_logit] if return_max_logit else []))
