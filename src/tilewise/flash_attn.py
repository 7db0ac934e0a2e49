"""The names and positional arguments of the `flash_attn` package (FlashAttention-2), translated to `tilewise`.

``from tilewise.flash_attn import flash_attn_func`` takes the place of ``from flash_attn import flash_attn_func``. Meanings
are those of `flash_attn`: a causal call is bottom-right aligned, `window_size` (-1, -1) and `softcap` 0.0 mean none, query
head h reads kv head ``h // (H // Hkv)``. What differs, always in the direction of more:

- float32 and float64 are accepted beside float16 and bfloat16, head dims to 576, Dv != D, softcap together with dropout;
- `alibi_slopes` get a gradient, and the returned lse is differentiable and includes the whole ALiBi bias;
- a row that sees no key has lse -inf (`flash_attn`: +inf).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import reference, spec
from tilewise.api import attention, attention_varlen
from tilewise.call import dense_call, packed_call


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`tilewise.attention` by the name and arguments of `flash_attn`.

    Args:
        q, k, v: (B, Sq, H, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in `flash_attn`.
        return_attn_probs: also return lse and S_dmask, for tests: this builds the (Sq, Sk) matrix when dropout_p > 0.

    Returns:
        o (B, Sq, H, Dv); with return_attn_probs (o, lse, S_dmask): lse (B, H, Sq), S_dmask empty without dropout, else the
        attention weights (B, H, Sq, Sk) in q's dtype, both lengths padded to a multiple of 128, negative where dropped.

    Raises:
        TypeError, ValueError, NoBackendError: as `tilewise.attention`.

    Example:
        >>> import torch
        >>> from tilewise.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 32, 4, 16).unbind()
        >>> flash_attn_func(q, k, v, 0.0, None, True).shape
        torch.Size([2, 32, 4, 16])
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if not return_attn_probs:
        return attention(q, k, v, **options)
    generator, state = _generator()
    o, lse = attention(q, k, v, return_lse=True, generator=generator, **options)
    call = dense_call(
        q, k, v, mask=None, bias=None, sinks=None, layout="bshd", generator=generator.set_state(state), **options
    )
    return o, lse, _dropout_mask(call)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with keys and values in one tensor, kv (B, Sk, 2, Hkv, D)."""
    k, v = _unpack(kv, "kv", 2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with all three in one tensor, qkv (B, S, 3, H, D)."""
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _unpack(qkv, "qkv", 3)
    return flash_attn_func(q, k, v, *tail)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`tilewise.attention_varlen` by the name and arguments of `flash_attn`.

    Args:
        q, k, v: packed, (total_q, H, D), (total_k, Hkv, D), (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: int32 (B + 1,) and ints.
        block_table: not accepted; paged keys belong to the KV-cache function.
        others: as in `flash_attn_func`.

    Returns:
        o (total_q, H, Dv); with return_attn_probs (o, lse (H, total_q), S_dmask (B, H, max Sq, max Sk) padded to 128).

    Raises:
        NotImplementedError: a block_table was given.
        TypeError, ValueError, NoBackendError: as `tilewise.attention_varlen`.
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table (paged keys and values) is not supported by flash_attn_varlen_func; it belongs to "
            "flash_attn_with_kvcache, which is not in this version of tilewise"
        )
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not return_attn_probs:
        return attention_varlen(q, k, v, *lengths, **options)
    generator, state = _generator()
    o, lse = attention_varlen(q, k, v, *lengths, return_lse=True, generator=generator, **options)
    absent = {"seqused_q": None, "seqused_k": None, "mask": None, "bias": None, "sinks": None}
    call = packed_call(q, k, v, *lengths, **absent, generator=generator.set_state(state), **options)
    return o, lse, _dropout_mask(call)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with keys and values in one tensor, kv (total_k, 2, Hkv, D)."""
    k, v = _unpack(kv, "kv", 2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *tail)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with all three in one tensor, qkv (total, 3, H, D)."""
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _unpack(qkv, "qkv", 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *tail)


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic) -> dict[str, Any]:
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": bool(causal),  # with a window: both, so that its right side is 0
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def _unpack(t: Tensor, name: str, parts: int) -> tuple[Tensor, ...]:
    if not isinstance(t, Tensor) or t.dim() not in (4, 5) or t.shape[-3] != parts:
        shape = tuple(t.shape) if isinstance(t, Tensor) else t
        raise ValueError(f"{name} must be (B, S, {parts}, H, D) or packed (total, {parts}, H, D), got {shape}")
    return t.unbind(-3)


def _generator() -> tuple[torch.Generator, Tensor]:
    """A generator seeded from torch's own, and its state: drawing from it twice gives one dropout mask twice."""
    generator = torch.Generator().manual_seed(int(torch.randint(0, 2**63 - 1, ())))
    return generator, generator.get_state()


@torch.no_grad()
def _dropout_mask(call: Any) -> Tensor:
    if call.spec.dropout_p == 0:
        return call.q.new_empty(0)
    signed = reference.signed_probabilities(call.q, call.k, spec.bind(call.spec.key, call.aux, call.scale))
    return F.pad(signed, (0, -signed.shape[3] % 128, 0, -signed.shape[2] % 128))
