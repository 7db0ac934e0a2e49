"""Random specs and shapes against the reference, forward and all gradients.

100 fixed examples by default; ``TILEWISE_FUZZ=5000 pytest tests/test_fuzz.py`` runs that many with new random seeds. A failure
shrinks to a small case and prints a line that runs it again.
"""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from tilewise import dispatch
from tilewise.problem import DTYPES
from tilewise.testing import Case, assert_matches_reference, make_inputs, why_not

ALIGNS = st.sampled_from((None, "bottom_right", "top_left"))
DENSITIES = st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0))
SIDES = st.one_of(st.none(), st.integers(0, 90))


def _broadcast(of: str) -> st.SearchStrategy[str]:
    """Dims of a tensor that broadcasts to `of`: some replaced by 1, leading ones dropped."""
    kept = st.tuples(*(st.sampled_from((d, "1")) for d in of)).map("".join)
    return st.builds(lambda dims, start: dims[start:], kept, st.integers(0, len(of) - 1))


def _interval_masks(draw, align: str | None, varlen: bool) -> list[tuple]:
    options = [
        st.tuples(st.just("causal"), st.just(align)),
        st.tuples(st.just("window"), SIDES, SIDES, st.just(align)),
        st.tuples(st.just("chunk"), st.integers(1, 70)),
        st.tuples(st.just("prefix"), st.one_of(st.integers(0, 150), st.just("B"))),
    ]
    if not varlen:
        options.append(st.tuples(st.just("document"), st.sampled_from(("S", "BS"))))
    return draw(st.lists(st.one_of(options), max_size=2))


def _tile_masks(draw) -> list[tuple]:
    sizes = st.sampled_from((8, 16, 24, 64))
    blocks = st.tuples(st.just("blocks"), sizes, sizes, st.sampled_from(("QK", "HQK", "BHQK")), DENSITIES)
    dense = st.tuples(st.just("dense"), _broadcast("BHQK"), DENSITIES)
    return draw(st.lists(st.one_of(blocks, dense), max_size=2))


@st.composite
def cases(draw) -> Case:
    sizes: dict = {}
    varlen = draw(st.booleans())
    if varlen:
        lengths = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=4))
        sizes["lengths_q"], sizes["lengths_k"] = tuple(q for q, _ in lengths), tuple(k for _, k in lengths)
        sizes["spare"] = draw(st.integers(0, 2))
        for name, of in (("used_q", "lengths_q"), ("used_k", "lengths_k")):
            if draw(st.booleans()):
                sizes[name] = tuple(draw(st.integers(0, length)) for length in sizes[of])
    else:
        sizes |= {"B": draw(st.integers(0, 3)), "Sq": draw(st.integers(0, 150)), "Sk": draw(st.integers(0, 150))}
    group, Hkv = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    D = draw(st.integers(1, 40))
    align = draw(ALIGNS)
    return Case(
        H=group * Hkv,
        Hkv=Hkv,
        D=D,
        Dv=draw(st.one_of(st.just(D), st.integers(1, 40))),
        mask=tuple(_interval_masks(draw, align, varlen) + _tile_masks(draw)),
        softcap=draw(st.sampled_from((None, None, 0.5, 5.0, 50.0))),
        softmax_scale=draw(st.sampled_from((None, None, 1.0, 0.05))),
        alibi=draw(st.sampled_from((None, None, "H", "BH"))),
        bias=draw(st.one_of(st.none(), _broadcast("BHQK"))),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.7))),
        strides=draw(st.sampled_from(("contiguous", "transposed", "sliced", "expanded", "reversed"))),
        magnitude=draw(st.sampled_from((1.0, 3.0))),
        poison=draw(st.booleans()),
        **sizes,
    )


@pytest.mark.parametrize("backend", dispatch.names())
@given(case=cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_random_cases(backend: str, case: Case, dtype: torch.dtype, seed: int):
    inputs = make_inputs(case, dtype, seed)
    note(inputs.repro)
    if not why_not(inputs, backend):
        assert_matches_reference(inputs, backend=backend)
