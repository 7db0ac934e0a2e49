"""The backward kernels for Hopper compile for sm_90 as they are meant to. No GPU is needed; nothing runs."""

import re

import pytest
import torch
from compiling import SHARED_BYTES, TUNED, compile_hopper_backward, product_loops, serialized, spilled_bytes

from tilewise.backends.base import Needs
from tilewise.backends.device.lower import FAR
from tilewise.backends.gluon import elsewhere
from tilewise.backends.gluon.descriptors import as_boxes
from tilewise.testing import Case, bind, make_inputs

CAUSAL = ("causal",)
#: Every config: narrow tiles of 128 and of 64 rows, wide ones; modifiers, which take other tiles; packed sequences, groups.
CASES = [
    Case("causal_d64", B=1, Sq=512, H=2, D=64, mask=(CAUSAL,)),
    Case("causal_d128", B=1, Sq=512, H=4, Hkv=2, D=128, mask=(CAUSAL,)),
    Case("causal_d256", B=1, Sq=512, H=2, D=256, mask=(CAUSAL,)),
    Case("full_d96", B=1, Sq=512, H=2, D=96),
    Case("document_d128", B=1, Sq=512, H=4, Hkv=2, D=128, mask=(("document", "BS", True), CAUSAL)),
    Case("blocks_d64", B=1, Sq=512, H=4, Hkv=2, D=64, mask=(("blocks", 128, 128, "HQK"), CAUSAL)),
    Case("blocks_d256", B=1, Sq=512, H=2, D=256, mask=(("blocks", 64, 64, "HQK"), CAUSAL)),
    Case("softcap_d64", B=1, Sq=500, H=2, D=64, softcap=4.0, mask=(("window", 100, 9),)),
    Case("varlen_d128", lengths_q=(160, 75), lengths_k=(190, 140), H=4, Hkv=2, D=128, softcap=4.0, alibi="BH", sinks=True,
         mask=(("window", 100, 9), ("chunk", 96), ("prefix", 30))),
]  # fmt: skip
#: Bytes that a kernel may keep in local memory, outside the loops without masking but for one number: what its epilogue
#: needs again, and where lists go on.
SPILLED = 240
SPILLED_BY = {"blocks_d64": 252}
#: Notes of ptxas that serialise nothing: a wait or an arrival put in.
HARMLESS = re.compile(r"\(C751[79]\)")
#: With Triton 3.9, with which dispatch does not take these kernels, too few registers are left for products side by side.
UNTUNED_SERIALIZED = ("causal_d128", "document_d128", "blocks_d64")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_hopper_backward_compiles(case):
    prepare, kernel, finish, repair = compile_hopper_backward(make_inputs(case, torch.bfloat16))
    for each in (prepare, kernel, finish, repair):
        assert each.metadata.shared <= SHARED_BYTES["sm_90"], each.name
    for each in (prepare, finish):
        assert spilled_bytes(each) == 0, each.name
    if TUNED or case.name not in UNTUNED_SERIALIZED:
        assert not [note for note in serialized(kernel) if not HARMLESS.search(note)]
    loops = sorted(product_loops(kernel), key=len)
    assert len(loops) == 4  # with and without masking, of each consumer
    if not TUNED:
        return
    assert spilled_bytes(kernel) <= SPILLED_BY.get(case.name, SPILLED)
    for loop in loops[:2]:
        assert sum("LDL" in x or "STL" in x for x in loop) <= 1
        assert sum("WARPGROUP.DEPBAR" in x for x in loop) <= 5  # the kernel's own waits for products, no more


def test_numbers_do_not_recompile():
    """Lengths, batch sizes and numbers of heads share their kernels, as long as heads have keys of their own."""
    hashes = {}
    for S, H, B in ((512, 4, 1), (1024, 16, 1), (2048, 2, 2)):
        inputs = make_inputs(Case("any", B=B, Sq=S, H=H, D=64, mask=(CAUSAL,)), torch.bfloat16)
        for kernel in compile_hopper_backward(inputs):
            hashes.setdefault(kernel.metadata.name, set()).add(kernel.hash)
    assert {name: len(found) for name, found in hashes.items()} == dict.fromkeys(hashes, 1)


def test_what_the_kernel_lacks_is_computed_elsewhere():
    plain = Needs(True, True, True, False, False, False)
    inputs = make_inputs(CASES[0], torch.bfloat16)
    assert not elsewhere(bind(inputs), plain)
    assert elsewhere(bind(inputs), plain._replace(dslopes=True))
    inputs.options["deterministic"] = True
    assert elsewhere(bind(inputs), plain)


@pytest.mark.parametrize("strides", [(32, 2**29, 16, 1), (2**24 * 6 + 1, 2**24, 2**23, 1), (0, 32, 16, 1)])
def test_rows_far_apart_are_copied(strides):
    """Kernels around the main one count in 32 bits inside a tile."""
    x = as_boxes(torch.empty_strided((2, 6, 2, 16), strides, dtype=torch.bfloat16, device="meta"))
    assert x.shape == (2, 6, 2, 16) and 0 < x.stride(-3) < FAR and x.stride(0) > 0
    many_heads = as_boxes(torch.empty(1, 130, 70_000, 256, dtype=torch.bfloat16, device="meta"))
    assert many_heads.stride(-3) == 256
