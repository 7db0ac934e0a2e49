"""Which calls take the Hopper kernels in which a consumer masks its last key tile only, or half of it. No GPU is needed."""

import importlib

import pytest
import torch

from tilewise.backends.device.lower import lower
from tilewise.dense import bind
from tilewise.testing import Case, make_inputs
from tilewise.tiles import kv_tile_range

forward = importlib.import_module("tilewise.backends.gluon.forward_sm90")

CAUSAL, TOP_LEFT = ("causal",), ("causal", "top_left")
LENGTHS = [1, 63, 64, 100, 128, 129, 192, 200, 256, 300, 320]
MASKS = [CAUSAL, TOP_LEFT, *[("window", None, right) for right in (1, 64, 128, 200)]]


def _call(**case):
    inputs = make_inputs(Case("x", **{"B": 1, "H": 1, **case}), torch.bfloat16)
    longest = [max(case.get(name, [0])) for name in ("lengths_q", "lengths_k")]
    return lower(inputs.q, inputs.k, bind(inputs), *longest)


def _ends(Sq, Sk, mask):
    """For each row the first key behind those that it sees."""
    right = 0 if mask[0] == "causal" else mask[2]
    shift = 0 if mask == TOP_LEFT else Sk - Sq
    return [min(max(row + shift + right + 1, 0), Sk) for row in range(Sq)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_no_other_tile_needs_a_mask(mask):
    """By the definition of the masks, row by row."""
    found = set()
    for Sq in LENGTHS:
        for Sk in LENGTHS:
            rows, ends = forward.diagonal(_call(Sq=Sq, Sk=Sk, D=8, mask=(mask,))), _ends(Sq, Sk, mask)
            found.add(rows)
            for row in range(0, Sq if rows else 0, 64):
                seen = ends[row : row + 64]
                for block_n in (64, 128):
                    tiles = kv_tile_range(0, 0, seen[0], seen[-1], block_n)
                    assert tiles.full_last >= tiles.last - 1, (Sq, Sk, row, block_n)
                if rows == 128 and row % 128 == 0 and seen[-1]:
                    assert (seen[-1] - 1) % 128 < 64, (Sq, Sk, row)
    assert {64, 128} & found


#: The case, `diagonal`, and whether its config at D128 is aligned, and takes halves.
CALLS = [
    (dict(Sq=1000, mask=(CAUSAL,)), 128, True, True),
    (dict(Sq=512, H=6, Hkv=2, mask=(CAUSAL,)), 128, True, True),
    (dict(Sq=512, Sk=640, mask=(CAUSAL,)), 128, True, True),
    (dict(Sq=512, Sk=576, mask=(CAUSAL,)), 64, True, False),
    (dict(Sq=512, Sk=575, mask=(CAUSAL,)), 0, False, False),
    (dict(Sq=640, Sk=512, mask=(CAUSAL,)), 128, True, True),
    (dict(Sq=512, Sk=1000, mask=(TOP_LEFT,)), 128, True, True),
    (dict(Sq=1000, Sk=200, mask=(TOP_LEFT,)), 64, True, False),  # rows from 200 on see the whole of the last tile
    (dict(Sq=512, mask=(("window", None, 128),)), 64, True, False),  # so do the last rows here
    (dict(Sq=512, mask=(("window", None, 5),)), 0, False, False),
    (dict(Sq=512), 0, False, False),
    (dict(Sq=512, mask=(("window", 64, 0),)), 0, False, False),
    (dict(Sq=512, mask=(("chunk", 128), CAUSAL)), 0, False, False),
    (dict(Sq=512, mask=(("document", "BS"), CAUSAL)), 0, False, False),
    (dict(Sq=512, mask=(CAUSAL,), softcap=5.0), 128, False, False),
    (dict(Sq=512, mask=(("blocks", 128, 128, "HQK"), CAUSAL)), 128, False, False),
    (dict(lengths_q=(256, 128), lengths_k=(256, 128), mask=(CAUSAL,)), 0, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("case", "rows", "aligned", "halves"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_who_takes_these_kernels(case, rows, aligned, halves):
    call = _call(D=128, **case)
    assert forward.diagonal(call) == rows
    config = forward._config(128, 128, call)
    assert (config.aligned, config.halves) == (aligned, halves)
    short = forward._config(64, 64, call)
    assert (short.aligned, short.halves) == (aligned, aligned and short.block_n == 128)


def test_halves_are_of_aligned_tiles():
    with pytest.raises(ValueError, match="halves"):
        forward.ForwardConfig(groups=2, block_n=128, stages=2, registers=240, early=True, query_stages=4, halves=True)
