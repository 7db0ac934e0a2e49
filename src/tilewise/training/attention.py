"""The ways a model here can attend, with one meaning: causal, and inside each token's own document if there are several.

Each is a function of the documents that returns the attention of one forward pass, so that a mask is made once and shared
by all layers. Shapes as everywhere in tilewise: q (B, Sq, H, D), k and v (B, Sk, Hkv, D), o (B, Sq, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise.training.config import TrainConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: From document numbers (B, S), or None for one document, and a dropout probability.
MakeAttend = Callable[[Tensor | None, float], Attend]


def tilewise_attention(documents: Tensor | None, dropout_p: float = 0.0, deterministic: bool = True) -> Attend:
    """The library's own: the mask is two numbers per token, and no Sq x Sk object exists. Its bits repeat, if asked to."""
    mask = None if documents is None else tilewise.Document(documents)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask=mask, causal=True, dropout_p=dropout_p, deterministic=deterministic)

    return attend


def standard_attention(documents: Tensor | None, dropout_p: float = 0.0) -> Attend:
    """The textbook's: S = scale * q k^T, P = softmax(S), o = P v, all in memory, P kept for the backward pass.

    Written as well as separate PyTorch calls allow, so that it is a fair opponent: the scale goes to q and the mask is
    applied in place, two passes over S less.
    """
    visible = _Visible(documents)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, *_repeat_kv(q, k, v)))
        s = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        p = s.masked_fill_(~visible(q.shape[2], k.shape[2], q.device), float("-inf")).softmax(dim=-1)
        return (F.dropout(p, dropout_p) @ v).transpose(1, 2)

    return attend


def sdpa_attention(documents: Tensor | None, dropout_p: float = 0.0, kernel: SDPBackend | None = None) -> Attend:
    """PyTorch's `scaled_dot_product_attention`, by a kernel of its choice or this one.

    It is told ``is_causal`` where that says all, as for whole rows of one document, nothing where the one query sees all
    keys, and else a boolean matrix.
    """
    visible = _Visible(documents)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, *_repeat_kv(q, k, v)))
        square = documents is None and q.shape[2] == k.shape[2]
        unmasked = square or (documents is None and q.shape[2] == 1)
        mask = None if unmasked else visible(q.shape[2], k.shape[2], q.device)
        with sdpa_kernel(kernel) if kernel else nullcontext():
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=square)
        return o.transpose(1, 2)

    return attend


MAKE_ATTEND: dict[str, MakeAttend] = {
    "tilewise": tilewise_attention,
    "standard": standard_attention,
    "sdpa": sdpa_attention,
    "flash": partial(sdpa_attention, kernel=SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(sdpa_attention, kernel=SDPBackend.CUDNN_ATTENTION),
}


def make_attend_of(config: TrainConfig) -> MakeAttend:
    """The attention that the config asks for."""
    options = {"deterministic": False} if config.attention == "tilewise" and not config.deterministic else {}
    return partial(MAKE_ATTEND[config.attention], **options)


class _Visible:
    """The mask as a boolean (B or 1, 1, Sq, Sk) matrix, made at its first use and kept for the other layers."""

    def __init__(self, documents: Tensor | None):
        self.documents = documents
        self.mask: Tensor | None = None

    def __call__(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        if self.mask is None:
            causal = torch.ones(Sq, Sk, dtype=torch.bool, device=device).tril(Sk - Sq)
            ids = self.documents
            same = True if ids is None else ids[:, None, :, None] == ids[:, None, None, :]
            self.mask = causal[None, None] & same
        return self.mask


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped-query attention for code that wants as many kv heads as query heads."""
    groups = q.shape[2] // k.shape[2]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2))
