"""Calls made again: what a replay allocates, which addresses its kernels get, and which calls are never replayed."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

from tilewise.backends.device import launch, repeated, replay
from tilewise.spec import AttentionSpec, bind

BOUND = bind(AttentionSpec().key, [], 0.5)


class Pair(NamedTuple):
    data: torch.Tensor
    stride: int


class _Kernel:
    """Stands for a compiled kernel: keeps the arguments of every start."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        def start(*args, **options):
            self.seen.append(args)
            return self

        return start


@pytest.fixture
def kernel(monkeypatch):
    kernel = _Kernel()
    monkeypatch.setattr(repeated, "_below", lambda compiled: None)
    monkeypatch.setattr(repeated, "run", lambda compiled, grid, args: compiled.seen.append(tuple(args)))
    return kernel


def _call(replays, kernel, x, y, fill=None, extra=None):
    def make():
        out = x.new_empty(x.shape)
        if fill is not None:
            out = torch.full(x.shape, fill)
        if extra is not None:
            extra(out)
        launch.Launcher().start(kernel, "key", 3, (Pair(x, 7), Pair(y, 9), out, None, 5), {})
        return out, None

    return replays.call(replay.call_key(BOUND, x, y), (x, y), make)


def test_a_replay_gives_kernels_the_new_tensors(kernel):
    replays = replay.Replays()
    x, y, other_x, other_y = (torch.randn(4, 6) for _ in range(4))
    _call(replays, kernel, x, y)
    out, nothing = _call(replays, kernel, other_x, other_y)
    assert nothing is None
    assert out.shape == x.shape and out.data_ptr() not in (other_x.data_ptr(), other_y.data_ptr())
    assert kernel.seen[1] == ((other_x.data_ptr(), 7), (other_y.data_ptr(), 9), out.data_ptr(), None, 5)


def test_a_replay_keeps_no_tensor_of_the_call_it_repeats(kernel):
    replays = replay.Replays()
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    _call(replays, kernel, x, y)
    (kept,) = replays._known.values()
    held = [kept._made, kept._starts, kept._outputs]
    assert not any(isinstance(thing, torch.Tensor) for thing in _leaves(held))


def _leaves(thing):
    return [leaf for part in thing for leaf in _leaves(part)] if isinstance(thing, (list, tuple)) else [thing]


def test_what_was_filled_is_filled_again(kernel):
    replays = replay.Replays()
    _call(replays, kernel, torch.randn(4, 6), torch.randn(4, 6), fill=2.5)
    out, _ = _call(replays, kernel, torch.randn(4, 6), torch.randn(4, 6), fill=2.5)
    assert (out == 2.5).all()


def test_layouts_are_told_apart(kernel):
    x = torch.randn(4, 6)
    keys = {replay.call_key(BOUND, x, y) for y in (x.clone(), x.bfloat16(), torch.randn(6, 4).T, torch.randn(4, 8))}
    assert len(keys) == 3  # dtypes are equal within a call
    assert replay.call_key(BOUND, x, x) is None
    assert replay.call_key(BOUND, torch.randn(25)[1:].view(4, 6), x) is None  # not aligned to 16 bytes


def test_tensors_in_the_spec_are_never_replayed():
    spec = AttentionSpec(tensors=("sinks",))
    assert replay.call_key(bind(spec.key, [torch.zeros(2)], 0.5), torch.randn(4), torch.randn(4)) is None


def test_a_call_that_does_more_than_allocate_is_made_anew(kernel):
    replays = replay.Replays()
    for _ in range(3):
        x, y = torch.randn(4, 6), torch.randn(4, 6)
        out, _ = _call(replays, kernel, x, y, extra=lambda out: out.zero_())
        assert (out == 0).all()
    assert list(replays._known.values()) == [None]
    assert all(isinstance(args[2], torch.Tensor) for args in kernel.seen)


def test_a_tensor_of_unknown_origin_is_never_replayed(kernel):
    replays, stranger = replay.Replays(), torch.randn(4)
    x = torch.randn(4)

    def make():
        launch.Launcher().start(kernel, "key", 1, (stranger,), {})
        return [x]

    replays.call(replay.call_key(BOUND, x), (x,), make)
    assert list(replays._known.values()) == [None]


def test_a_tensor_in_a_struct_within_a_struct_is_never_replayed(kernel):
    """It would be taken for a constant, and the next call would read the tensor of this one."""
    replays, x = replay.Replays(), torch.randn(4)

    def make():
        launch.Launcher().start(kernel, "key", 1, (x, (3, Pair(x, 7))), {})
        return [x]

    replays.call(replay.call_key(BOUND, x), (x,), make)
    assert list(replays._known.values()) == [None]


class _Described:
    """A tensor descriptor."""

    padding = "zero"

    def __init__(self, base, shape, strides, block_shape):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape


def test_a_replay_below_triton_s_launcher_passes_on_what_it_would(monkeypatch):
    """Descriptors are encoded at the address of the new tensor, once for each; the rest is as Triton hands it over."""
    encoded, launched = [], []

    def encode(address, *rest):
        encoded.append(address)
        return ("map", address, *map(str, rest))

    active = SimpleNamespace(
        utils=SimpleNamespace(fill_tma_descriptor=encode),
        get_current_device=lambda: 3,
        get_current_stream=lambda d: 70 + d,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    meta = [{"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [2, 6], "fp4_padded": False}]
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.launch = wrap_handle_tensordesc(
        lambda *args: launched.append(args),
        {0: "tensordesc<fp32[2, 6]>", 1: ("*fp32", "i32"), 2: "*fp32", 3: "i32"},
        meta,
    )
    launcher.launch_cooperative_grid = launcher.launch_pdl = False
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.num_ctas, launcher.global_scratch_align, launcher.profile_scratch_align = 1, 1, 1
    compiled = SimpleNamespace(
        run=launcher, function=11, packed_metadata=(4, 1, 99),
        metadata=SimpleNamespace(global_scratch_size=0, tensordesc_meta=meta), launch_metadata=lambda *_: None,
    )  # fmt: skip
    replays = replay.Replays()

    def call(x, y):
        def make():
            args = (_Described(x, [4, 6], [6, 1], [2, 6]), Pair(y, 9), y, 5)
            launch.run(compiled, 8, args)
            launch._thread.starts.append((compiled, 8, args))
            return [x]

        replays.call(replay.call_key(BOUND, x, y), (x, y), make)

    tensors = [torch.randn(4, 6) for _ in range(4)]
    call(*tensors[:2])
    call(*tensors[2:])
    call(*tensors[2:])
    first, second, third = launched
    assert second == third and encoded == [tensors[0].data_ptr(), tensors[2].data_ptr()]

    def known(x):
        number = {t.data_ptr(): i % 2 for i, t in enumerate(tensors)}
        if isinstance(x, torch.Tensor):
            return number[x.data_ptr()]
        return tuple(map(known, x)) if isinstance(x, tuple) else number.get(x, x)

    hooks = slice(11, 13)  # there are none: Triton calls empty ones
    assert [known(x) for x in second[:11] + second[13:]] == [known(x) for x in first[:11] + first[13:]]
    assert second[hooks] == (None, None) and second[3] == 73


def test_only_an_empty_vector_is_the_same_in_all_calls(kernel):
    replays = replay.Replays()

    def call():
        x = torch.randn(4, 6)

        def make():
            out, nothing, no_rows = x.new_empty(x.shape), x.new_empty(0), x.new_empty((0, 6))
            launch.Launcher().start(kernel, "key", 1, (x, out), {})
            return out, nothing, no_rows

        return replays.call(replay.call_key(BOUND, x), (x,), make)

    _, (out, nothing, no_rows), (other_out, other_nothing, other_no_rows) = call(), call(), call()
    assert nothing is other_nothing and nothing.shape == (0,)
    assert out is not other_out and no_rows is not other_no_rows
