"""Calls of `attention` made again, from what was given straight to the kernels: a look at layouts, and no further.

Describing a call, checking it and choosing its backend take the host longer than starting a kernel. All of that is a
function of the options and of shapes, strides, dtypes and devices: where a backend can repeat its part
(`Forward.repeated`), these are all there is to look at. Anything unusual goes the long way.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch, ops
from tilewise.backends.base import Repeat
from tilewise.call import Call
from tilewise.spec import bind

MOST = 1024  # calls that are remembered
DTYPES = (torch.bfloat16, torch.float16)  # what float32 products round to is a setting that can change


class Again(NamedTuple):
    """One call as it can be made again."""

    start: Repeat
    spec: str
    scale: float
    backend: str
    device: int


_known: dict[Any, Again] = {}
_on_gpu = attrgetter("is_cuda")


def _unwatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether neither torch.func nor a mode nor torch.jit.trace is to see the call: sizes are plain numbers, too."""
    traced = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    return not traced and ops.is_plain(q, k, v, ())


def key_of(
    q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any, dropout_p: Any, deterministic: Any, layout: Any,
    backend: str | None, return_max_logit: Any,
) -> tuple | None:  # fmt: skip
    """Equal for calls that differ in the values of q, k and v only; None for whatever is to go the long way.

    The arguments are those of `tilewise.attention`, whose others are absent.
    """
    plain = type(causal) is bool and (softmax_scale is None or type(softmax_scale) is float) and type(layout) is str
    if (
        not plain
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or (backend is not None and type(backend) is not str)
    ):
        return None
    try:
        if not (_on_gpu(q) and _unwatched(q, k, v)):
            return None
        return (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
            v.device, causal, softmax_scale, bool(deterministic), layout, backend, bool(return_max_logit),
            dispatch.preferred(),
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or one without strides: the long way says so
        return None


def attention(key: tuple | None, q: Tensor, k: Tensor, v: Tensor, swap: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """o, lse and max_logit of a call that was made before, or None.

    Args:
        key: see `key_of`.
        q, k, v: as `attention` was given them.
        swap: whether they are (B, H, S, D); o is always (B, S, H, D).
    """
    call = _known.get(key)
    if call is None or q is k or k is v or q is v or forward_ad._current_level >= 0:
        return None
    at = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    if (at[0] | at[1] | at[2]) % 16 or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if call.device != torch.cuda.current_device() or torch.is_autocast_enabled("cuda"):
        return None
    if not ops.wants_grad(q, k, v):
        return call.start([q, k, v], at)
    if swap:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ops.attention_again(q, k, v, call, at)


def remember(key: tuple, call: Call, backend: str) -> None:
    """Have `attention` make a call of this key again, if its backend can."""
    if call.q.dtype not in DTYPES or torch.is_autocast_enabled("cuda"):  # which may have cast q, k and v
        return
    repeated = getattr(dispatch.load(backend), "repeated", None)
    bound = bind(call.spec.key, (), call.scale)
    start = None if repeated is None else repeated(call.q, call.k, call.v, bound)
    if start is not None:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = Again(start, call.spec.key, call.scale, backend, call.q.device.index)
