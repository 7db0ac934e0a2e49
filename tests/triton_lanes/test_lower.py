"""What lowering tells GPU kernels about masks; nothing is compiled."""

import pytest
import torch

from tilewise.backends.device.lower import is_ordered, lower
from tilewise.testing import Case, bind, make_inputs

CAUSAL = ("causal",)


@pytest.mark.parametrize(
    "case",
    [
        Case("documents", B=3, Sq=100, Sk=130, mask=(("document", "BS", True), CAUSAL)),
        Case("one_for_all", B=3, Sq=100, mask=(("document", "S", True), ("window", 9, 3))),
        Case("prefix_per_sequence", B=2, Sq=75, mask=(("prefix", "B"),)),
        Case("two_chunks", B=2, Sq=60, Sk=33, mask=(("chunk", 24), ("chunk", 16), CAUSAL)),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_keys_are_those_of_rows(case, seed):
    inputs = make_inputs(case, seed=seed)
    bound = bind(inputs)
    call = lower(inputs.q, inputs.k, bound, 0, 0)
    Sq, Sk, interval = call.lengths.max_q, call.lengths.max_k, call.ordered_interval
    row, key = torch.arange(Sq)[:, None], torch.arange(Sk)
    lo, hi = (x.view(-1, Sq, 1) for x in (interval.low, interval.high))
    first, end = (x.view(-1, 1, Sk) for x in (interval.first, interval.end))
    assert is_ordered(bound)
    assert torch.equal((lo <= key) & (key < hi), (first <= row) & (row < end))
    for bounds in (first, end):  # kernels look at the first and the last key of a tile
        assert (bounds.diff(dim=2) >= 0).all()


def test_what_is_not_ordered():
    shuffled = Case("shuffled", B=2, Sq=100, mask=(("document", "BS"),))
    packed = Case("packed", lengths_q=(9, 7), mask=(("prefix", "B"),))
    assert not any(is_ordered(bind(make_inputs(case))) for case in (shuffled, packed))
