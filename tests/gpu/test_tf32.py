"""float32 products: accurate unless PyTorch's own setting allows TF32, by any of its names, and as that says at every call."""

import pytest
import torch
from lane import needs_cuda, on_gpu

from tilewise.testing import Case, assert_matches_reference, run

pytestmark = needs_cuda
CASE = Case("tf32", B=1, Sq=200, Sk=250, H=2, D=64, bias="1HQK", mask=(("causal",),))
MATMUL = torch.backends.cuda.matmul


def _legacy(on: bool) -> None:
    MATMUL.allow_tf32 = on


def _precision(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")


def _named(on: bool) -> None:
    MATMUL.fp32_precision = "tf32" if on else "ieee"


SETTINGS = [_legacy, _precision, *([_named] if hasattr(MATMUL, "fp32_precision") else [])]


@pytest.fixture(autouse=True)
def _accurate_again():
    yield
    if hasattr(MATMUL, "fp32_precision"):
        MATMUL.fp32_precision = "ieee"
    _precision(False)


def _errors(found, exact):
    return {name: float((found[name].double() - exact[name].double()).abs().max()) for name in exact}


@pytest.mark.parametrize(
    "allow", SETTINGS, ids=["allow_tf32", "set_float32_matmul_precision", "fp32_precision"][: len(SETTINGS)]
)
def test_tf32_is_used_where_pytorch_may_use_it_and_nowhere_else(allow, backend):
    inputs = on_gpu(CASE, backend, torch.float32)
    exact = run(inputs.to(torch.float64).on("cpu"), "cpu")
    exact = {name: t.to("cuda") for name, t in exact.items()}
    found = {}
    for on in (False, True, False):
        allow(on)
        found.setdefault(on, []).append(run(inputs, backend))
    for name, t in found[False][0].items():
        assert torch.equal(t, found[False][1][name]), f"{name} depends on what was allowed before"
    accurate, rounded = (_errors(found[on][0], exact) for on in (False, True))
    for name in ("o", "dq", "dk", "dv", "dbias"):
        size = float(exact[name].abs().max())
        assert accurate[name] < 2e-5 * size, f"{name}: {accurate[name]} of {size}"
        assert 10 * accurate[name] < rounded[name] < 1e-2 * size, f"{name}: {rounded[name]} of {size}, TF32 allowed"


def test_fp32_keeps_the_rule_without_tf32(backend):
    assert_matches_reference(on_gpu(CASE, backend, torch.float32), backend=backend)
