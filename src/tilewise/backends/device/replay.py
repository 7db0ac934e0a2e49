"""Calls made again: the tensors that a call made and the kernels that it started, for other tensors of the same layouts.

Lowering, choosing tiles and building arguments take the host longer than a small kernel takes the GPU. A training loop
makes the same few calls for ever: from the second one on it only allocates and starts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.backends.base import Grads, Needs
from tilewise.spec import BoundSpec

from .launch import on_device, started
from .lower import Lowered, lower
from .precision import tf32_allowed
from .repeated import Maps, Repeated

MOST = 1024  # calls that are remembered


def call_key(bound: BoundSpec, *tensors: Tensor) -> tuple | None:
    """Equal for calls of which one can be replayed for the other; None for a call that cannot be.

    Tensors inside `bound` (biases, cu_seqlens, ...) are not among those that a replay replaces. One tensor given twice
    could not be told from two.
    """
    if bound.has_tensors or len({*map(id, tensors)}) < len(tensors):
        return None
    x = tensors[0]
    dtype = x.dtype
    key = [bound, dtype, x.device, dtype == torch.float32 and tf32_allowed()]
    for y in tensors:
        if y.data_ptr() % 16 or y.is_neg():
            return None
        key += y.shape, y.stride()
    return tuple(key)


class Replays:
    """The calls of one pass that can be made again."""

    def __init__(self):
        self._known: dict[Hashable, _Replay | None] = {}

    def call(
        self, key: Hashable | None, inputs: tuple, make: Callable[[], Iterable[Tensor | None]]
    ) -> list[Tensor | None]:
        """What ``make()`` returns, by a replay where it was called before with this key.

        Args:
            key: see `call_key`; None: never replayed.
            inputs: the tensors that `make` reads, in an order that the key implies.
            make: allocates, starts kernels through a `Launcher`, and returns tensors that it was given or made. Where it
                does anything else, it is called every time.
        """
        if key is None:
            return list(make())
        replay = self._known.get(key)
        if replay is not None:
            return replay.play(inputs)
        if key in self._known:
            return list(make())
        with _Watch() as watch, started() as starts:
            outputs = list(make())
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[key] = _Replay.of(inputs, watch, starts, outputs)
        return outputs


def replayed_forward(
    replays: Replays, ready: Callable[[Tensor], Tensor], launch: Callable[[Tensor, Tensor, Tensor, Lowered], Any],
    q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`Backend.forward` by `launch`, which takes tensors as `ready` makes them and the lowered call."""

    def make() -> Iterable[Tensor]:
        x, y, z = map(ready, (q, k, v))
        return launch(x, y, z, lower(x, y, bound, max_q, max_k))

    with on_device(q):
        o, lse, max_logit = replays.call(call_key(bound, q, k, v), (q, k, v), make)
    return o, lse, max_logit  # pyright: ignore[reportReturnType]  all three are there


def replayed_backward(
    replays: Replays, ready: Callable[[Tensor], Tensor], launch: Callable[..., Grads], do: Tensor | None,
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bound: BoundSpec, max_q: int, max_k: int,
    needs: Needs,
) -> Grads:  # fmt: skip
    """`Backend.backward` by `launch`, likewise."""

    def make() -> Grads:
        x, y, z, out = map(ready, (q, k, v, o))
        upstream = None if do is None else ready(do)
        return launch(upstream, dlse, x, y, z, out, lse, lower(x, y, bound, max_q, max_k), needs)

    inputs = tuple(x for x in (q, k, v, o, lse, do, dlse) if x is not None)
    key = call_key(bound, *inputs)
    with on_device(q):
        grads = replays.call(key and (key, needs, do is None), inputs, make)
    return Grads(*grads).shaped_like(bound)


class _Watch(TorchDispatchMode):
    """Sees every PyTorch operation: the tensors made by allocating, and whether there was any other operation."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[Tensor, float | None]] = []  # with what they are filled
        self.only_allocates = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("empty", "new_empty", "empty_like", "empty_strided"):
            self.made.append((out, None))
        elif name in ("full", "new_full"):
            self.made.append((out, args[-1]))
        elif name == "detach" and self.made and args[0] is self.made[-1][0]:
            self.made[-1] = (out, self.made[-1][1])  # autograd returns what is made anew through one
        else:
            self.only_allocates = False
        return out


class _Start(NamedTuple):
    """One kernel, and which of its arguments hold addresses of which tensors."""

    kernel: Repeated
    structs: list[tuple[int, int, tuple]]  # place among its arguments, tensor, what follows its address in a struct
    addresses: list[tuple[int, int]]  # place, tensor
    descriptors: list[tuple[int, int, Maps]]


class _Replay:
    """One call as a list: allocate, start, start, return."""

    def __init__(self, made: list, starts: list[_Start], outputs: list):
        self._made, self._starts, self._outputs = made, starts, outputs

    @classmethod
    def of(cls, inputs: tuple, watch: _Watch, starts: list[tuple], outputs: list) -> _Replay | None:
        tensors = (*inputs, *(t for t, _ in watch.made))
        numbers = {id(t): i for i, t in enumerate(tensors)}
        known = [_start(compiled, grid, args, numbers) for compiled, grid, args in starts]
        if not watch.only_allocates or None in known or any(t is not None and id(t) not in numbers for t in outputs):
            return None
        made = [(_nothing(t), t.shape, t.stride(), t.dtype, t.device, fill) for t, fill in watch.made]
        return cls(made, known, [None if t is None else numbers[id(t)] for t in outputs])  # pyright: ignore

    def play(self, inputs: tuple) -> list[Tensor | None]:
        tensors = list(inputs)
        for nothing, shape, strides, dtype, device, fill in self._made:
            if nothing is None:
                new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                tensors.append(new if fill is None else new.fill_(fill))
            else:
                tensors.append(nothing)
        at = [t.data_ptr() for t in tensors]
        for kernel, structs, addresses, descriptors in self._starts:
            args = kernel.args.copy()
            for place, i, rest in structs:
                args[place] = (at[i], *rest)
            for place, i in addresses:
                args[place] = at[i]
            for place, i, maps in descriptors:
                args[place] = maps.known.get(at[i]) or maps.encode(at[i])
            kernel.start(args)
        return [None if i is None else tensors[i] for i in self._outputs]


def _nothing(t: Tensor) -> Tensor | None:
    """An empty vector, which says that something was not asked for: one serves all calls. Callers do not get to see it."""
    if t.shape != (0,):
        return None
    with torch.inference_mode(False):
        return torch.empty(0, dtype=t.dtype, device=t.device)


def _start(compiled: Any, grid: int, args: tuple, numbers: dict[int, int]) -> _Start | None:
    """A start as it can be repeated, without the tensors; None if it cannot be."""
    if compiled is None:
        return None
    start = _Start(Repeated(compiled, grid, args), [], [], [])
    for (place, maps), arg in zip(start.kernel.places, args, strict=True):
        fields = arg if isinstance(arg, tuple) else (getattr(arg, "base", arg),)
        tensors = [field for field in fields if isinstance(field, Tensor)]
        if any(isinstance(field, (tuple, list)) for field in fields):  # a tensor in there would be kept, not replaced
            return None
        if not tensors:
            continue
        if len(tensors) > 1 or fields[0] is not tensors[0] or id(tensors[0]) not in numbers:
            return None
        i = numbers[id(tensors[0])]
        start.kernel.args[place] = None
        if maps is not None:
            start.descriptors.append((place, i, maps))
        elif isinstance(arg, tuple):
            start.structs.append((place, i, tuple(arg[1:])))
        elif arg is tensors[0]:
            start.addresses.append((place, i))
        else:
            return None
    return start
