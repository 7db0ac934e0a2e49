"""The ops under everything that watches or transforms them: compile, export, checkpoint, autocast, torch.func, modes."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tilewise import attention, attention_varlen, ops
from tilewise.call import dense_call, packed_call
from tilewise.testing import Case, make_inputs, run

MIX = Case("mix", Sq=9, Sk=12, H=4, Hkv=2, D=8, Dv=6, softcap=3.0, alibi="BH", bias="1HQK", sinks=True,
           mask=(("document", "BS"), ("window", 6, 4), ("dense", "B11K", 0.8)))  # fmt: skip
PLAIN = Case("plain", Sq=9, Sk=12, H=4, Hkv=2, D=8, mask=(("causal",),))
PACKED = Case("packed", lengths_q=(4, 0, 7), lengths_k=(5, 3, 7), H=4, Hkv=2, D=8, spare=1, sinks=True, alibi="H",
              mask=(("causal",),))  # fmt: skip
ALL = [pytest.param(c, id=c.name) for c in (MIX, PLAIN, PACKED)]


def _call(inputs):
    """The call as a function of its tensors, and those tensors as leaves."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.tensors().items()}
    call = attention_varlen if inputs.varlen else attention

    def function(*tensors):
        named = dict(zip(leaves, tensors, strict=True))
        q, k, v = (named.pop(name) for name in ("q", "k", "v"))
        return call(q, k, v, **inputs.options | named, return_lse=True)

    return function, tuple(leaves.values())


def _loss(outputs):
    o, lse = outputs
    return o.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()


def _equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# ---- compile and export ----


@pytest.mark.parametrize("case", ALL)
def test_compile_without_graph_breaks(case):
    torch._dynamo.reset()
    inputs = make_inputs(case)
    if inputs.varlen:  # their values cannot be read while tracing
        inputs.options.update(max_seqlen_q=7, max_seqlen_k=7)
    function, leaves = _call(inputs)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves), function(*leaves)
    _equal(found, expected)
    _equal(torch.autograd.grad(_loss(found), leaves), torch.autograd.grad(_loss(expected), leaves))


def test_compile_asks_for_the_longest_length():
    torch._dynamo.reset()
    function, leaves = _call(make_inputs(PACKED))
    with pytest.raises(Exception, match="max_seqlen is required"):
        torch.compile(function, fullgraph=True, backend="eager")(*leaves)


def test_compiled_dropout_draws_a_mask_per_call():
    torch._dynamo.reset()
    inputs = make_inputs(PLAIN)

    def function(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = [compiled(inputs.q, inputs.k, inputs.v) for _ in range(2)]
    assert not torch.equal(*found)


def test_compile_with_inductor():
    torch._dynamo.reset()
    inputs = make_inputs(PLAIN)
    leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]

    def function(q, k, v):
        return attention(q * 2, k, v, causal=True).relu().sum()

    found, expected = torch.compile(function, fullgraph=True)(*leaves), function(*leaves)
    torch.testing.assert_close(found, expected)
    _equal(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


def test_compile_dynamic_lengths_without_recompiling():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def function(q, k, v):
        return attention(q, k, v, causal=True, window_size=(5, 0))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for Sq, Sk in ((5, 9), (7, 7), (33, 40), (64, 65), (100, 31), (12, 200)):
        i = make_inputs(Case(Sq=Sq, Sk=Sk, H=4, Hkv=2))
        torch.testing.assert_close(compiled(i.q, i.k, i.v), function(i.q, i.k, i.v))
    assert len(graphs) <= 2  # one for all lengths, and one in which Sq and Sk are the same symbol


def test_compile_dynamic_backward():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), dynamic=True, backend="aot_eager")
    for S in (5, 17, 40):
        i = make_inputs(Case(Sq=S))
        leaves = [t.requires_grad_() for t in (i.q, i.k, i.v)]
        found = torch.autograd.grad(compiled(*leaves).sin().sum(), leaves)
        _equal(found, torch.autograd.grad(attention(*leaves, causal=True).sin().sum(), leaves))


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, return_lse=True)

    i = make_inputs(PLAIN)
    exported = torch.export.export(Model(), (i.q, i.k, i.v))
    _equal(exported.module()(i.q, i.k, i.v), Model()(i.q, i.k, i.v))
    assert any("tilewise" in str(node.target) for node in exported.graph.nodes)


def test_export_dynamic_length():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    i = make_inputs(Case(Sq=8))
    length = torch.export.Dim("length", min=2, max=4096)
    dims = {name: {1: length} for name in ("q", "k", "v")}
    exported = torch.export.export(Model(), (i.q, i.k, i.v), dynamic_shapes=dims).module()
    j = make_inputs(Case(Sq=31))
    torch.testing.assert_close(exported(j.q, j.k, j.v), Model()(j.q, j.k, j.v))


# ---- registration ----


def _op_arguments(inputs):
    options = {"mask": None, "causal": False, "window_size": None, "bias": None, "alibi_slopes": None, "softcap": None,
               "sinks": None, "dropout_p": 0.0, "softmax_scale": None, "deterministic": False, "generator": None}  # fmt: skip
    options |= inputs.options
    if inputs.varlen:
        lengths = {"max_seqlen_q": None, "max_seqlen_k": None, "seqused_q": None, "seqused_k": None}
        call = packed_call(inputs.q, inputs.k, inputs.v, **lengths | options)
    else:
        call = dense_call(inputs.q, inputs.k, inputs.v, layout="bshd", **options)
    return call.q, call.k, call.v, call.aux, call.spec.key, call.scale, "cpu", call.max_q, call.max_k


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", ALL)
def test_opcheck_forward(case, grad):
    q, k, v, *rest = _op_arguments(make_inputs(case))
    q, k, v = (t.detach().requires_grad_(grad) for t in (q, k, v))
    torch.library.opcheck(torch.ops.tilewise.attention_fwd.default, (q, k, v, *rest))


@pytest.mark.parametrize("case", ALL)
def test_opcheck_backward(case):
    inputs = make_inputs(case)
    q, k, v, *rest = _op_arguments(inputs)
    o, lse, _ = torch.ops.tilewise.attention_fwd.default(q, k, v, *rest)
    do, dlse = inputs.upstream()
    needs = [True] * 3 + [name in inputs.tensors() for name in ("bias", "alibi_slopes", "sinks")]
    torch.library.opcheck(torch.ops.tilewise.attention_bwd.default, (do, dlse, q, k, v, o, lse, *rest, needs))


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "sliced", "expanded", "reversed"])
@pytest.mark.parametrize("case", ALL)
def test_fake_tensors_have_the_real_shapes_strides_and_dtypes(case, strides):
    from dataclasses import replace

    from torch._subclasses.fake_tensor import FakeTensorMode

    def facts(results):
        return {name: (t.shape, t.stride(), t.dtype) for name, t in results.items()}

    inputs = make_inputs(replace(case, strides=strides), torch.bfloat16)
    function, leaves = _call(inputs)
    names = ("o", "lse", *inputs.tensors())

    def all_results(function, leaves):
        outputs = function(*leaves)
        return facts(dict(zip(names, (*outputs, *torch.autograd.grad(_loss(outputs), leaves)), strict=True)))

    real = all_results(function, leaves)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = all_results(function, [mode.from_tensor(t) for t in leaves])
    assert fake == real


def test_meta_device_runs_no_kernel(monkeypatch):
    from tilewise import dispatch

    monkeypatch.setattr(dispatch, "load", lambda name: pytest.fail("a kernel was loaded"))
    q, k = torch.empty(2, 9, 4, 8, device="meta"), torch.empty(2, 12, 2, 8, device="meta", requires_grad=True)
    with torch.device("meta"):
        o, lse, peak = attention(q, k, k, causal=True, return_lse=True, return_max_logit=True)
    assert {t.device.type for t in (o, lse, peak)} == {"meta"}
    assert (o.shape, lse.shape, peak.shape) == ((2, 9, 4, 8), (2, 4, 9), (4,))
    (grad,) = torch.autograd.grad(o.sum(), k)
    assert grad.shape == k.shape


# ---- what is saved, what requires grad ----


def _saved(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = function()
    return saved, outputs


def test_saved_tensors_are_q_k_v_o_and_lse():
    i = make_inputs(PLAIN)
    q, k, v = (t.requires_grad_() for t in (i.q, i.k, i.v))
    saved, (o, lse) = _saved(lambda: attention(q, k, v, causal=True, return_lse=True))
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (q, k, v, o, lse)}
    assert len(saved) == 5


def test_without_grad_nothing_is_saved():
    i = make_inputs(PLAIN)
    saved, o = _saved(lambda: attention(i.q, i.k, i.v))
    assert not saved
    assert not o.requires_grad


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=6)))
def test_any_subset_of_inputs_requires_grad(wanted):
    inputs = make_inputs(MIX)
    names = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    function, leaves = _call(inputs)
    full = dict(zip(names, torch.autograd.grad(_loss(function(*leaves)), leaves), strict=True))
    some = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
    outputs = function(*some)
    assert outputs[0].requires_grad == outputs[1].requires_grad == any(wanted)
    if any(wanted):
        _loss(outputs).backward()
    for name, t, w in zip(names, some, wanted, strict=True):
        assert (t.grad is not None) == w
        if w:
            torch.testing.assert_close(t.grad, full[name])


def test_each_output_alone():
    function, leaves = _call(make_inputs(MIX))
    o, lse = function(*leaves)
    both = torch.autograd.grad(o.sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum(), leaves, retain_graph=True)
    parts = [
        torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True)
        for x in (o.sin().sum(), lse.nan_to_num(0, 0, 0).cos().sum())
    ]
    for whole, a, b in zip(both, *parts, strict=True):
        torch.testing.assert_close(a + b, whole)


def test_max_logit_is_not_differentiable():
    i = make_inputs(PLAIN)
    _, peak = attention(i.q.requires_grad_(), i.k, i.v, return_max_logit=True)
    assert not peak.requires_grad


def test_backward_twice_accumulates():
    function, leaves = _call(make_inputs(PLAIN))
    loss = _loss(function(*leaves))
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in leaves]
    loss.backward()
    _equal([t.grad for t in leaves], [2 * g for g in once])


def test_changing_a_saved_input_in_place_is_noticed():
    i = make_inputs(PLAIN)
    k = i.k.clone()
    o = attention(i.q.requires_grad_(), k, i.v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# ---- second derivatives and forward mode: refused, never silently zero ----


def _scalar(q, k, v):
    return attention(q, k, v, causal=True).sin().sum()


def _leaves():
    i = make_inputs(PLAIN)
    return [t.clone().requires_grad_() for t in (i.q, i.k, i.v)]


def test_double_backward_is_refused():
    leaves = _leaves()
    grads = torch.autograd.grad(_scalar(*leaves), leaves, create_graph=True)
    _equal([g.detach() for g in grads], torch.autograd.grad(_scalar(*leaves), leaves))
    with pytest.raises(NotImplementedError, match="tilewise: double backward is not implemented"):
        sum(g.sum() for g in grads).backward()


def test_hessian_is_refused():
    leaves = _leaves()
    with pytest.raises(NotImplementedError, match="tilewise: double backward is not implemented"):
        torch.func.grad(lambda q: torch.func.grad(_scalar)(q, *leaves[1:]).sum())(leaves[0])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(position, requires_grad):
    leaves = [t.detach().requires_grad_(requires_grad) for t in _leaves()]
    with forward_ad.dual_level():
        leaves[position] = forward_ad.make_dual(leaves[position], torch.ones_like(leaves[position]))
        with pytest.raises(NotImplementedError, match="tilewise: forward-mode derivatives"):
            _scalar(*leaves)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_forward_mode_through_other_inputs_is_refused(name):
    i = make_inputs(MIX)
    with forward_ad.dual_level():
        t = i.options[name]
        options = i.options | {name: forward_ad.make_dual(t, torch.ones_like(t))}
        with pytest.raises(NotImplementedError, match="tilewise: forward-mode derivatives"):
            attention(i.q, i.k, i.v, **options)


def test_jvp_is_refused():
    leaves = tuple(t.detach() for t in _leaves())
    with pytest.raises(NotImplementedError, match="tilewise: forward-mode derivatives"):
        torch.func.jvp(_scalar, leaves, leaves)


def test_jvp_of_the_backward_is_refused():
    """Forward over reverse."""
    leaves = tuple(t.detach() for t in _leaves())
    with pytest.raises(NotImplementedError, match="tilewise"):
        torch.func.jvp(torch.func.grad(_scalar), leaves, leaves)


# ---- torch.func ----


def test_func_grad():
    leaves = _leaves()
    found = torch.func.grad(_scalar, argnums=(0, 1, 2))(*leaves)
    _equal(found, torch.autograd.grad(_scalar(*leaves), leaves))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 0), (2, 0, None)])
def test_vmap(in_dims):
    i = make_inputs(PLAIN)
    many = [
        t if d is None else torch.stack([t, t.flip(1), t + 1], dim=d)
        for t, d in zip((i.q, i.k, i.v), in_dims, strict=True)
    ]
    found = torch.func.vmap(lambda q, k, v: attention(q, k, v, causal=True), in_dims=in_dims)(*many)
    for n in range(3):
        one = [t if d is None else t.select(d, n) for t, d in zip(many, in_dims, strict=True)]
        torch.testing.assert_close(found[n], attention(*one, causal=True))


def test_vmap_over_bias():
    i = make_inputs(PLAIN)
    biases = torch.randn(3, 9, 12)
    found = torch.func.vmap(lambda b: attention(i.q, i.k, i.v, bias=b))(biases)
    _equal(found, [attention(i.q, i.k, i.v, bias=b) for b in biases])


def test_gradients_per_sample():
    i = make_inputs(PLAIN)

    def loss(q, k, v):
        return attention(q[None], k[None], v[None], causal=True).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(i.q, i.k, i.v)
    leaves = [t.clone().requires_grad_() for t in (i.q, i.k, i.v)]
    _equal(found, torch.autograd.grad(_scalar(*leaves), leaves))


def test_vmap_with_dropout_is_refused():
    i = make_inputs(PLAIN)
    with pytest.raises((NotImplementedError, RuntimeError), match="vmap"):
        torch.func.vmap(lambda q: attention(q[None], i.k[:1], i.v[:1], dropout_p=0.5))(i.q)


def test_functional_call():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.proj(x), x, x
            return attention(q, k, v, causal=True)

    model, x = Model(), torch.randn(2, 5, 2, 8)
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(parameters)
    expected = torch.autograd.grad(model(x).sin().sum(), list(parameters.values()))
    _equal(found.values(), expected)


# ---- checkpoint, autocast, modes, threads ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_redraws_the_same_dropout_mask(use_reentrant):
    leaves = _leaves()

    def function(q, k, v):
        return attention(q, k, v, causal=True, dropout_p=0.4).sin().sum()

    torch.manual_seed(3)
    expected = torch.autograd.grad(function(*leaves), leaves)
    torch.manual_seed(3)
    checkpoint(function, *leaves, use_reentrant=use_reentrant).backward()
    for t, g in zip(leaves, expected, strict=True):
        assert torch.equal(t.grad, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_sdpa(dtype):
    q, k, v = _leaves()
    with torch.autocast("cpu", dtype):
        o, lse = attention(q, k.bfloat16(), v, causal=True, return_lse=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, q, q)))
        double = attention(q.double(), k.double(), v.double())
    assert o.dtype == theirs.dtype == dtype
    assert lse.dtype == torch.float32
    assert double.dtype == torch.float64
    o.sum().backward()
    assert q.grad.dtype == v.grad.dtype == torch.float32


def test_outside_autocast_mixed_dtypes_are_refused():
    q, k, v = _leaves()
    with pytest.raises(TypeError, match="share a dtype"):
        attention(q, k, v.bfloat16())


def test_inference_mode():
    i = make_inputs(MIX)
    with torch.inference_mode():
        found = attention(i.q, i.k, i.v, **i.options)
    assert torch.equal(found, attention(i.q, i.k, i.v, **i.options))


def test_dispatch_modes_see_the_ops():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **kwargs or {})

    leaves = _leaves()
    with Log() as log:
        _scalar(*leaves).backward()
    assert "tilewise::attention_fwd" in log.names
    assert "tilewise::attention_bwd" in log.names


def test_tensor_subclasses_reach_their_own_dispatch():
    from torch.testing._internal.two_tensor import TwoTensor

    i = make_inputs(PLAIN)
    o = attention(TwoTensor(i.q, i.q * 2), TwoTensor(i.k, i.k), TwoTensor(i.v, i.v))
    assert torch.equal(o.a, attention(i.q, i.k, i.v))
    assert torch.equal(o.b, attention(i.q * 2, i.k, i.v))


def test_parameters_are_plain_tensors():
    i = make_inputs(MIX)
    options = i.options | {name: torch.nn.Parameter(i.options[name]) for name in ("bias", "alibi_slopes", "sinks")}
    found = attention(i.q, i.k, i.v, **options)
    assert torch.equal(found.detach(), attention(i.q, i.k, i.v, **i.options))
    found.sum().backward()
    assert all(options[name].grad is not None for name in ("bias", "alibi_slopes", "sinks"))


def test_calls_from_many_threads_are_equal():
    from concurrent.futures import ThreadPoolExecutor

    inputs = make_inputs(MIX)
    expected = run(inputs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(inputs), range(8)):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_refusals_name_the_way_out():
    for text in (ops.DOUBLE_BACKWARD, ops.JVP):
        assert "tilewise.reference.attention" in text
