"""Random problems on the GPU against the reference: many of each random structure, so that they share compiled kernels.

2,000 for each backend, the same in every run: ``TILEWISE_FUZZ=25`` problems of each of ``TILEWISE_FUZZ_STRUCTURES=80``
structures.
"""

import dataclasses
import os

import pytest
import torch
from fuzzing import GPU_DTYPES, Structure, drawn, problems, structures
from hypothesis import strategies as st
from lane import DEVICE

from tilewise.testing import assert_matches_reference, make_inputs, why_not

COUNT = int(os.environ.get("TILEWISE_FUZZ_STRUCTURES", "80"))
EACH = int(os.environ.get("TILEWISE_FUZZ", "25"))
DIMS = st.sampled_from((8, 20, 32, 40, 64, 64, 96, 128, 128, 256))
STRUCTURES = structures(GPU_DTYPES, ("odd", "sixteens"), DIMS)


def suited(structure: Structure, backend: str) -> Structure:
    """The structure; for the Hopper kernels without what they leave to others, or they would see one in twenty."""
    if backend != "gluon":
        return structure
    blocks = [(recipe[1], recipe[2], recipe[3]) for recipe in structure.tiles if recipe[0] == "blocks"]
    return dataclasses.replace(
        structure,
        dtype=torch.bfloat16 if structure.dtype == torch.float32 else structure.dtype,
        D=-(-structure.D // 8) * 8,
        Dv=-(-structure.Dv // 8) * 8,
        tiles=tuple(("blocks", 8 * block_m, 8 * block_n, dims) for block_m, block_n, dims in blocks),
        bias=None,
        dropout=0.0,
        constants=True,
    )


@pytest.mark.parametrize("number", range(COUNT))
def test_random_problems(number: int, backend: str):
    (drawn_structure,) = drawn(STRUCTURES, 1, number)
    structure = suited(drawn_structure, backend)
    refused, wrong = [], []
    for seed, case in enumerate(drawn(problems(structure), EACH, number)):
        inputs = make_inputs(case, structure.dtype, seed).on(DEVICE)
        if reasons := why_not(inputs, backend):
            refused.append("; ".join(reasons))
            continue
        try:
            assert_matches_reference(inputs, backend=backend)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {EACH} problems of {structure}:\n" + "\n\n".join(wrong)
    if len(refused) == EACH:
        pytest.skip(f"{backend}: {refused[0]}")
