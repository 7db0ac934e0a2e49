"""Every backend, every case, every dtype: outputs and all gradients against the float64 reference."""

import dataclasses

import pytest
import torch
from cases import CASES

from tilewise import attention, attention_varlen, dense, dispatch, testing
from tilewise.testing import Case, assert_matches_reference, make_inputs, run, why_not

BACKENDS = dispatch.names()
ON_GPU = {row.name for row in dispatch.BACKENDS if row.device == "cuda" and torch.cuda.is_available()}
DEVICES = {name: "cuda" if name in ON_GPU else "cpu" for name in BACKENDS}
MATRIX = [pytest.param(c, d, id=f"{c.name}-{str(d).removeprefix('torch.')}") for c in CASES for d in c.dtypes]


def _skip_unless_able(backend: str, inputs) -> None:
    if reasons := why_not(inputs, backend):
        pytest.skip(f"{backend}: " + "; ".join(reasons))


def _named(cases):
    return [pytest.param(c, id=c.name) for c in cases]


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(("case", "dtype"), MATRIX)
def test_some_backend_takes_every_case(case: Case, dtype: torch.dtype):
    inputs = make_inputs(case, dtype)
    reasons = {name: why_not(inputs, name) for name in BACKENDS}
    assert not all(reasons.values()), reasons


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "dtype"), MATRIX)
def test_matches_reference(case: Case, dtype: torch.dtype, backend: str):
    inputs = make_inputs(case, dtype).on(DEVICES[backend])
    _skip_unless_able(backend, inputs)
    assert_matches_reference(inputs, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", _named(CASES))
def test_runs_are_bitwise_equal(case: Case, backend: str):
    inputs = make_inputs(case, case.dtypes[0]).on(DEVICES[backend])
    inputs = dataclasses.replace(inputs, options=inputs.options | {"deterministic": True})
    _skip_unless_able(backend, inputs)
    first = run(inputs, backend)
    for name, t in run(inputs, backend).items():
        torch.testing.assert_close(
            t, first[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", _named(CASES))
def test_no_grad_is_bitwise_grad_mode(case: Case, backend: str):
    inputs = make_inputs(case, case.dtypes[0]).on(DEVICES[backend])
    _skip_unless_able(backend, inputs)
    expected = run(inputs, backend)
    call = attention_varlen if inputs.varlen else attention
    with torch.no_grad():
        outputs = call(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, return_max_logit=True, backend=backend,
            generator=torch.Generator().manual_seed(inputs.seed),
        )  # fmt: skip
    for name, t in zip(("o", "lse", "max_logit"), outputs, strict=True):
        assert not t.requires_grad
        torch.testing.assert_close(t, expected[name].detach(), rtol=0, atol=0, equal_nan=True)


def test_long_rows_are_compared_in_blocks(monkeypatch):
    """Dense results by blocks of rows are those of the whole."""
    inputs = testing.make_inputs(testing.Case("long", B=2, Sq=70, Sk=90, H=4, Hkv=2, mask=(("window", 30, 5),)))
    inputs = inputs.to(torch.float64)
    whole = dense.dense(inputs)
    options = {"window_size": (30, 5)}
    monkeypatch.setattr(dense, "LARGEST_DENSE", 20 * 90)
    blocks = dense.dense(dataclasses.replace(inputs, options=options))
    assert blocks.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(blocks[name], whole[name], rtol=1e-12, atol=1e-12, msg=name)
