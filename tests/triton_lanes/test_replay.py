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


def key_of(*tensors, bound=BOUND, max_q=0):
    return replay.call_key(bound, max_q, 0, *tensors)


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
    kernel.constexprs = ()  # as Triton 3.6 has it
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

    return replays.call(key_of(x, y), (x, y), make)


def _three_calls(kernel, **options):
    """(what the third call of a kind gave, what it was given): the second is recorded, the third a replay."""
    replays = replay.Replays()
    for _ in range(3):
        given = [torch.randn(4, 6) for _ in range(2)]
        found = _call(replays, kernel, *given, **options)
    return replays, found, given


def test_a_replay_gives_kernels_the_new_tensors(kernel):
    _, (out, nothing), (x, y) = _three_calls(kernel)
    assert nothing is None
    assert out.shape == x.shape and out.data_ptr() not in (x.data_ptr(), y.data_ptr())
    assert kernel.seen[2] == ((x.data_ptr(), 7), (y.data_ptr(), 9), out.data_ptr(), None, 5)


def test_what_comes_but_once_is_not_recorded(kernel):
    """Recording takes longer than a call: a cache of keys that grows must not pay for it at every step."""
    replays = replay.Replays()
    for length in range(1, 9):
        _call(replays, kernel, torch.randn(length, 4), torch.randn(length, 4))
    assert not replays._known


def test_a_replay_keeps_no_tensor_of_the_call_it_repeats(kernel):
    replays, _, _ = _three_calls(kernel)
    (kept,) = replays._known.values()
    held = [kept._made, kept._starts, kept._outputs]
    assert not any(isinstance(thing, torch.Tensor) for thing in _leaves(held))


def _leaves(thing):
    return [leaf for part in thing for leaf in _leaves(part)] if isinstance(thing, (list, tuple)) else [thing]


@pytest.mark.parametrize("options", [{"fill": 2.5}, {"extra": lambda out: out.fill_(2.5)}], ids=["made", "afterwards"])
def test_what_was_filled_is_filled_again(kernel, options):
    replays, (out, _), _ = _three_calls(kernel, **options)
    assert (out == 2.5).all() and None not in replays._known.values()


def test_what_was_filled_behind_a_kernel_is_not_filled_before_it(kernel):
    replays, x = replay.Replays(), torch.randn(4)

    def make():
        out = x.new_empty(4)
        launch.Launcher().start(kernel, "key", 1, (out,), {})
        return [out.zero_()]

    for _ in range(2):
        replays.call(key_of(x), (x,), make)
    assert list(replays._known.values()) == [None]


def test_layouts_are_told_apart(kernel):
    x = torch.randn(4, 6)
    keys = {key_of(x, y) for y in (x.clone(), x.bfloat16(), torch.randn(6, 4).T, torch.randn(4, 8), x)}
    assert len(keys) == 4  # dtypes are equal within a call
    assert key_of(torch.randn(25)[1:].view(4, 6), x) is None  # not aligned to 16 bytes


def test_tensors_of_the_spec_are_replaced_and_told_apart(kernel):
    """Sinks, cu_seqlens and so on, several in one struct, where they stand alone and where one stands in two places."""
    spec, replays, x = AttentionSpec(tensors=("cu_seqlens_q", "cu_seqlens_k")), replay.Replays(), torch.randn(4)

    def call(cu_q, cu_k, max_q=3):
        bound = bind(spec.key, [cu_q, cu_k], 0.5)

        def make():
            launch.Launcher().start(kernel, "key", 1, ((max_q, cu_q, cu_k), bound.tensors[1].expand(2, 2), x), {})
            return [x]

        replays.call(key_of(x, *bound.tensors, bound=bound, max_q=max_q), (x, *bound.tensors), make)

    for _ in range(3):
        a, b = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        call(a, b)
    assert kernel.seen[-1] == ((3, a.data_ptr(), b.data_ptr()), b.data_ptr(), x.data_ptr())
    call(a, a)
    call(a, b.long())
    call(a, b, 4)
    assert all(isinstance(args[2], torch.Tensor) for args in kernel.seen[-3:])  # none was a replay
    call(b, b)
    call(a, a)
    assert kernel.seen[-1] == ((3, a.data_ptr(), a.data_ptr()), a.data_ptr(), x.data_ptr())


def test_tensors_for_kernels_only_are_made_together(kernel):
    replays = replay.Replays()
    x = torch.randn(4)

    def make():
        some = [x.new_empty(65), x.new_empty(3, dtype=torch.int32), x.new_empty(0), x.new_empty((0, 2)), x.new_empty(7)]
        launch.Launcher().start(kernel, "key", 1, (x, *some), {})
        return [some[4]]

    for _ in range(3):
        (out,) = replays.call(key_of(x), (x,), make)
    at = kernel.seen[-1]
    assert at[0] == x.data_ptr() and at[5] == out.data_ptr()
    assert at[2] - at[1] == 512 and at[4] - at[2] == 256  # 65 numbers of 4 bytes, and 3


def test_a_call_that_does_more_than_allocate_is_made_anew(kernel):
    replays, (out, _), _ = _three_calls(kernel, extra=lambda out: out.zero_().add_(1))
    assert (out == 1).all()
    assert list(replays._known.values()) == [None]
    assert all(isinstance(args[2], torch.Tensor) for args in kernel.seen)


def test_a_tensor_of_unknown_origin_is_never_replayed(kernel):
    replays, stranger = replay.Replays(), torch.randn(4)
    x = torch.randn(4)

    def make():
        launch.Launcher().start(kernel, "key", 1, (stranger,), {})
        return [x]

    for _ in range(2):
        replays.call(key_of(x), (x,), make)
    assert list(replays._known.values()) == [None]


def test_a_view_is_not_returned_as_what_it_views(kernel):
    replays, x = replay.Replays(), torch.randn(4)
    for _ in range(3):
        (out,) = replays.call(key_of(x), (x,), lambda: [x.expand(3, 4)])
        assert out.shape == (3, 4)


def test_a_tensor_in_a_struct_within_a_struct_is_never_replayed(kernel):
    """It would be taken for a constant, and the next call would read the tensor of this one."""
    replays, x = replay.Replays(), torch.randn(4)

    def make():
        launch.Launcher().start(kernel, "key", 1, (x, (3, Pair(x, 7))), {})
        return [x]

    for _ in range(2):
        replays.call(key_of(x), (x,), make)
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

        replays.call(key_of(x, y), (x, y), make)

    tensors = [torch.randn(4, 6) for _ in range(4)]
    with launch.started():
        call(*tensors[:2])
    launched.clear()
    call(*tensors[:2])
    call(*tensors[2:])
    call(*tensors[2:])
    first, second, third = launched
    assert second == third and encoded[1:] == [tensors[0].data_ptr(), tensors[2].data_ptr()]

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

        return replays.call(key_of(x), (x,), make)

    _, _, (out, nothing, no_rows), (other_out, other_nothing, other_no_rows) = (call() for _ in range(4))
    assert nothing is other_nothing and nothing.shape == (0,)
    assert out is not other_out and no_rows is not other_no_rows


def test_a_new_length_needs_nothing_of_triton_where_the_same_code_serves_it(kernel, monkeypatch):
    """As at each step of decoding: the keys of such calls are new, Triton's analysis of their arguments is not needed."""
    launcher, x, started = launch.Launcher(), torch.randn(4), []
    monkeypatch.setattr(launch, "run", lambda compiled, grid, args: started.append(args))
    for length in range(100, 200):
        launcher.start(kernel, ("key", length), 1, (Pair(x, 16 * length), length, 0.5, None), {})
    assert len(kernel.seen) == 2  # lengths that 16 divides are told from others
    assert [args[1] for args in started] == [length for length in range(100, 200) if length not in (100, 112)]


def test_kernels_that_do_not_tell_their_constants_are_known_by_their_key_alone(kernel, monkeypatch):
    """Which integers are constants is then unknown, and 64 and 128 look alike."""
    monkeypatch.delattr(kernel, "constexprs")
    launcher, started = launch.Launcher(), []
    monkeypatch.setattr(launch, "run", lambda compiled, grid, args: started.append(args))
    for D in (64, 128, 64):
        launcher.start(kernel, ("key", D), 1, (torch.randn(4), D), {})
    assert len(kernel.seen) == 2 and [args[1] for args in started] == [64]


VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    16,
    17,
    2**31 - 1,
    2**31,
    2**31 + 16,
    -1,
    0.5,
    1.0,
    (1, 16),
    (1, 17),
    (None, 16),
    Pair(1, 16),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_equal_keys_mean_equal_code(value):
    """What Triton itself tells apart in arguments, the key tells apart, too."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    def specialised(x):
        return native_specialize_impl(BaseBackend, x, False, True, True)

    tensors = [torch.zeros(9), torch.zeros(9)[1:], torch.zeros(9, dtype=torch.int32)]
    for one, other in [(value, x) for x in [*VALUES, *tensors]] + [(x, y) for x in tensors for y in tensors]:
        if launch.arguments_key((one,), (), {}) == launch.arguments_key((other,), (), {}):
            assert specialised(one) == specialised(other)
