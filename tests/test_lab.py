"""Every system of the lab: exact forward and backward, keeps what it says, refuses what it cannot do."""

import dataclasses

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import tilewise
from tilewise import Causal, dense, lab
from tilewise.lab.flash1 import tile_sizes
from tilewise.lab.tiling import Tiling, visible
from tilewise.testing import Case, judge, make_inputs
from tilewise.training.memory import SavedForBackward

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
#: Small tiles, so that small problems have many; everything else as it is.
SMALL = {
    "recompute-rows": {"block_m": 24},
    "recompute-tiles": {"block_m": 32, "block_n": 24},
    "flash1": {"fast_bytes": 4 * 4 * 16 * 21},
}
CASES = [
    Case("full", Sq=64, D=16),
    Case("odd_lengths", Sq=131, Sk=77, H=3, D=40),
    Case("causal", Sq=96, mask=(("causal",),)),
    Case("causal_more_keys", Sq=45, Sk=110, mask=(("causal",),)),
    Case("causal_rows_without_keys", Sq=110, Sk=45, mask=(("causal",),)),
    Case("causal_top_left", Sq=50, Sk=90, mask=(("causal", "top_left"),)),
    Case("window", Sq=130, mask=(("window", 17, 9),)),
    Case("prefix_chunk", Sq=80, mask=(("prefix", 20), ("chunk", 48))),
    Case("document", Sq=70, mask=(("document",),)),
    Case("blocks", B=1, Sq=200, Sk=230, mask=(("blocks", 32, 64),)),
    Case("blocks_causal", Sq=100, mask=(("blocks", 16, 24), ("causal",))),
    Case("one_query", Sq=1, Sk=33),
    Case("no_keys", Sq=5, Sk=0),
    Case("no_queries", Sq=0, Sk=5),
    Case("logits_1e3", Sq=50, D=64, magnitude=16.0, mask=(("causal",),)),
]


def small(name: str) -> lab.System:
    return dataclasses.replace(lab.find(name), **SMALL.get(name, {}))


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_systems_are_exact(case, dtype):
    """All systems of one case together, so that the reference is computed once; some may refuse, not all."""
    inputs = make_inputs(case, dtype)
    mask = inputs.options.get("mask")
    able = [s for s in map(small, lab.names()) if not s.why_not(inputs.q, inputs.k, inputs.v, mask)]
    verdicts = judge(inputs, {s.name: lambda q, k, v, s=s: s(q, k, v, mask) for s in able})
    assert {"standard", "recompute-tiles", "flash1", "flash2"} <= set(verdicts)
    assert {name: v.complaints for name, v in verdicts.items() if v.complaints} == {}


def test_some_case_runs_every_mask():
    """Which masks a system takes is data; this is where the data are held to their word."""
    used = {recipe[0] for case in CASES for recipe in case.mask}
    assert {kind for system in lab.SYSTEMS for kind in system.masks} == used


def test_a_fault_is_found():
    """The rule rejects a system whose softmax scale is off by 1%."""
    inputs = make_inputs(CASES[0])
    verdict = judge(inputs, {"wrong": lambda q, k, v: lab.find("standard")(1.01 * q, k, v)})["wrong"]
    assert {line.split()[0] for line in verdict.complaints} == {"o", "dq", "dk", "dv"}


def test_the_rule_is_computed_where_the_tensors_are(monkeypatch):
    """On a GPU, long sequences by rows: nothing is made on the default device but scalars, and draws that are moved."""
    monkeypatch.setattr(dense, "LARGEST_DENSE", 2**10)
    made_here = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in _device_constructors() and (kwargs or {}).get("device") is None:
                made_here.append((func.__name__, args))
            return func(*args, **(kwargs or {}))

    inputs = make_inputs(Case("long", B=1, Sq=150, H=1, D=32), FP32)
    inputs = dataclasses.replace(inputs, options={"causal": True}, do=torch.randn(1, 150, 1, 32))
    with Watch():
        verdict = judge(inputs, {"standard": lambda q, k, v: lab.find("standard")(q, k, v, Causal())})["standard"]
    assert verdict.complaints == [] and verdict.errors.keys() == {"o", "dq", "dk", "dv"}
    assert {(name, shape) for name, (shape, *_) in made_here} <= {("randn", (1, 1, 150)), ("zeros", ())}


#: What each keeps for the backward pass, in numbers: of N rows and keys, H heads, D numbers.
KEPT = {
    "standard": lambda N, H, D: H * (3 * N * D + N * N),
    "checkpointed": lambda N, H, D: H * 3 * N * D,
    "recompute": lambda N, H, D: H * (4 * N * D + 2 * N),
    "recompute-rows": lambda N, H, D: H * (4 * N * D + 2 * N),
    "recompute-tiles": lambda N, H, D: H * (4 * N * D + 2 * N),
    "flash1": lambda N, H, D: H * (4 * N * D + 2 * N),
    "flash2": lambda N, H, D: H * (4 * N * D + N),
}


@pytest.mark.parametrize("name", lab.names())
def test_saved_bytes_are_exact(name):
    N, H, D = 120, 3, 16
    q, k, v = (torch.randn(1, N, H, D, requires_grad=True) for _ in "qkv")
    with SavedForBackward() as saved:
        small(name)(q, k, v)
    assert saved.bytes == 4 * KEPT[name](N, H, D)


def test_a_masked_standard_keeps_the_mask_too():
    q, k, v = (torch.randn(1, 120, 3, 16, requires_grad=True) for _ in "qkv")
    with SavedForBackward() as saved:
        lab.find("standard")(q, k, v, Causal())
    assert saved.bytes == 4 * KEPT["standard"](120, 3, 16) + 120 * 120


def test_tile_sizes_of_the_paper():
    """FlashAttention, algorithm 1, line 1; with 192 KiB of 16-bit numbers at d = 64."""
    assert tile_sizes(98304, 64) == (64, 384)
    assert tile_sizes(1000, 64) == (4, 4)


def test_tilings_agree_with_the_whole_mask():
    """Skipped tiles hide everything, full ones nothing, and the others what the mask says."""
    masks = make_inputs(Case(Sq=90, Sk=70, mask=(("window", 20, 9), ("blocks", 16, 24)))).options["mask"].parts()
    tiles, seen = Tiling(masks, 90, 70, 1, 1), visible(masks, 90, 70, "cpu")
    built = torch.zeros_like(seen)
    for i, rows in enumerate(tiles.rows):
        for j in tiles.keys_of(i):
            assert i in tiles.rows_of(j)
            s = tiles.hide(torch.zeros(1, rows.stop - rows.start, tiles.keys[j].stop - tiles.keys[j].start), i, j)
            built[rows, tiles.keys[j]] = s[0] == 0
    assert torch.equal(built, seen)
    first, visits = tiles.visits
    assert first[-1] == len(visits) == sum(len(tiles.keys_of(i)) for i in range(len(tiles.rows)))


def test_a_block_sparse_problem_does_less():
    masks = (tilewise.Blocks.butterfly(256, 256, 16, 16),)
    tiles = Tiling(masks, 256, 256, 128, 128)
    assert sum(len(tiles.keys_of(i)) for i in range(16)) == 16 * 5


def test_refusals():
    q = torch.randn(2, 32, 2, 16)
    k = torch.randn(2, 32, 1, 16)
    with pytest.raises(ValueError, match=r"recompute: has no blocks mask"):
        lab.find("recompute")(q, q, q, tilewise.Blocks(torch.ones(1, 1, dtype=torch.bool)))
    with pytest.raises(ValueError, match="must agree in all but Sq"):
        lab.find("flash1")(q, k, k)
    with pytest.raises(ValueError, match="the same for all sequences and heads"):
        lab.find("flash1")(q, q, q, tilewise.Prefix(torch.tensor([3, 4])))
    with pytest.raises(ValueError, match="one Blocks mask"):
        blocks = tilewise.Blocks(torch.ones(1, 1, dtype=torch.bool))
        lab.find("standard")(q, q, q, blocks & blocks)
    with pytest.raises(ValueError, match="systems on cpu are standard"):
        lab.find("flash3")
    flash1, wide = lab.find("flash1", "cuda"), torch.empty(1, 256, 1, 128, dtype=torch.float64)
    reasons = "; ".join(flash1.why_not(wide, wide, wide, tilewise.Blocks.butterfly(256, 256, 128, 24)))
    assert all(
        words in reasons for words in ("on cuda, not on cpu", "powers of two", "up to 64 rows", "not torch.float64")
    )
    assert lab.find("flash3", "cuda").why_not(q, q, q) == ["runs on cuda, not on cpu"]
