"""Calls made again are replays of the first ones (`backends/device/replay`): what they give for other tensors."""

import pytest
import torch
from lane import CAUSAL, call_of, on_gpu, refill, same

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
