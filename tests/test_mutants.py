"""The comparison rule has power: a backend with one planted fault fails it, the same backend without a fault passes.

Cases are those that real backends run in test_conformance.py.
"""

import pytest
import torch
from cases import BF16, CASES, FP32
from torch_backend import TorchBackend

from tilewise import dispatch
from tilewise.testing import assert_matches_reference

BY_NAME = {case.name: case for case in CASES}
BOTH = (FP32, BF16)

#: Each fault with a case that exercises it and the precisions in which it is a fault.
FAULTS = {
    "one_key_more": ("gqa4", BOTH),
    "last_key_unseen": ("gqa4", BOTH),
    "first_key_unseen": ("window", BOTH),
    "last_partial_block_skipped": ("gqa4", BOTH),
    "top_left": ("gqa4", BOTH),
    "blind_rows_average": ("causal_rows_without_keys", BOTH),
    "zero_times_masked": ("document", BOTH),
    "scale_off_by_1_percent": ("magnitude_5", BOTH),
    "no_rescale": ("gqa4", BOTH),
    "no_rescale_of_the_sum": ("gqa4", BOTH),
    "lse_base_2": ("gqa4", BOTH),
    "lse_without_max": ("gqa4", BOTH),
    "q_in_16_bits": ("gqa4", (FP32,)),
    "p_in_16_bits": ("gqa4", (FP32,)),
    "accumulator_in_16_bits": ("many_tiles", (FP32,)),
    "heads_interleaved": ("gqa4", BOTH),
    "group_sum_of_last_head": ("gqa4", BOTH),
    "group_mean": ("gqa4", BOTH),
    "no_delta": ("gqa4", BOTH),
    "no_dlse": ("gqa4", BOTH),
    "dlse_with_other_sign": ("gqa4", BOTH),
    "dq_without_scale": ("gqa4", BOTH),
    "dk_without_scale": ("gqa4", BOTH),
    "last_rows_give_no_dk": ("gqa4", BOTH),
    "last_keys_give_no_dq": ("gqa4", BOTH),
    "no_softcap": ("softcap", BOTH),
    "no_softcap_derivative": ("softcap", BOTH),
    "slopes_of_first_sequence": ("alibi_per_sequence", BOTH),
    "dslopes_with_other_sign": ("alibi", BOTH),
    "bias_of_first_sequence": ("bias_full", BOTH),
    "dbias_of_one_sequence": ("bias_per_head", BOTH),
    "no_sink": ("sinks", BOTH),
    "sink_twice": ("sinks", BOTH),
    "dsinks_with_other_sign": ("sinks", BOTH),
    "other_dropout_mask": ("dropout", BOTH),
    "dropout_before_the_sum": ("dropout", BOTH),
    "dropout_without_division": ("dropout", BOTH),
    "dp_without_dropout": ("dropout", BOTH),
    "dv_without_dropout": ("dropout", BOTH),
    "seqused_ignored": ("varlen_seqused", BOTH),
}
MATRIX = [pytest.param(f, c, d, id=f"{f}-{str(d)[6:]}") for f, (c, dtypes) in FAULTS.items() for d in dtypes]
USED = sorted({case for case, _ in FAULTS.values()} | {"mix_everything", "varlen_mix", "varlen_empty_sequences"})


@pytest.fixture
def planted(monkeypatch):
    """A function that runs the comparison of the named case on a backend with a fault."""

    def compare(fault: str, case: str, dtype: torch.dtype) -> None:
        monkeypatch.setattr(dispatch, "load", lambda name: TorchBackend(fault))
        assert_matches_reference(BY_NAME[case], dtype, backend="cpu")

    return compare


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("case", USED)
def test_the_right_backend_passes(planted, case: str, dtype: torch.dtype):
    planted("", case, dtype)


@pytest.mark.parametrize(("fault", "case", "dtype"), MATRIX)
def test_a_fault_is_rejected(planted, fault: str, case: str, dtype: torch.dtype):
    with pytest.raises(AssertionError, match="repro: "):
        planted(fault, case, dtype)
