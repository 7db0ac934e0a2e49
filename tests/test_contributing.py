"""CONTRIBUTING's recipes, run: its code blocks work, and what it asks of a modifier every existing modifier has."""

import re
from pathlib import Path

import pytest
import torch
from cases import CASES

import tilewise
from tilewise import dispatch, masks, mods, reference
from tilewise.backends.base import FEATURES
from tilewise.spec import DIFFERENTIABLE, TENSORS, AttentionSpec, MaskTerm
from tilewise.testing import assert_matches_reference

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))

#: Each score modifier and the sink: its class, its tensor's name, its feature.
MODIFIERS = [
    (mods.Softcap, None, "softcap"),
    (mods.Alibi, "alibi_slopes", "alibi"),
    (mods.Bias, "bias", "bias"),
    (mods.Sink, "sinks", "sinks"),
]


def test_every_block_is_run():
    assert set(BLOCKS) == {"mask", "backend"}


def test_recipe_for_a_mask(monkeypatch):
    monkeypatch.setattr(masks, "KINDS", dict(masks.KINDS))
    monkeypatch.setattr("tilewise.spec.KINDS", masks.KINDS)
    monkeypatch.setitem(FEATURES, "lookback", "lookback mask")
    cpu = dispatch.capabilities("cpu")
    monkeypatch.setattr(dispatch, "BACKENDS", (_with_feature(cpu, "lookback"),))
    names = {"__name__": "recipe"}
    exec(BLOCKS["mask"], names)
    q, k, v = torch.randn(3, 2, 70, 2, 16).unbind()
    mask = names["Lookback"](5) & tilewise.Window(30, None)
    o, lse = tilewise.attention(q, k, v, mask=mask, return_lse=True)
    distance = torch.arange(70)[:, None] - torch.arange(70)
    literal = (distance >= 5) & (distance <= 30)
    expected = tilewise.attention(q, k, v, mask=literal, return_lse=True)
    torch.testing.assert_close((o, lse), expected)
    term = MaskTerm("lookback", (5,), 0)
    spec = AttentionSpec((term,))
    assert AttentionSpec.parse(spec.key) == spec
    assert reference.attention(q, k, v, spec.bind([], 0.25))[1][0, 0, 4] == -torch.inf


def _with_feature(row, feature):
    import dataclasses

    return dataclasses.replace(row, features=row.features | {feature})


def test_recipe_for_a_backend(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", dispatch.BACKENDS)
    exec(BLOCKS["backend"], {"__name__": "recipe"})
    case = next(case for case in CASES if case.name == "gqa4")
    import dataclasses

    assert_matches_reference(dataclasses.replace(case, needs=(), dtypes=(torch.float32,)), backend="dense")
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(tilewise.NoBackendError, match=r"dense.*no softcap"):
        tilewise.attention(q, q, q, softcap=3.0, backend="dense")
    dispatch.load.cache_clear()


@pytest.mark.parametrize(("kind", "tensor", "feature"), MODIFIERS, ids=[m[2] for m in MODIFIERS])
def test_every_modifier_has_what_the_recipe_asks(kind, tensor, feature):
    assert kind.apply and kind.__doc__
    assert tensor is None or (tensor in TENSORS and tensor in DIFFERENTIABLE)
    assert feature in FEATURES
    field = {"alibi_slopes": "alibi"}.get(tensor, tensor) or feature
    with_it = [case for case in CASES if getattr(case, field)]
    assert len(with_it) >= 2, "a modifier has a case of its own and one mixed with others"
    numerics = (ROOT / "docs" / "numerics.md").read_text()
    gradient = {"softcap": "dx ", "alibi": "dslope ", "bias": "dbias", "sinks": "dsink "}[feature]
    assert gradient in numerics


def test_every_feature_has_a_case_and_a_gradient_check():
    gradcheck = (ROOT / "tests" / "test_gradcheck.py").read_text()
    from tilewise.testing import make_inputs, problem_of

    used = set()
    for case in CASES:
        used.update(problem_of(make_inputs(case, case.dtypes[0])).features)
    used.add("deterministic")  # changes no result: test_bugs_outputs.py (B80) runs it
    assert set(FEATURES) <= used, set(FEATURES) - used
    for name in ("softcap", "alibi", "bias", "sinks", "dropout"):
        assert name in gradcheck
