"""Random specs and shapes against the reference, forward and all gradients.

100 fixed examples by default; ``TILEWISE_FUZZ=5000 pytest tests/test_fuzz.py`` runs that many with new random seeds. A failure
shrinks to a small case and prints a line that runs it again. On GPUs: tests/gpu/test_fuzz_gpu.py.
"""

import pytest
import torch
from fuzzing import GPU_DTYPES, Structure, drawn, numbers, problems, structures
from hypothesis import given, note
from hypothesis import strategies as st

from tilewise import dispatch
from tilewise.problem import DTYPES
from tilewise.testing import Case, assert_matches_reference, make_inputs, why_not


def _with_structure(structure: Structure) -> st.SearchStrategy[tuple[Case, torch.dtype]]:
    return problems(structure).map(lambda case: (case, structure.dtype))


@pytest.mark.parametrize("backend", dispatch.names())
@given(problem=structures(DTYPES).flatmap(_with_structure), seed=st.integers(0, 2**31))
def test_random_cases(backend: str, problem: tuple[Case, torch.dtype], seed: int):
    inputs = make_inputs(*problem, seed)
    note(inputs.repro)
    if not why_not(inputs, backend):
        assert_matches_reference(inputs, backend=backend)


def test_draws_repeat():
    """Workers of a parallel run must draw the same structures."""
    strategy = structures(GPU_DTYPES, ("odd", "sixteens"))
    assert drawn(strategy, 20, 1) == drawn(strategy, 20, 1) != drawn(strategy, 20, 2)


@pytest.mark.parametrize("sizes", ["odd", "sixteens"])
def test_sizes_keep_to_one_side_of_16(sizes):
    """What Triton asks of an integer: is it 1, does it divide by 16."""
    for n in drawn(numbers(sizes, 0, 90), 60, 0):
        assert n != 1 and (n % 16 == 0) == (sizes == "sixteens")
    (structure,) = drawn(structures(GPU_DTYPES, (sizes,)).filter(lambda s: not s.varlen and not s.tiles), 1, 0)[:1]
    for case in drawn(problems(structure), 30, 0):
        assert {case.Sq % 2, case.Sk % 2} == {int(sizes == "odd")}
