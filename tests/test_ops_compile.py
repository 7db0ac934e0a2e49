"""The ops under torch.compile and torch.export, and their registration: opcheck, fake and meta tensors."""

import dataclasses
import inspect

import pytest
import torch
from calls import MIX, PACKED, PLAIN, as_function, assert_equal, leaves_of, loss_of
from torch.fx.experimental.proxy_tensor import make_fx

from tilewise import attention, dispatch
from tilewise.call import dense_call, packed_call
from tilewise.spec import AttentionSpec
from tilewise.testing import Case, make_inputs

ALL = [pytest.param(c, id=c.name) for c in (MIX, PLAIN, PACKED)]


# ---- compile and export ----


@pytest.mark.parametrize("case", ALL)
def test_compile_without_graph_breaks(case):
    torch._dynamo.reset()
    inputs = make_inputs(case)
    if inputs.varlen:  # their values cannot be read while tracing
        inputs.options.update(max_seqlen_q=7, max_seqlen_k=7)
    function, leaves = as_function(inputs)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves), function(*leaves)
    assert_equal(found, expected)
    assert_equal(torch.autograd.grad(loss_of(found), leaves), torch.autograd.grad(loss_of(expected), leaves))


def test_what_a_backend_requires_is_asked_while_tracing(tmp_path):
    """Questions about the machine are nothing that torch.compile can trace (PyTorch 2.11: not even importlib's find_spec)."""
    torch._dynamo.reset()
    answers = tmp_path / "answers"

    def requires():
        answers.write_text("asked")

    compiled = torch.compile(lambda x, ask: x if ask() is None else -x, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(1), requires)
    assert not answers.exists()
    assert compiled(torch.ones(1), dispatch.while_tracing(requires)) == 1
    assert answers.exists()
    assert all(inspect.isfunction(row.requires) for row in dispatch.BACKENDS)  # PyTorch 2.11 binds others to the row
    assert all(row.requires._dynamo_marked_constant for row in dispatch.BACKENDS)


def test_compile_asks_for_the_longest_length():
    torch._dynamo.reset()
    function, leaves = as_function(make_inputs(PACKED))
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
    assert_equal(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


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
        assert_equal(found, torch.autograd.grad(attention(*leaves, causal=True).sin().sum(), leaves))


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, return_lse=True)

    i = make_inputs(PLAIN)
    exported = torch.export.export(Model(), (i.q, i.k, i.v))
    assert_equal(exported.module()(i.q, i.k, i.v), Model()(i.q, i.k, i.v))
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


@pytest.mark.parametrize("grad", [False, True])
def test_traces_with_symbolic_sizes(grad):
    def function(q, k, v):
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        return torch.autograd.grad(o.sum() + lse.sum(), (q, k, v)) if grad else (o, lse)

    traced = make_fx(function, tracing_mode="symbolic")(*leaves_of(Case(Sq=8)))
    other = leaves_of(Case(Sq=31, Sk=40))
    assert_equal(traced(*other), function(*other))


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


def test_max_logit_is_empty_unless_asked_for():
    q, k, v, aux, key, *rest = _op_arguments(make_inputs(PLAIN))
    asking = dataclasses.replace(AttentionSpec.parse(key), max_logit=True).key
    for spec, heads in ((key, 0), (asking, 4)):
        arguments = (q, k, v, aux, spec, *rest)
        torch.library.opcheck(torch.ops.tilewise.attention_fwd.default, arguments)
        assert torch.ops.tilewise.attention_fwd.default(*arguments)[2].shape == (heads,)


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
    function, leaves = as_function(inputs)
    names = ("o", "lse", *inputs.tensors())

    def all_results(function, leaves):
        outputs = function(*leaves)
        return facts(dict(zip(names, (*outputs, *torch.autograd.grad(loss_of(outputs), leaves)), strict=True)))

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
