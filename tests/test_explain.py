"""`tilewise.explain`: agrees with what `attention` does, changes nothing, explains refusals."""

import dataclasses
import json

import pytest
import torch

import tilewise
from tilewise import dispatch
from tilewise.explain import picture
from tilewise.page import human


def _tensors(sq=40, sk=48, H=4, Hkv=2, D=16, dtype=torch.float32):
    return tuple(torch.randn(2, s, heads, D).to(dtype) for s, heads in ((sq, H), (sk, Hkv), (sk, Hkv)))


def test_names_backend_and_features():
    q, k, v = _tensors()
    found = tilewise.explain(q, k, v, causal=True, window_size=(8, None), sinks=torch.zeros(4), softcap=5.0)
    assert found.backend == "cpu"
    assert all("this backend runs on" in reasons[0] for reasons in found.refusals.values())  # those for other devices
    assert set(found.features) == {"causal", "window", "sinks", "softcap", "gqa"}


@pytest.fixture
def lesser(monkeypatch):
    """A second backend, first in the table, that lacks what the CPU has."""
    row = dataclasses.replace(
        dispatch.capabilities("cpu"), name="lesser", features=frozenset({"causal"}), max_head_dim=64,
        dtypes=(torch.float32,), requires=lambda: "this machine lacks it",
    )  # fmt: skip
    monkeypatch.setattr(dispatch, "BACKENDS", (row, *dispatch.BACKENDS))


@pytest.mark.usefixtures("lesser")
def test_gives_every_reason_of_every_backend():
    q, k, v = _tensors(D=80, dtype=torch.bfloat16)
    found = tilewise.explain(q, k, v, causal=True, softcap=3.0)
    assert found.backend == "cpu"
    reasons = " ".join(found.refusals["lesser"])
    for part in ("bfloat16", "exceed 64", "GQA", "softcap", "this machine lacks it"):
        assert part in reasons
    assert "not lesser" in str(found)


@pytest.mark.usefixtures("lesser")
def test_explains_a_call_that_nobody_takes():
    q, k, v = _tensors()
    found = tilewise.explain(q, k, v, backend="lesser")
    assert found.backend is None and list(found.refusals) == ["lesser"]
    assert "none can take this call" in str(found)
    with tilewise.use_backend("lesser"):
        assert tilewise.explain(q, k, v).backend is None


def test_same_argument_errors_as_attention():
    q, k, v = _tensors()
    for bad in ({"window_size": 3}, {"softcap": -1.0}, {"causal": "left"}, {"layout": "sbhd"}, {"sinks": 1.0}):
        with pytest.raises((TypeError, ValueError)) as ours:
            tilewise.explain(q, k, v, **bad)
        with pytest.raises(type(ours.value)) as theirs:
            tilewise.attention(q, k, v, **bad)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(TypeError, match="colour"):
        tilewise.explain(q, k, v, colour="red")
    with pytest.raises(ValueError, match="b and h"):
        tilewise.explain(q, k, v, h=4)


def test_layouts_agree():
    q, k, v = _tensors()
    turned = (t.transpose(1, 2) for t in (q, k, v))
    assert tilewise.explain(*turned, layout="bhsd", causal=True).cost == tilewise.explain(q, k, v, causal=True).cost


def test_packed_calls():
    q = torch.randn(30, 2, 16)
    cu = torch.tensor([0, 10, 10, 30], dtype=torch.int32)
    found = tilewise.explain(q, q, q, cu_seqlens_q=cu, causal=True, block_m=8, block_n=8, b=2)
    assert (found.plan.Sq, found.plan.Sk) == (20, 20)
    assert found.cost.visible_pairs == 2 * (10 * 11 // 2 + 20 * 21 // 2)
    assert "3 packed sequences" in str(found)


def test_does_not_touch_the_random_state():
    q, k, v = _tensors()
    before = torch.get_rng_state()
    tilewise.explain(q, k, v, dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_json_holds_the_same_numbers():
    q, k, v = _tensors(64, 64)
    found = tilewise.explain(q, k, v, causal=True, block_m=16, block_n=16)
    data = json.loads(found.to_json())
    assert data["problem"] == {
        "B": 2, "H": 4, "Hkv": 2, "Sq": 64, "Sk": 64, "D": 16, "Dv": 16, "total_q": 128, "total_k": 128,
        "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    assert data["tile_plan"]["rows"] == ["▒···", "█▒··", "██▒·", "███▒"]
    assert data["cost"]["forward"]["flops"] == found.cost.forward.flops
    assert data["cost"]["memory"]["saved"] == found.cost.memory.saved
    assert data["cost"]["tiles"] == {"full": 6 * 8, "masked": 4 * 8, "skipped": 6 * 8}


def test_page_and_picture():
    q, k, v = _tensors(640, 640)
    found = tilewise.explain(q, k, v, causal=True, block_m=16, block_n=16)
    page = str(found)
    assert "backend" in page and "saved for backward" in page and "skipped" in page
    assert picture(found.plan, 4) == ["▒···", "█▒··", "██▒·", "███▒"]
    assert len(picture(found.plan, 64)) == 40


def test_empty_batch():
    q = torch.randn(0, 8, 2, 16)
    found = tilewise.explain(q, q, q)
    assert found.plan is None and found.cost.visible_pairs == 0
    assert "backend" in str(found)


def test_human():
    assert [human(x, "B") for x in (0, 1023, 2048, 300 << 20)] == ["0 B", "1,023 B", "2.0 KiB", "300 MiB"]
    assert human(2.5e12, "FLOP") == "2.5 TFLOP"
