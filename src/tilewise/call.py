"""The arguments of one call, checked and described: what `attention` runs and `explain` explains."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.checks import as_int, describe
from tilewise.masks import ALIGNMENTS, Causal, Mask, Window, as_mask, window_side
from tilewise.problem import LARGEST, Problem, Signature, check_cu_seqlens, check_number, make_problem
from tilewise.spec import AttentionSpec, MaskTerm

LAYOUTS = ("bshd", "bhsd")


class Call(NamedTuple):
    """One call: its tensors in layout (B, S, H, D) or packed, and its semantics."""

    q: Tensor
    k: Tensor
    v: Tensor
    aux: list[Tensor]
    spec: AttentionSpec
    scale: float
    max_q: int  # longest sequences of a packed call, else 0
    max_k: int
    signatures: tuple  # (shape, dtype, device) of q, k, v and each aux tensor


def dense_call(
    q: Any, k: Any, v: Any, mask, causal, window_size, bias, alibi_slopes, softcap, sinks, dropout_p, softmax_scale,
    deterministic, layout, generator, return_max_logit=False,
) -> Call:  # fmt: skip
    """The arguments of `attention` as a `Call`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    _check_tensors(q, k, v)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) if t.dim() == 4 else t for t in (q, k, v))
    masks = _collect_masks(mask, causal, window_size)
    named = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "seed": None}
    return _describe(
        q, k, v, masks, named, softcap, dropout_p, softmax_scale, deterministic, generator, 0, 0, return_max_logit
    )  # fmt: skip


def packed_call(
    q: Any, k: Any, v: Any, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, mask, causal,
    window_size, bias, alibi_slopes, softcap, sinks, dropout_p, softmax_scale, deterministic, generator,
    return_max_logit=False,
) -> Call:  # fmt: skip
    """The arguments of `attention_varlen` as a `Call`."""
    _check_tensors(q, k, v)
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"attention_varlen takes packed q (total_q, H, D) and k, v (total_k, Hkv, D), got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}; use attention for (B, S, H, D)"
        )
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], _optional_int(max_seqlen_q), seqused_q)
    max_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0], _optional_int(max_seqlen_k), seqused_k)
    masks = _collect_masks(mask, causal, window_size)
    named = {
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "seed": None,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    return _describe(
        q, k, v, masks, named, softcap, dropout_p, softmax_scale, deterministic, generator, max_q, max_k,
        return_max_logit,
    )  # fmt: skip


def select_backend(signatures: tuple, spec: AttentionSpec, max_q: int, max_k: int, backend: str | None) -> str:
    """Check one call and name the backend that takes it."""
    if not torch.compiler.is_compiling():
        try:
            return _checked(signatures, spec, max_q, max_k, backend)
        except TypeError as error:
            if "unhashable" not in str(error):  # of symbolic sizes (make_fx, fake tensors)
                raise
    return _checked_uncached(signatures, spec, max_q, max_k, backend)


def problem_of(signatures: tuple, spec: AttentionSpec, max_q: int, max_k: int) -> Problem:
    """Check one call given as (shape, dtype, device) of q, k, v and each aux tensor."""
    q, k, v, *aux = (Signature(*s) for s in signatures)
    return make_problem(q, k, v, aux, spec, max_q, max_k)


def _describe(
    q, k, v, masks, named, softcap, dropout_p, softmax_scale, deterministic, generator, max_q, max_k, max_logit
):  # fmt: skip
    """`named`: what a call was given of `TENSORS`, in their order."""
    # Numbers before the cache below: a tensor would be found there by identity, whatever it holds by then.
    cap = None if softcap is None else check_number(softcap, "softcap") or None
    p = check_number(dropout_p, "dropout_p", 0.0, 1.0) if isinstance(dropout_p, Tensor) or dropout_p != 0 else 0.0
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {describe(generator)}")
    if p:
        # On the GPU without one: the default generator there, whose draws CUDA graphs repeat with fresh numbers.
        device = generator.device if generator is not None else q.device if q.is_cuda else "cpu"
        named["seed"] = torch.randint(0, 2**63 - 1, (1,), generator=generator, dtype=torch.int64, device=device)
    present = tuple([name for name, t in named.items() if t is not None])
    aux = [named[name] for name in present] + masks.tensors
    for name, t in zip(present, aux, strict=False):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {describe(t)}")
    device_type = q.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        q, k, v = _autocast(q, k, v)
    make_spec = AttentionSpec if torch.compiler.is_compiling() else _make_spec
    spec = make_spec(masks.terms, masks.align, cap, p, bool(deterministic), present, bool(max_logit))
    scale = _default_scale(q) if softmax_scale is None else check_number(softmax_scale, "softmax_scale", -LARGEST)
    signatures = tuple([(t.shape, t.dtype, t.device) for t in (q, k, v, *aux)])
    return Call(q, k, v, aux, spec, scale, max_q, max_k, signatures)


def _default_scale(q: Tensor) -> float:
    """``D ** -0.5``; for shapes that the checks are about to refuse, any number."""
    shape = q.shape
    return shape[-1] ** -0.5 if shape and shape[-1] > 0 else 1.0


def _checked_uncached(signatures, spec, max_q, max_k, backend) -> str:
    return dispatch.select(problem_of(signatures, spec, max_q, max_k), backend)


# A training loop makes the same few calls for ever: their spec, checks and backend are found here.
_make_spec = lru_cache(maxsize=1024)(AttentionSpec)
_checked = lru_cache(maxsize=4096)(_checked_uncached)


class _Masks(NamedTuple):
    """All mask parts of a call."""

    terms: tuple[MaskTerm, ...]
    tensors: list[Tensor]
    align: str  # a call has one


def _collect_masks(mask: Mask | Tensor | None, causal: bool | str, window_size: Any) -> _Masks:
    if mask is None and window_size is None and isinstance(causal, bool):
        return _BARE[causal]
    return _combine_masks(mask, causal, window_size)


def _combine_masks(mask: Mask | Tensor | None, causal: bool | str, window_size: Any) -> _Masks:
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
    terms = tuple(MaskTerm(part.name, part.params, len(part.tensors)) for part in parts)
    return _Masks(terms, [t for part in parts for t in part.tensors], stated.pop() if stated else "bottom_right")


#: What most calls ask for, combined once.
_BARE = {causal: _combine_masks(None, causal, None) for causal in (False, True)}


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
        if t.layout is not torch.strided or t.is_nested:
            raise TypeError(
                f"{name} must be a dense (strided) tensor, got layout {t.layout}; packed ones go to attention_varlen"
            )


def _optional_int(value: Any) -> int | None:
    return None if value is None else as_int(value, "max_seqlen")


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast like scaled_dot_product_attention under autocast: to the autocast dtype, float64 left alone."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors]
