"""Streams, CUDA graphs, torch.compile, devices: what a call may assume about where and when it runs, which is nothing."""

import contextlib

import pytest
import torch
from calls import as_function, assert_equal, loss_of
from lane import CAUSAL, able, call_of, needs_cuda, on_gpu, refill, same

from tilewise import Blocks, Causal, Chunk, attention
from tilewise.testing import Case, Inputs, assert_matches_reference

pytestmark = needs_cuda

#: Together they use every kernel and every kind of lowering.
CASES = [
    Case("causal", Sq=1000, H=4, D=64, mask=CAUSAL),
    Case("local", Sq=500, Sk=700, H=6, Hkv=2, D=64, mask=(("window", 100, 20),), softcap=5.0, sinks=True, alibi="H"),
    Case("documents", Sq=300, H=4, Hkv=2, D=40, mask=(("document", "BS"), ("causal",)), bias="1HQK", alibi="BH"),
    Case("blocks", Sq=400, H=4, D=64, mask=(("blocks", 32, 64, "HQK", 0.5), ("causal",)), bias="B11K"),
    Case("dense", Sq=300, Sk=350, H=4, Hkv=1, D=64, mask=(("dense", "BHQK", 0.3),)),
    Case("packed", lengths_q=(300, 0, 77, 500), lengths_k=(300, 20, 100, 400), H=4, Hkv=2, D=64, spare=3, sinks=True,
         mask=(("causal",), ("chunk", 128))),
]  # fmt: skip
DROPOUT = Case("dropout", Sq=300, H=4, Hkv=2, D=64, dropout=0.3, mask=CAUSAL)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def _products(count: int) -> None:
    """Work for the current stream: about 0.2 ms each."""
    a = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(count):
        a @ a


# ---- streams ----


@each_case
def test_B80_50_runs_are_equal_while_another_stream_is_busy(case, backend):
    function, _ = call_of(on_gpu(case, backend), backend)
    expected, other = function(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for run in range(50):
        with torch.cuda.stream(other):
            _products(1 + run % 7)
        assert same(function(), expected), f"run {run}"


def test_B80_dropout_runs_are_equal_for_one_seed(backend):
    function, _ = call_of(on_gpu(DROPOUT, backend), backend)
    other, found = torch.cuda.Stream(), []
    for run in range(50):
        with torch.cuda.stream(other):
            _products(1 + run % 7)
        torch.manual_seed(3)
        found.append(function())
    assert all(same(one, found[0]) for one in found)
    assert not same(function(), found[0])  # the generator has moved on


@each_case
def test_kernels_run_on_the_current_stream(case, backend):
    """Inputs become right on a stream, late: a kernel on any other stream would read what was there before."""
    function, leaves = call_of(on_gpu(case, backend), backend)
    expected = function()
    right = {name: t.detach().clone() for name, t in leaves.items()}
    with torch.no_grad():
        for t in leaves.values():
            t.fill_(torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _products(200)
        with torch.no_grad():
            for name, t in leaves.items():
                t.copy_(right[name])
        found = function()
    stream.synchronize()
    assert same(found, expected)


# ---- CUDA graphs ----


def _captured(function, graph=None, warm=True):
    """(graph, what replaying it writes)."""
    graph = graph or torch.cuda.CUDAGraph()
    if warm:  # kernels are compiled outside: loading them is no work for a stream
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = function()
    return graph, found


@each_case
def test_graphs_replay_with_other_values(case, backend):
    function, leaves = call_of(on_gpu(case, backend), backend)
    graph, found = _captured(function)
    for seed in range(3):
        refill(leaves, seed)
        graph.replay()
        assert same(found, function()), f"seed {seed}"


@each_case
def test_sums_in_any_order_follow_streams_and_graphs(case, backend):
    """dq of the Hopper kernels, whose last bits differ from run to run: on another stream, and replayed with other values."""
    function, leaves = call_of(on_gpu(case, backend), backend, deterministic=False)
    graph, found = _captured(function)
    refill(leaves, 1)
    expected, stream = function(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
        again = function()
    stream.synchronize()
    for results in (found, again):
        torch.testing.assert_close(results, expected)


def test_graphs_of_dropout_draw_a_mask_per_replay(backend):
    function, _ = call_of(on_gpu(DROPOUT, backend), backend)
    graph, found = _captured(function)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append([t.clone() for t in found])
    assert not same(*seen)
    torch.manual_seed(7)
    graph.replay()
    torch.manual_seed(7)
    assert same(found, function())  # forward and backward with the mask of that seed


def test_graphs_take_a_generator_of_their_own(backend):
    inputs = on_gpu(DROPOUT, backend)
    generator, graph = torch.Generator("cuda").manual_seed(5), torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    inputs.options["generator"] = generator
    function, _ = call_of(inputs, backend)
    graph, found = _captured(function, graph)
    for seed in (5, 6):
        generator.manual_seed(seed)
        graph.replay()
        first = [t.clone() for t in found]
        graph.replay()
        assert not same(first, found)
        generator.manual_seed(seed)
        assert same(function(), first)


@pytest.mark.parametrize("name", ["blocks", "two_chunks"])
def test_what_a_capture_prepares_is_not_kept_for_other_calls(name, backend):
    """Nothing computed while capturing, when kernels do not run, may be remembered for eager calls."""

    def call(S: int) -> Inputs:
        mask = {"blocks": Blocks.butterfly(S, S, 64, 64), "two_chunks": Chunk(96) & Chunk(64)}[name] & Causal()
        return Inputs(*torch.randn(3, 1, S, 2, 64).bfloat16(), {"mask": mask}).on("cuda")

    inputs = able(call(362), backend)
    call_of(call(330), backend)[0]()  # the same kernels, other sizes
    function, _ = call_of(inputs, backend)
    _captured(function, warm=False)
    assert_matches_reference(inputs, backend=backend)


# ---- torch.compile ----

COMPILED = [
    Case("plain", Sq=100, Sk=120, H=4, Hkv=2, D=64, mask=CAUSAL),
    Case("mix", Sq=70, Sk=90, H=4, Hkv=2, D=32, softcap=3.0, alibi="BH", bias="1HQK", sinks=True,
         mask=(("document", "BS"), ("window", 50, 40))),
    Case("packed", lengths_q=(40, 0, 70), lengths_k=(50, 3, 70), H=4, Hkv=2, D=32, spare=1, sinks=True, mask=CAUSAL),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("case", COMPILED, ids=[case.name for case in COMPILED])
def test_B92_compiled_without_graph_breaks(case, mode, backend):
    torch._dynamo.reset()
    inputs = on_gpu(case, backend, torch.float32)
    inputs.options["backend"] = backend
    if inputs.varlen:
        inputs.options.update(max_seqlen_q=70, max_seqlen_k=70)
    function, leaves = as_function(inputs)
    compiled = torch.compile(function, fullgraph=True, mode=None if mode == "default" else mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found, expected = compiled(*leaves), function(*leaves)
        grads = torch.autograd.grad(loss_of(found), leaves)
        assert_equal(grads, torch.autograd.grad(loss_of(expected), leaves))


def test_B92_dynamic_shapes_compile_once(backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def function(q, k, v):
        return attention(q * 2, k, v, causal=True, window_size=(50, 0), backend=backend).relu().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for Sq, Sk in ((50, 90), (70, 71), (33, 140), (164, 65)):
        i = on_gpu(Case(Sq=Sq, Sk=Sk, H=4, Hkv=2, D=64), backend, torch.float32)
        leaves = [t.requires_grad_() for t in (i.q, i.k, i.v)]
        found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, function))
        assert_equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "alibi_slopes": torch.ones(2)}], ids=["plain", "alibi"]
)
def test_B92_compiled_calls_choose_their_backend(options):
    """What dispatch asks of every backend can be compiled: 16 bits, the Hopper kernels included, and no `backend` given."""
    torch._dynamo.reset()
    options = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 200, 2, 64, device="cuda", dtype=torch.bfloat16))

    def function(q, k, v):
        return attention(q, k, v, **options)

    found, expected = torch.compile(function, fullgraph=True)(q, k, v), function(q, k, v)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(o.float().sin().sum(), (q, k, v)) for o in (found, expected)]
    torch.testing.assert_close(*grads)


def test_compiled_dropout_draws_a_mask_per_call(backend):
    torch._dynamo.reset()
    i = on_gpu(Case(Sq=64, D=64, dropout=0.5), backend)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, dropout_p=0.5, backend=backend), fullgraph=True)
    assert not torch.equal(*(compiled(i.q, i.k, i.v) for _ in range(2)))


# ---- devices ----


def test_B90_kernels_start_on_the_tensors_device(monkeypatch, backend):
    """Seen on one GPU: where the current device is another one, both passes enter a guard for the tensors' device."""
    inputs, entered = on_gpu(CASES[0], backend), []
    function, _ = call_of(inputs, backend)
    expected = function()

    @contextlib.contextmanager
    def guard(device):
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device", guard)
    assert same(function(), expected)
    assert entered == [inputs.q.device] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", [*CASES, DROPOUT], ids=lambda case: case.name)
def test_B90_tensors_on_another_than_the_current_device(case, backend):
    inputs = on_gpu(case, backend)
    function, _ = call_of(inputs, backend)
    there, _ = call_of(inputs.on("cpu").on("cuda:1"), backend)
    torch.manual_seed(0)
    expected = [t.cpu() for t in function()]
    torch.manual_seed(0)
    assert same([t.cpu() for t in there()], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_B90_tensors_of_two_devices_are_refused(backend):
    i = on_gpu(Case(), backend)
    with pytest.raises(ValueError, match="one device"):
        attention(i.q, i.k.to("cuda:1"), i.v, backend=backend)
