"""Causal calls whose diagonal lies on multiples of 64 or 128 rows, or does not, or leaves the keys."""

import pytest
from lane import CAUSAL, needs_cuda, on_gpu

from tilewise.testing import Case, assert_matches_reference

pytestmark = needs_cuda

TOP_LEFT = (("causal", "top_left"),)
#: Rows, keys, mask. 25 heads: more items than multiprocessors, so that work is drawn.
SHAPES = [
    (1100, 1100, CAUSAL),
    (1152, 1280, CAUSAL),
    (1280, 1152, CAUSAL),
    (1152, 1216, CAUSAL),
    (1152, 1151, CAUSAL),
    (1300, 1200, TOP_LEFT),
    (1200, 1300, TOP_LEFT),
    (1152, 1152, (("window", None, 128),)),
    (1152, 1152, (("window", None, 130),)),
]


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("Sq", "Sk", "mask"), SHAPES, ids=str)
def test_diagonals(D, Sq, Sk, mask):
    case = Case("diagonal", B=1, Sq=Sq, Sk=Sk, H=25, Hkv=5, D=D, mask=mask)
    assert_matches_reference(on_gpu(case, "gluon"), backend="gluon")


@pytest.mark.parametrize("D", [64, 128, 256])
def test_nan_behind_a_diagonal(D):
    """Rows that see no key, and keys that no row sees: NaN there must not spread."""
    for Sq, Sk, mask in ((1280, 1152, CAUSAL), (1100, 1280, TOP_LEFT)):
        case = Case("diagonal", B=1, Sq=Sq, Sk=Sk, H=25, Hkv=5, D=D, mask=mask, poison=True)
        assert_matches_reference(on_gpu(case, "gluon"), backend="gluon")
