"""The IO model's formulas are what an execution with a counted memory finds, exactly, on random problems."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st

from tilewise import reference
from tilewise.io_model.simulator import simulate
from tilewise.plan import schedule
from tilewise.testing import Case, bind, make_inputs, problem_of
from tilewise.traffic import FLASH1, FLASH2, FLASH3, OWNED, STANDARD, Sizes, account

ALGORITHMS = {"standard": STANDARD, "flash1": FLASH1, "flash2": FLASH2, "flash3": FLASH3, "owned": OWNED}
DEVICES = ("cpu", "cuda")  # only a word of the problem: whether rows' bounds are read or computed
BLOCK = st.integers(1, 7)
BLOCKS = st.tuples(st.just("blocks"), BLOCK, BLOCK, st.sampled_from(("QK", "HQK", "BHQK")), st.floats(0.1, 0.9))
INTERVALS = st.one_of(
    st.just(("causal",)),
    st.tuples(st.just("window"), st.integers(0, 6), st.integers(0, 3)),
    st.tuples(st.just("chunk"), st.integers(1, 6)),
    st.tuples(st.just("prefix"), st.sampled_from((0, 3, 9, "B"))),
)
TILES = st.one_of(BLOCKS, st.tuples(st.just("dense"), st.sampled_from(("QK", "1HQK", "BHQK")), st.floats(0.2, 0.9)))
MASKS = st.one_of(
    st.just(()),
    st.tuples(INTERVALS),
    st.tuples(TILES),
    st.tuples(INTERVALS, TILES),
    st.just((("document", "BS"),)),
)
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def cases(draw, packed):
    """Small problems with everything that decides what moves."""
    Hkv, G = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = {"H": Hkv * G, "Hkv": Hkv, "D": draw(st.integers(1, 5)), "Dv": draw(st.integers(1, 5))}
    if packed and draw(st.booleans()):
        lengths_q = draw(LENGTHS)
        lengths_k = draw(st.lists(st.integers(0, 9), min_size=len(lengths_q), max_size=len(lengths_q)).map(tuple))
        mask = draw(st.one_of(st.just(()), st.tuples(INTERVALS.filter(lambda m: m[0] != "prefix"))))
        return Case("packed", lengths_q=lengths_q, lengths_k=lengths_k, mask=mask, **size)
    mask, Sq = draw(MASKS), draw(st.integers(1, 13))
    Sk = draw(st.integers(1, 13))
    bias = draw(st.sampled_from((None, "BHQK", "1HQK", "K")))
    size |= {"bias": bias, "dropout": draw(st.sampled_from((0.0, 0.3)))}
    return Case("random", B=draw(st.integers(1, 2)), Sq=Sq, Sk=Sk, mask=mask, **size)


def check(name, case, block_m, block_n, dtype, device):
    """Results against the reference, counts and FLOPs against the formulas."""
    algorithm, inputs = ALGORITHMS[name], make_inputs(case, torch.float64)
    bound = bind(inputs)
    problem = dataclasses.replace(problem_of(inputs), dtype=dtype, device=device)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o = reference.attention(q, k, v, bound)[0]
    do = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
    exact = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True)) | {"o": o}
    found = simulate(algorithm, problem, bound, (q, k, v, do), block_m, block_n)
    for what, value in exact.items():
        result = torch.as_tensor(found.results[what])
        torch.testing.assert_close(result, value.detach().flatten(0, -3).movedim(0, 1), atol=1e-10, rtol=1e-8)
    sizes = Sizes.of(problem, bound, schedule(problem, bound, block_m, block_n).work())
    for parts, executed in zip(algorithm, (found.forward, found.backward), strict=True):
        formula, chip = account(parts, lambda _: sizes), executed.chip
        assert formula.by_tensor() == executed.counts
        assert (formula.matmul, formula.other, formula.exponentials) == (chip.matmul, chip.other, chip.exponentials)
        assert (formula.recomputed, formula.other_recomputed) == (chip.recomputed, chip.other_recomputed)


@pytest.mark.parametrize("name", ALGORITHMS)
@hypothesis.settings(
    max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@hypothesis.given(st.data())
def test_formulas_are_what_an_execution_counts(name, data):
    case = data.draw(cases(packed=name != "standard"))
    dtype, device = data.draw(st.tuples(st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from(DEVICES)))
    check(name, case, data.draw(BLOCK), data.draw(BLOCK), dtype, device)
