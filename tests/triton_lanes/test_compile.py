"""The Triton kernels compile for every GPU they ship for, within its shared memory. No GPU is needed."""

import re
from types import SimpleNamespace

import pytest
import torch
import triton
from compiling import SHARED_BYTES, TARGETS, compile_call, compile_decode, product_loops, sass_of, spilled_bytes

from tilewise import dispatch
from tilewise.backends.device import assembler, lower
from tilewise.backends.device.assembler import sound_ptxas
from tilewise.testing import Case, make_inputs

CAUSAL = ("causal",)
PLAIN = [
    Case("causal_d64", Sq=512, H=4, Hkv=2, D=64, mask=(CAUSAL,)),
    Case("full_d128", Sq=512, H=2, D=128),
]
FEW_ROWS = Case("few_rows", B=1, Sq=1, Sk=2000, H=8, Hkv=2, D=128)
MIXES = [
    Case("blocks", B=1, Sq=200, Sk=230, mask=(("blocks", 32, 64),)),
    Case("mix_everything", Sq=65, Sk=80, H=4, Hkv=2, D=20, Dv=36, softcap=4.0, alibi="BH", bias="BHQK", sinks=True,
         dropout=0.2, mask=(("document", "BS"), ("window", 50, 40))),
    Case("mix_blocks", Sq=90, Sk=100, H=4, softcap=4.0, bias="HQK", sinks=True, dropout=0.1,
         mask=(("blocks", 16, 32, "BHQK", 0.6), CAUSAL)),
    Case("varlen", lengths_q=(60, 35), lengths_k=(70, 30), H=4, D=64, bias="1HQ1",
         mask=(("window", 25, 9), ("chunk", 32), ("prefix", 30))),
]  # fmt: skip


def _fits(kernels, target):
    assert kernels
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES[target], kernel.name


@pytest.mark.parametrize("target", TARGETS)
def test_plain_calls_compile(target):
    _fits(compile_call(make_inputs(PLAIN[0], torch.bfloat16), target), target)


WIDE = [
    Case("wide", Sq=512, H=1, D=256, mask=(CAUSAL,)),
    Case("wide_lists", Sq=300, H=1, D=256, mask=(("blocks", 64, 64),)),
    Case("wide_bias", Sq=300, H=1, D=256, bias="HQK", mask=(CAUSAL,)),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", WIDE, ids=[case.name for case in WIDE])
def test_wide_heads_compile(case, target):
    """Lists of tiles and a bias take shared memory of their own, which fills up first where heads are wide."""
    _fits(compile_call(make_inputs(case, torch.bfloat16), target), target)


@pytest.mark.parametrize("mask", [(), (CAUSAL,)])
def test_owned_rows_of_wide_heads_fit_in_registers(mask):
    """Beside sums of 128 registers a thread; the loop that repairs NaN may spill."""
    *_, dq, _, dv = compile_call(make_inputs(Case("wide", Sq=512, H=1, D=256, mask=mask), torch.bfloat16), "sm_90")
    for kernel in (dq, dv):
        loop = product_loops(kernel)[0]
        assert not [x for x in loop if "LDL" in x or "STL" in x]
        assert [x for x in loop if re.match(r".*HGMMA\.64x32x16\S* R\d+, R\d+,", x)], kernel.name  # s from registers


def test_a_sound_assembler_makes_the_code():
    """ptxas 12.8 addresses operands of Hopper's products wrongly (`assembler`): PTX 8.7 is its newest language."""
    assert tuple(map(int, sound_ptxas().version.split("."))) >= (12, 9)
    versions = [
        re.search(r"\.version (\d+)\.(\d+)", kernel.asm["ptx"])
        for kernel in compile_call(make_inputs(PLAIN[0], torch.bfloat16), "sm_90")
    ]
    assert all(version and tuple(map(int, version.groups())) >= (8, 8) for version in versions)


@pytest.mark.parametrize("case", MIXES, ids=[case.name for case in MIXES])
def test_mixed_calls_compile(case):
    _fits(compile_call(make_inputs(case, torch.bfloat16), "sm_90"), "sm_90")


@pytest.mark.parametrize("target", TARGETS)
def test_decode_compiles(target):
    kernels = compile_decode(make_inputs(FEW_ROWS, torch.bfloat16), target)
    assert [kernel.metadata.name for kernel in kernels] == ["decode_kernel", "merge_kernel"]
    _fits(kernels, target)
    if target == "sm_90":
        assert sum(map(spilled_bytes, kernels)) == 0


@pytest.mark.parametrize("case", MIXES, ids=[case.name for case in MIXES])
def test_mixed_decode_calls_compile(case):
    _fits(compile_decode(make_inputs(case, torch.bfloat16), "sm_90"), "sm_90")


@pytest.mark.parametrize(("D", "dtype"), [(512, torch.bfloat16), (128, torch.float32), (512, torch.float32)])
def test_wide_decode_calls_compile(D, dtype):
    case = Case("wide", B=1, Sq=1, Sk=512, H=1, D=D)
    too_wide = dtype == torch.float32 and D == 512  # for the 64 KiB of an MI300: 16 rows, keys and values of float32
    for target in ("sm_90",) if too_wide else ("sm_90", "gfx942"):
        _fits(compile_decode(make_inputs(case, dtype), target), target)


def test_float32_compiles():
    _fits(compile_call(make_inputs(PLAIN[0], torch.float32), "sm_90"), "sm_90")


def test_hopper_kernels_use_wgmma_and_do_not_spill():
    forward, _, dq, _ = compile_call(make_inputs(PLAIN[1], torch.bfloat16), "sm_90")
    for kernel in (forward, dq):
        assert "HGMMA" in sass_of(kernel)
        assert spilled_bytes(kernel) == 0, kernel.name


@pytest.mark.parametrize(("D", "programs"), [(64, 4), (128, 3)])
def test_short_sequences_leave_room_for_several_programs(D, programs):
    """A multiprocessor has 65,536 registers and 228 KiB of shared memory, 1 KiB of it for each program."""
    case = Case("short", Sq=512, H=2, D=D, mask=(CAUSAL,))
    forward = compile_call(make_inputs(case, torch.bfloat16), "sm_90")[0]
    assert programs * forward.metadata.num_warps * 32 * forward.metadata.maxnreg <= 1 << 16
    assert programs * (forward.metadata.shared + 1024) <= 228 << 10
    assert not [line for line in product_loops(forward)[0] if "LDL" in line or "STL" in line]  # spills, where it counts


def test_registers_are_limited_on_hopper_only():
    case = Case("short", Sq=512, H=1, D=64, mask=(CAUSAL,))
    assert compile_call(make_inputs(case, torch.bfloat16), "sm_80")[0].metadata.maxnreg is None


@pytest.mark.parametrize("D", [64, 128])
def test_dk_and_dv_of_modified_scores_hardly_spill(D):
    case = Case("dropped", Sq=512, H=1, D=D, mask=(CAUSAL,), dropout=0.1)
    dkdv = compile_call(make_inputs(case, torch.bfloat16), "sm_90")[-1]
    assert spilled_bytes(dkdv) < 500  # 1300 to 2300 in tiles of plain scores


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_tanh_of_the_special_function_unit_compiles(target, monkeypatch):
    monkeypatch.setattr(lower, "_has_tanh", lambda _: True)
    case = Case("capped", Sq=128, H=1, D=64, softcap=30.0)
    forward, _, dq, dkdv = compile_call(make_inputs(case, torch.bfloat16), target)
    assert all("tanh.approx.f32" in kernel.asm["ptx"] for kernel in (forward, dq, dkdv))
    assert not any(
        "tanh.approx" in kernel.asm["ptx"] for kernel in compile_call(make_inputs(case, torch.float32), target)
    )


def test_lengths_do_not_recompile():
    """Fifty lengths share their kernels; Triton itself tells lengths that divide by 16 from others."""
    found = {}
    for length in range(100, 150):
        for kernel in compile_call(
            make_inputs(Case("any", Sq=length, H=1, D=16, mask=(CAUSAL,)), torch.bfloat16), "sm_90"
        ):
            found.setdefault(kernel.metadata.name, set()).add(kernel.hash)
    assert len(found) == 4
    assert max(map(len, found.values())) <= 2


def test_a_triton_with_one_assembler_is_taken_as_it_is(monkeypatch):
    old, new = (SimpleNamespace(version=version, path="") for version in ("12.8", "13.0"))
    for tools, expected in (
        ({"ptxas": new}, new),
        ({"ptxas": old}, None),
        ({"ptxas": old, "ptxas_blackwell": new}, new),
    ):
        monkeypatch.setattr(triton.knobs, "nvidia", SimpleNamespace(**tools))
        assert assembler.sound_ptxas() is expected


def test_an_unsound_assembler_is_refused_on_hopper(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(assembler, "sound_ptxas", lambda: None)
    assert "ptxas is older than 12.9" in dispatch._no_triton.__wrapped__()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert dispatch._no_triton.__wrapped__() is None
