"""The torch.library ops, their fake kernels and their autograd: the only autograd code in the package.

Three paths meet here, told apart in `attention`. Plain eager tensors go to an old-style `autograd.Function` that calls the
backend itself: each pass through the dispatcher from Python costs more than all our checks together. Whatever watches or
transforms ops (torch.compile, fake tensors, dispatch modes, tensor subclasses) goes through the op
`torch.ops.tilewise.attention_fwd`, whose Autograd kernel calls the same kind of Function. torch.func transforms need a
new-style Function (`setup_context`), slower again, so they have one of their own. All share one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.backends.base import Needs
from tilewise.spec import DIFFERENTIABLE, AttentionSpec, bind

_library = torch.library.Library("tilewise", "DEF")
_library.define(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor[] aux, str spec, float scale, str backend,"
    " SymInt max_q, SymInt max_k)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_bwd(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor[] aux, str spec,"
    " float scale, str backend, SymInt max_q, SymInt max_k, bool[] needs) -> Tensor[]"
)
_fwd = torch.ops.tilewise.attention_fwd.default
_bwd = torch.ops.tilewise.attention_bwd.default

DOUBLE_BACKWARD = (
    "tilewise: double backward is not implemented. The gradient of a gradient of attention needs kernels of its own; "
    "compute it with tilewise.reference.attention, which is differentiable any number of times."
)
JVP = "tilewise: forward-mode derivatives (jvp) are not implemented; use tilewise.reference.attention for them."
BATCHED_GRADIENTS = (
    "tilewise: batched gradients (is_grads_batched=True, vectorize=True) are not implemented; use torch.func.vmap over "
    "torch.func.vjp, or one torch.autograd.grad per vector."
)
JIT_TRACE = (
    "tilewise: torch.jit.trace (and what is built on it, torch.onnx.export with dynamo=False) cannot record these kernels; "
    "use torch.export or torch.compile."
)
VMAP_DROPOUT = "tilewise: vmap over attention with dropout is not supported: every slice would draw the same mask."


def attention(
    q: Tensor, k: Tensor, v: Tensor, aux: list[Tensor], spec: str, scale: float, backend: str, max_q: int, max_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse, max_logit (empty unless the spec asks for it) of a checked call, by whichever path the caller is in."""
    if torch.compiler.is_compiling():
        return _fwd(q, k, v, aux, spec, scale, backend, max_q, max_k)
    if torch._C._get_tracing_state() is not None:  # sizes are tensors then, and what kernels do would be left out
        raise NotImplementedError(JIT_TRACE)
    if torch._C._are_functorch_transforms_active():
        return _FunctorchAttention.apply(q, k, v, spec, scale, backend, max_q, max_k, *aux)  # pyright: ignore
    if is_plain(q, k, v, aux):
        if not wants_grad(q, k, v, *aux):
            _refuse_tangents(q, k, v, *aux)
            return _forward(q, k, v, aux, spec, scale, backend, max_q, max_k)
        return _apply_eager(q, k, v, spec, scale, backend, max_q, max_k, *aux)
    return _fwd(q, k, v, aux, spec, scale, backend, max_q, max_k)


_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor]) -> bool:
    """Whether nothing but a backend has to see the call: real tensors, no dispatch mode."""
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and (not aux or all(type(t) in _PLAIN for t in aux))
        and torch._C._len_torch_dispatch_stack() == 0
        and not q.is_meta
    )


# ---- kernels ----


def _forward(q, k, v, aux, spec, scale, backend, max_q, max_k):
    return dispatch.load(backend).forward(q, k, v, bind(spec, aux, scale), max_q, max_k)


def _backward(do, dlse, q, k, v, o, lse, aux, spec, scale, backend, max_q, max_k, needs):
    bound = bind(spec, aux, scale)
    grads = dispatch.load(backend).backward(do, dlse, q, k, v, o, lse, bound, max_q, max_k, Needs(*needs))
    return [g for g in grads if g is not None]


def _forward_fake(q, k, v, aux, spec, scale, backend, max_q, max_k):
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    heads = q.shape[-2] if AttentionSpec.parse(spec).max_logit else 0
    return o, q.new_empty(lse_shape, dtype=acc), q.new_empty((heads,), dtype=acc)


def _backward_fake(do, dlse, q, k, v, o, lse, aux, spec, scale, backend, max_q, max_k, needs):
    named = dict(zip(AttentionSpec.parse(spec).tensors, aux, strict=False))
    inputs = (q, k, v, *(named.get(name) for name in DIFFERENTIABLE))
    return [t.new_empty(t.shape) for t, needed in zip(inputs, needs, strict=True) if needed and t is not None]


# ---- autograd, eager and compiled ----


def wants_grad(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:  # not `any`: every call comes by here
            if t is not None and t.requires_grad:
                return True
    return False


def _refuse_tangents(*tensors: Tensor) -> None:
    # An old-style Function whose inputs need no backward never sees tangents: without this they would be lost in silence.
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(JVP)


def _forward_autograd(q, k, v, aux, spec, scale, backend, max_q, max_k):
    _refuse_tangents(q, k, v, *aux)
    if wants_grad(q, k, v, *aux):
        return _Attention.apply(q, k, v, spec, scale, backend, max_q, max_k, *aux)
    with torch._C._AutoDispatchBelowAutograd():
        return _fwd(q, k, v, aux, spec, scale, backend, max_q, max_k)


def _backward_autograd(do, dlse, q, k, v, o, lse, aux, spec, scale, backend, max_q, max_k, needs):
    if wants_grad(do, dlse, q, k, v, o, lse, *aux):
        return list(_Backward.apply(spec, scale, backend, max_q, max_k, needs, do, dlse, q, k, v, o, lse, *aux))  # pyright: ignore
    with torch._C._AutoDispatchBelowAutograd():
        return _bwd(do, dlse, q, k, v, o, lse, aux, spec, scale, backend, max_q, max_k, needs)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.spec, ctx.scale, ctx.backend, ctx.max_q, ctx.max_k, *aux = inputs
    o, lse, max_logit = output
    ctx.save_for_backward(q, k, v, o, lse, *aux)
    ctx.mark_non_differentiable(max_logit)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, run: Any) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the forward's inputs (q, k, v, spec, scale, backend, max_q, max_k, *aux)."""
    q, k, v, o, lse, *aux = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    tensors = AttentionSpec.parse(ctx.spec).tensors
    slots = [0, 1, 2] + [8 + tensors.index(name) if name in tensors else None for name in DIFFERENTIABLE]
    needs = [slot is not None and wanted[slot] for slot in slots]
    found: list[Tensor | None] = [None] * (8 + len(aux))
    if do is None and dlse is None:
        return tuple(found)
    grads = iter(run(do, dlse, q, k, v, o, lse, aux, ctx.spec, ctx.scale, ctx.backend, ctx.max_q, ctx.max_k, needs))
    for slot in slots:
        if slot is not None and wanted[slot]:
            found[slot] = next(grads)
    return tuple(found)


class _Attention(torch.autograd.Function):
    """The autograd of the op: its forward and backward are ops again, for whatever watches them below autograd."""

    @staticmethod
    def forward(ctx, q, k, v, spec, scale, backend, max_q, max_k, *aux):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C._AutoDispatchBelowAutograd():
            output = _fwd(q, k, v, aux, spec, scale, backend, max_q, max_k)
        _save(ctx, (q, k, v, spec, scale, backend, max_q, max_k, *aux), output)
        return output

    @staticmethod
    def backward(ctx, do, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradients(ctx, do, dlse, _bwd)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(JVP)


_is_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


def _watched() -> bool:
    """Whether a backward pass is to be seen by autograd or a dispatch mode."""
    return torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0


class _EagerAttention(_Attention):
    """The same for plain tensors: straight to the backend."""

    @staticmethod
    def forward(ctx, q, k, v, spec, scale, backend, max_q, max_k, *aux):  # pyright: ignore[reportIncompatibleMethodOverride]
        output = _forward(q, k, v, aux, spec, scale, backend, max_q, max_k)
        _save(ctx, (q, k, v, spec, scale, backend, max_q, max_k, *aux), output)
        return output

    @staticmethod
    def backward(ctx, do, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        if any(g is not None and _is_batched(g) for g in (do, dlse)):
            raise NotImplementedError(BATCHED_GRADIENTS)
        return _gradients(ctx, do, dlse, _bwd if _watched() else _backward)


class _AttentionAgain(_EagerAttention):
    """The same for a call that is made again: see `again`."""

    @staticmethod
    def forward(ctx, q, k, v, call, at):  # pyright: ignore[reportIncompatibleMethodOverride]
        output = call.start([q, k, v], at)
        _save(ctx, (q, k, v, call.spec, call.scale, call.backend, 0, 0), output)
        return output

    @staticmethod
    def backward(ctx, do, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        if do is None or dlse is not None or type(do) is not Tensor or _watched() or _is_batched(do):
            return _EagerAttention.backward(ctx, do, dlse, None)[:5]
        wanted = ctx.needs_input_grad
        needs = Needs(wanted[0], wanted[1], wanted[2], False, False, False)
        bound = bind(ctx.spec, (), ctx.scale)
        q, k, v, o, lse = ctx.saved_tensors
        grads = dispatch.load(ctx.backend).backward(do, None, q, k, v, o, lse, bound, 0, 0, needs)
        return grads[0], grads[1], grads[2], None, None


# `Function.apply` without its torch.func checks, which `attention` has made already.
_apply_eager: Any = super(torch.autograd.Function, _EagerAttention).apply  # pyright: ignore[reportAttributeAccessIssue]
attention_again: Any = super(torch.autograd.Function, _AttentionAgain).apply  # pyright: ignore[reportAttributeAccessIssue]


class _Backward(torch.autograd.Function):
    """The backward op where its own inputs require grad: right values, and a clear refusal of a second backward."""

    @staticmethod
    def forward(spec, scale, backend, max_q, max_k, needs, do, dlse, q, k, v, o, lse, *aux):  # pyright: ignore
        return tuple(_bwd(do, dlse, q, k, v, o, lse, aux, spec, scale, backend, max_q, max_k, needs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(DOUBLE_BACKWARD)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(JVP)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _loop_vmap(_Backward, info, in_dims, args)


# ---- autograd under torch.func ----


class _FunctorchAttention(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, spec, scale, backend, max_q, max_k, *aux):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _fwd(q, k, v, aux, spec, scale, backend, max_q, max_k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx, do, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradients(ctx, do, dlse, _functorch_bwd)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(JVP)

    @staticmethod
    def vmap(info, in_dims, *args):
        if AttentionSpec.parse(args[3]).dropout_p > 0:
            raise NotImplementedError(VMAP_DROPOUT)
        return _loop_vmap(_FunctorchAttention, info, in_dims, args)


def _functorch_bwd(do, dlse, q, k, v, o, lse, aux, spec, scale, backend, max_q, max_k, needs):
    return _Backward.apply(spec, scale, backend, max_q, max_k, needs, do, dlse, q, k, v, o, lse, *aux)


def _loop_vmap(function: Any, info: Any, in_dims: tuple, args: tuple) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call per slice: right for every mask and modifier, whatever dims they broadcast over."""
    if info.batch_size == 0:  # outputs look like those of a slice
        args = tuple(
            a.new_zeros((*a.shape[:d], 1, *a.shape[d + 1 :])) if isinstance(a, Tensor) and d is not None else a
            for a, d in zip(args, in_dims, strict=True)
        )
    slices = []
    for i in range(max(info.batch_size, 1)):
        picked = [
            a.select(d, i) if isinstance(a, Tensor) and d is not None else a for a, d in zip(args, in_dims, strict=True)
        ]
        slices.append(function.apply(*picked))
    outputs = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*slices, strict=True))
    return outputs, (0,) * len(outputs)


_library.impl("attention_fwd", _forward, "CompositeExplicitAutograd")
_library.impl("attention_bwd", _backward, "CompositeExplicitAutograd")
_library.impl("attention_fwd", _forward_autograd, "Autograd")
_library.impl("attention_bwd", _backward_autograd, "Autograd")
torch.library.register_fake("tilewise::attention_fwd", _forward_fake, lib=_library)
torch.library.register_fake("tilewise::attention_bwd", _backward_fake, lib=_library)
