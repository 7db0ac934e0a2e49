"""Calls made again are replays of the first ones (`backends/device/replay`): what they give for other tensors."""

import pytest
import torch
from lane import CAUSAL, DEVICE, HALF, call_of, on_gpu, refill, same

from tilewise import again, attention
from tilewise.testing import Case

CASES = [
    Case("causal", Sq=300, H=4, D=64, mask=CAUSAL),
    Case("one_tile_each", Sq=100, H=2, D=128),
    Case("one_query", Sq=1, Sk=500, H=8, Hkv=2, D=64, mask=CAUSAL),
    Case("max_logit_and_cap", Sq=130, H=2, D=64, mask=(("window", 50, 0),), softcap=5.0),
    Case("sinks", Sq=130, H=4, Hkv=2, D=64, sinks=True, mask=CAUSAL),
    Case("alibi", Sq=130, H=4, D=64, alibi="H"),
    Case("bias", Sq=130, H=4, D=64, bias="1HQK"),
    Case("documents", Sq=130, H=4, D=64, mask=(("document", "BS"), ("causal",))),
    Case("dropout", Sq=130, H=4, Hkv=2, D=64, dropout=0.3, mask=CAUSAL),
    Case("packed", lengths_q=(100, 0, 77, 200), lengths_k=(150, 20, 100, 200), H=4, Hkv=2, D=64, spare=3, sinks=True,
         mask=CAUSAL),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_other_tensors_give_what_a_first_call_gives(case, backend):
    """The same values at other addresses, again and again: every call is another way to the same kernels."""
    inputs, found, kept = on_gpu(case, backend), [], []
    for _ in range(5):
        function, leaves = call_of(inputs, backend)
        torch.manual_seed(5)
        found.append(function())
        kept.append(leaves)  # so that the next ones lie elsewhere
    assert all(same(one, found[0]) for one in found)
    refill(kept[-1], 7)
    torch.manual_seed(5)
    assert not torch.equal(function()[0], found[0][0])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "softmax_scale": 0.3, "return_lse": True}], ids=str
)
@pytest.mark.parametrize("S", [70, 1000])
def test_plain_calls_give_what_the_long_way_gives(monkeypatch, backend, options, layout, S):
    """Those that go from their layouts straight to the kernels; deterministic, so that bits can be compared."""
    if DEVICE == "cpu" and backend == "gluon":
        pytest.skip("Gluon has no interpreter")

    def call(seed):
        g = torch.Generator(DEVICE).manual_seed(seed)
        q, k, v, do = (torch.randn(2, S, 3, 64, generator=g, device=DEVICE).to(HALF) for _ in range(4))
        if layout == "bhsd":
            q, k, v, do = (t.transpose(1, 2).contiguous() for t in (q, k, v, do))
        shared = {**options, "layout": layout, "backend": backend, "deterministic": True}
        with torch.no_grad():
            plain = attention(q, k, v, **shared)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        found = attention(*leaves, **shared)
        o, *rest = found if isinstance(found, tuple) else (found,)
        return [*(plain if isinstance(plain, tuple) else (plain,)), o, *rest, *torch.autograd.grad(o, leaves, do)]

    for seed in range(3):
        call(seed)
    found = call(3)
    if DEVICE == "cuda":
        assert again._known
    monkeypatch.setattr(again, "key_of", lambda *args: None)
    assert same(found, call(3))
