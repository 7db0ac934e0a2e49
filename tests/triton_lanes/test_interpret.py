"""The bodies of the Triton kernels, run by Triton's interpreter on the CPU: every feature, forward and every gradient.

TRITON_INTERPRET is read when a kernel is defined: this file needs a process of its own, started with TRITON_INTERPRET=1.
"""

import importlib

import pytest
import torch
import triton
from cases import CASES

import tilewise
from tilewise.backends.base import Needs
from tilewise.backends.device.lower import lower
from tilewise.backends.triton.configs import Config
from tilewise.testing import Case, Inputs, assert_matches_reference, bind, make_inputs

backward = importlib.import_module("tilewise.backends.triton.backward")

assert triton.knobs.runtime.interpret, "run with TRITON_INTERPRET=1"

#: Small problems that together use every feature: the interpreter takes seconds for each.
NAMES = (
    "causal_rows_without_keys", "window", "prefix_per_sequence", "chunk_negative_positions", "document_per_sequence",
    "blocks_per_head", "dense_key_padding", "dense_row_mask", "softcap", "scale_negative", "scale_zero",
    "alibi_per_sequence", "bias_full", "bias_shared", "bias_per_key", "bias_per_row", "bias_scalar", "sinks", "dropout",
    "mix_everything", "varlen_empty_sequences", "varlen_seqused", "varlen_mix", "gqa3_short", "dv_larger",
    "no_queries", "no_queries_bias", "no_keys_sink", "batch_of_none", "varlen_no_sequences", "reversed", "needs_k_bias",
    "needs_slopes", "softcap_unseen_keys", "softcap_saturated_large", "sinks_rows_without_keys",
    "one_key_each", "one_key_each_softcap",
)  # fmt: skip
CHOSEN = [case for case in CASES if case.name in NAMES]


def test_every_name_is_a_case():
    assert sorted(case.name for case in CHOSEN) == sorted(NAMES)


@pytest.mark.parametrize("case", CHOSEN, ids=[case.name for case in CHOSEN])
def test_matches_reference(case):
    assert_matches_reference(make_inputs(case, torch.float32), backend="triton")


def test_16_bit():
    """float16 only: Triton 3.6's interpreter multiplies bfloat16 matrices wrongly."""
    case = Case("16_bit", B=1, Sq=70, Sk=90, H=2, Hkv=1, D=24, mask=(("causal",),), dropout=0.2, softcap=5.0)
    assert_matches_reference(make_inputs(case, torch.float16), backend="triton")


TURNED = (
    "window", "document_per_sequence", "blocks_per_head", "dense_row_mask", "gqa3_short", "varlen_empty_sequences",
    "varlen_mix", "mix_everything",
)  # fmt: skip
FULL = [
    Case("full", Sq=90, Sk=70, H=2, Hkv=1, D=20),
    Case("full_varlen", lengths_q=(60, 0, 35), lengths_k=(70, 9, 30), H=2, D=16),
    Case("causal", Sq=90, Sk=70, H=2, D=16, mask=(("causal",),)),
]


APART = Config(16, 32, owned=2, turned=True), Config(16, 16, owned=1, turned=True)  # dv in a kernel of its own
TOGETHER = APART[0], APART[0]


@pytest.mark.parametrize(
    ("case", "of_dk", "of_dv"),
    [(case, *TOGETHER) for case in CASES if case.name in TURNED] + [(case, *APART) for case in FULL],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_walks_begin_anywhere(case, of_dk, of_dv, monkeypatch):
    monkeypatch.setattr(backward, "backward_configs", lambda *_: (APART[0], of_dk, of_dv))
    assert_matches_reference(make_inputs(case, torch.float32), backend="triton")


def test_turned_sums_are_the_same_at_each_call():
    q, k, v, do = torch.randn(4, 1, 96, 1, 16)
    call = lower(q, k, bind(Inputs(q, k, v, {})), 0, 0)
    needs = Needs(False, False, True, False, False, False)

    def dv(turned):
        configs = (Config(16, 16, turned=turned),) * 3
        return backward.backward(do, None, q, k, v, q, torch.zeros(1, 1, 96), call, needs, configs).dv

    straight, turned = dv(False), dv(True)
    assert torch.equal(turned, dv(True))
    assert torch.equal(turned[:, :16], straight[:, :16])  # the first key tile begins at the first rows
    assert not torch.equal(turned, straight)
    torch.testing.assert_close(turned, straight)


HUGE = 2**31 - 1


@pytest.mark.parametrize(("Sq", "Sk"), [(40, 16), (16, 40)])
@pytest.mark.parametrize("recipe", [
    ("window", 3, HUGE), ("window", HUGE, 3), ("window", HUGE - 50, HUGE - 50), ("prefix", HUGE), ("chunk", HUGE),
])  # fmt: skip
def test_limits_near_the_largest_of_32_bits(recipe, Sq, Sk):
    assert_matches_reference(Case(B=1, Sq=Sq, Sk=Sk, H=1, mask=(recipe,)), torch.float32, backend="triton")


def test_upstream_gradients_of_any_strides():
    """`lse.sum().backward()` and `o.sum().backward()` bring gradients that are one number, expanded."""
    q, k, v = (torch.randn(2, 20, 2, 16) for _ in range(3))
    do, dlse = torch.ones(()).expand(2, 20, 2, 16), torch.ones(()).expand(2, 2, 20)
    assert_matches_reference(Inputs(q, k, v, {"causal": True}, do=do, dlse=dlse), backend="triton")


@pytest.mark.parametrize("Sq", [1, 40])
@pytest.mark.parametrize("bias", [-1e4, -1e30])
def test_nan_behind_a_mask_beside_large_scores(Sq, bias):
    """Rows beside it are summed again: with the same weights, which 2^(score - lse) is not where one ulp of lse is large."""
    q, k, v = torch.randn(1, Sq, 4, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16)
    mask = torch.arange(40) != 3
    options = {"mask": mask.expand(Sq, 40), "bias": torch.full((Sq, 1), bias), "backend": "triton"}
    clean = tilewise.attention(q, k, v, **options)
    v[:, 3] = torch.nan
    torch.testing.assert_close(tilewise.attention(q, k, v, **options), clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poisoned", ["q", "do"])
def test_nan_of_a_row_reaches_the_keys_that_it_sees(poisoned):
    """Not dk of the others in their tile, which multiplies the row by 0; nor does NaN in q reach dv of those."""
    q, k, v, do = (torch.randn(1, 40, 1, 16) for _ in range(4))

    def gradients():
        x, y, z = (t.clone().requires_grad_() for t in (q, k, v))
        tilewise.attention(x, y, z, causal=True, backend="triton").backward(do)
        return x.grad, y.grad, z.grad

    clean = gradients()
    {"q": q, "do": do}[poisoned][0, 20, 0, 3] = torch.nan
    dq, dk, dv = gradients()
    assert dk[:, :21].isnan().all()
    assert dv[:, :21, :, 3].isnan().all()
    rows = torch.arange(40) != 20
    torch.testing.assert_close(dq[:, rows], clean[0][:, rows])
    torch.testing.assert_close(dk[:, 21:], clean[1][:, 21:])
    if poisoned == "q":
        torch.testing.assert_close(dv[:, 21:], clean[2][:, 21:])
