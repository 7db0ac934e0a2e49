"""Calls made again: the tensors that a call made and the kernels that it started, for other tensors of the same layouts.

Lowering, choosing tiles and building arguments take the host longer than a small kernel takes the GPU. A training loop
makes the same few calls for ever: from the second one on it only allocates and starts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.backends.base import Grads, Needs, Repeat
from tilewise.spec import BoundSpec

from .launch import make_room, on_device, started
from .lower import Lowered, lower
from .precision import tf32_allowed
from .repeated import Maps, Repeated

ALIGNED = 256  # bytes, as all that PyTorch allocates


def call_key(bound: BoundSpec, max_q: int, max_k: int, *tensors: Tensor) -> tuple | None:
    """Equal for calls of which one can be replayed for the other; None for a call that cannot be.

    Args:
        bound, max_q, max_k: of the call. A spec without tensors is the same object in all calls that mean the same.
        tensors: all that the call reads, those of `bound` included.
    """
    x = tensors[0]
    dtype = x.dtype
    key = [bound, dtype, x.device, dtype == torch.float32 and tf32_allowed()]
    if bound.has_tensors:
        key[0] = bound.spec.key, bound.softmax_scale, max_q, max_k
        key += [(y.dtype, y.device) for y in bound.tensors]
    for y in tensors:
        if y.data_ptr() % 16 or y.is_neg():
            return None
        key += y.shape, y.stride()
    numbers = [*map(id, tensors)]
    if len({*numbers}) < len(numbers):  # a tensor that stands in two places does so in every replay
        key += [numbers.index(number) for number in numbers]
    return tuple(key)


class Replays:
    """The calls of one pass that can be made again."""

    def __init__(self):
        self._known: dict[Hashable, _Replay | None] = {}
        self._seen: set[Hashable] = set()

    def call(
        self, key: Hashable | None, inputs: tuple, make: Callable[[], Iterable[Tensor | None]]
    ) -> Sequence[Tensor | None]:
        """What ``make()`` returns, by a replay where it was called twice with this key.

        The second call is recorded, which takes longer than the call: keys that never come again (a cache of keys and
        values that grows) are not worth that.

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
            return replay.play(list(inputs), [x.data_ptr() for x in inputs])
        if key in self._known:
            return list(make())
        if key not in self._seen:
            make_room(self._seen)
            self._seen.add(key)
            return list(make())
        with started() as starts, _Watch(starts) as watch:
            outputs = list(make())
        make_room(self._known)
        self._known[key] = _Replay.of(inputs, watch, starts, outputs)
        return outputs

    def repeated(self, q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec) -> Repeat | None:
        """`Forward.repeated` of those that came by `replayed_forward`."""
        replay = self._known.get(call_key(bound, 0, 0, q, k, v))
        return None if replay is None else replay.play  # pyright: ignore[reportReturnType]  all three are there


def replayed_forward(
    replays: Replays, ready: Callable[[Tensor], Tensor], launch: Callable[[Tensor, Tensor, Tensor, Lowered], Any],
    q: Tensor, k: Tensor, v: Tensor, bound: BoundSpec, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`Backend.forward` by `launch`, which takes tensors as `ready` makes them and the lowered call."""

    def make() -> Iterable[Tensor]:
        x, y, z = map(ready, (q, k, v))
        return launch(x, y, z, lower(x, y, bound, max_q, max_k))

    inputs = (q, k, v, *bound.tensors) if bound.has_tensors else (q, k, v)
    with on_device(q):
        o, lse, max_logit = replays.call(call_key(bound, max_q, max_k, *inputs), inputs, make)
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

    inputs = tuple([x for x in (q, k, v, o, lse, do, dlse) if x is not None])
    if bound.has_tensors:
        inputs += bound.tensors
    key = call_key(bound, max_q, max_k, *inputs)
    with on_device(q):
        grads = replays.call(key and (key, needs, do is None), inputs, make)
    return Grads(*grads).shaped_like(bound) if bound.spec.tensors else Grads(*grads)


FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0}


class _Watch(TorchDispatchMode):
    """Sees every PyTorch operation: the tensors made by allocating, and whether there was any other operation.

    Args:
        starts: those of kernels, a list that grows meanwhile. What is filled before any can be filled as it is allocated.
    """

    def __init__(self, starts: list):
        super().__init__()
        self._starts = starts
        self.made: list[tuple[Tensor, float | None]] = []  # with what they are filled
        self.views: list[tuple[Tensor, Tensor]] = []  # at the same address as another tensor
        self.only_allocates = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("empty", "new_empty", "empty_like", "empty_strided"):
            self.made.append((out, None))
        elif name in ("full", "new_full", "zeros", "zeros_like", "new_zeros"):
            self.made.append((out, FILLS.get(name, args[-1])))
        elif name == "detach" and self.made and args[0] is self.made[-1][0]:
            self.made[-1] = (out, self.made[-1][1])  # autograd returns what is made anew through one
        elif name in ("zero_", "fill_") and not self._starts:
            self._filled(args[0], FILLS.get(name, args[-1]))
        elif name == "expand":
            self.views.append((out, args[0]))
        else:
            self.only_allocates = False
        return out

    def _filled(self, x: Tensor, value: Any) -> None:
        for i, (made, _) in enumerate(self.made):
            if made is x and not isinstance(value, Tensor):
                self.made[i] = x, value
                return
        self.only_allocates = False


class _Start(NamedTuple):
    """One kernel, and which of its arguments hold addresses of which tensors."""

    kernel: Repeated
    structs: list[tuple[int, int, tuple]]  # place among its arguments, tensor, what follows its address in a struct
    records: list[tuple[int, list, list[tuple[int, int]]]]  # place, a struct, (place in the struct, tensor)
    addresses: list[tuple[int, int]]  # place, tensor
    descriptors: list[tuple[int, int, dict[int, Any], Maps]]


class _Replay:
    """One call as a list: allocate, start, start, return.

    Args:
        device: of all tensors.
        made: tensors to make.
        scratch: bytes that only the kernels see, of all tensors that are not returned together.
        places: where in these bytes each of them lies.
        starts: kernels; tensors are numbered: those given, those made, those in `scratch`.
        outputs: numbers of the tensors to return, or None.
    """

    def __init__(
        self, device: torch.device, made: list, scratch: int, places: list[int], starts: list[_Start], outputs: list
    ):
        self._allocate = _allocator(device)
        self._made, self._scratch, self._places, self._starts, self._outputs = made, scratch, places, starts, outputs

    @classmethod
    def of(cls, inputs: tuple, watch: _Watch, starts: list[tuple], outputs: list) -> _Replay | None:
        returned = {id(t) for t in outputs}
        own = [(t, f) for t, f in watch.made if f is None and id(t) not in returned and t.shape != (0,)]
        scratch, places = 0, []
        for t, _ in own:
            places.append(scratch)
            scratch += -(-_span(t) // ALIGNED) * ALIGNED
        made = [x for x in watch.made if not any(x[0] is t for t, _ in own)]
        numbers = {id(t): i for i, t in enumerate((*inputs, *(t for t, _ in (*made, *own))))}
        found = [None if t is None else numbers.get(id(t), -1) for t in outputs]
        for view, x in watch.views:
            if id(x) in numbers:
                numbers[id(view)] = numbers[id(x)]
        known = [_start(compiled, grid, args, numbers) for compiled, grid, args in starts]
        if not watch.only_allocates or None in known or -1 in found:
            return None
        device = inputs[0].device
        if any(t.device != device for t, _ in watch.made):
            return None
        remade = [(_nothing(t), tuple(t.shape), t.stride(), t.dtype, fill) for t, fill in made]
        return cls(device, remade, scratch, places, known, found)  # pyright: ignore[reportArgumentType]

    def play(self, tensors: list[Tensor], at: list[int]) -> tuple[Tensor | None, ...]:
        """Make the call again; both lists, of the tensors given and of their addresses, are used up."""
        for nothing, shape, strides, dtype, fill in self._made:
            new = self._allocate(shape, strides, dtype) if nothing is None else nothing
            if fill is not None:
                new.fill_(fill)
            tensors.append(new)
            at.append(new.data_ptr())
        if self._scratch:
            scratch = self._allocate((self._scratch,), (1,), torch.uint8)
            start = scratch.data_ptr()
            at += [start + place for place in self._places]
        for kernel, structs, records, addresses, descriptors in self._starts:
            args = kernel.args.copy()
            for place, i, rest in structs:
                args[place] = (at[i],) + rest  # noqa: RUF005  half the time of (at[i], *rest)
            for place, fields, holes in records:
                filled = fields.copy()
                for field, i in holes:
                    filled[field] = at[i]
                args[place] = tuple(filled)
            for place, i in addresses:
                args[place] = at[i]
            for place, i, known, maps in descriptors:
                args[place] = known.get(at[i]) or maps.encode(at[i])
            kernel.start(args)
        return tuple([None if i is None else tensors[i] for i in self._outputs])


def _allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], Tensor]:
    """``empty_strided`` on a device that is the current one by then: the way of torch.compile's own code, if it is there."""
    direct = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportAttributeAccessIssue]
    if device.type == "cuda" and torch.version.hip is None and direct is not None:
        return direct
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _span(t: Tensor) -> int:
    """Bytes from the first to the last element."""
    if not t.numel():
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))) * t.element_size()


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
    start = _Start(Repeated(compiled, grid, args), [], [], [], [])
    for (place, maps), arg in zip(start.kernel.places, args, strict=True):
        fields = list(arg) if isinstance(arg, tuple) else [getattr(arg, "base", arg)]
        if any(isinstance(field, (tuple, list)) for field in fields):  # a tensor in there would be kept, not replaced
            return None
        holes = [(field, id(x)) for field, x in enumerate(fields) if isinstance(x, Tensor)]
        if not holes:
            continue
        if any(tensor not in numbers for _, tensor in holes):
            return None
        holes = [(field, numbers[tensor]) for field, tensor in holes]
        start.kernel.args[place] = None
        if maps is not None:
            start.descriptors.append((place, holes[0][1], maps.known, maps))
        elif arg is fields[0]:
            start.addresses.append((place, holes[0][1]))
        elif not isinstance(arg, tuple):
            return None
        elif len(holes) == 1 and holes[0][0] == 0:
            start.structs.append((place, holes[0][1], tuple(fields[1:])))
        else:
            for field, _ in holes:
                fields[field] = None
            start.records.append((place, fields, holes))
    return start
