"""The kernels for few rows over many keys, run by Triton's interpreter: any number of parts gives the same attention.

Like test_interpret.py in a process of its own, with TRITON_INTERPRET=1.
"""

import dataclasses
import importlib

import pytest
import torch
import triton
from cases import DECODE

from tilewise.backends import triton as backend
from tilewise.backends.device.lower import lower
from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import DecodeConfig
from tilewise.testing import Case, Inputs, assert_matches_reference, bind, make_inputs

assert triton.knobs.runtime.interpret, "run with TRITON_INTERPRET=1"

decode = importlib.import_module("tilewise.backends.triton.decode").decode


def _config(splits: int) -> DecodeConfig:
    return DecodeConfig(16, 32, splits=splits)


def _call(q, k, v, **options):
    inputs = Inputs(q, k, v, options)
    return lower(q, k, bind(inputs), 0, 0)


@pytest.fixture
def split_into(monkeypatch):
    """Makes every call of the backend a decode call with so many parts."""

    def force(splits):
        monkeypatch.setattr(backend, "decodes", lambda call, group, dim: True)
        monkeypatch.setattr(backend, "decode", lambda q, k, v, call: decode(q, k, v, call, _config(splits)))

    return force


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", DECODE, ids=[case.name for case in DECODE])
def test_matches_reference(case, splits, split_into):
    split_into(splits)
    inputs = make_inputs(case, torch.float32)
    assert_matches_reference(dataclasses.replace(inputs, needs=()), backend="triton")


@pytest.mark.parametrize("name", ["decode_causal", "decode_window", "decode_sinks", "decode_varlen", "decode_dense"])
def test_more_parts_than_tiles(name, split_into):
    """Most parts are empty, and more of them than the merging kernel reads at one time."""
    split_into(37)
    (case,) = (case for case in DECODE if case.name == name)
    assert_matches_reference(dataclasses.replace(make_inputs(case, torch.float32), needs=()), backend="triton")


def test_gradients_follow_a_split_forward_pass(split_into):
    split_into(3)
    case = Case("gradients", B=1, Sq=3, Sk=70, H=4, Hkv=2, sinks=True, alibi="H", dropout=0.2, mask=(("causal",),))
    assert_matches_reference(make_inputs(case, torch.float32), backend="triton")


def test_16_bit(split_into):
    """float16 only: Triton 3.6's interpreter multiplies bfloat16 matrices wrongly."""
    split_into(3)
    case = Case("16_bit", B=1, Sq=2, Sk=90, H=6, Hkv=2, D=24, softcap=5.0, mask=(("causal",),), needs=())
    assert_matches_reference(make_inputs(case, torch.float16), backend="triton")


@pytest.mark.parametrize("splits", [1, 4])
def test_B65_rows_do_not_depend_on_their_batch(splits):
    """Bit by bit: a sequence alone, in a batch, and packed with sequences of other lengths."""
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 150, 2, 16), torch.randn(3, 150, 2, 16)
    o, lse, _ = decode(q, k, v, _call(q, k, v, causal=True), _config(splits))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 40, 190]))
    packed = tuple(torch.cat([x[0, :n], x[1]]) for x, n in ((q, 1), (k, 40), (v, 40)))
    inputs = Inputs(*packed, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True})
    of_packed, _, _ = decode(*packed, lower(*packed[:2], bind(inputs), 2, 150), _config(splits))
    assert torch.equal(of_packed[1:], o[1])
    for b in range(3):
        alone = q[b : b + 1], k[b : b + 1], v[b : b + 1]
        o_alone, lse_alone, _ = decode(*alone, _call(*alone, causal=True), _config(splits))
        assert torch.equal(o_alone[0], o[b])
        assert torch.equal(lse_alone[0], lse[b])


def test_infinite_values_reach_the_rows_that_see_them(split_into):
    q, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 100, 1, 16), torch.randn(1, 100, 1, 16)
    v[0, 60, 0, 3], v[0, 99, 0, 5] = torch.inf, -torch.inf
    o, _, _ = decode(q, k, v, _call(q, k, v, causal=True), _config(3))
    assert (o[..., 3] == torch.inf).all()
    assert (o[:, 1, :, 5] == -torch.inf).all()
    assert o[:, 0, :, 5].isfinite().all()


def test_which_calls_it_takes(monkeypatch):
    monkeypatch.setattr(configs, "multiprocessors", lambda device: 132)

    def takes(B, Sq, Sk, H, Hkv, D=16):
        q, k = torch.empty(B, Sq, H, 16), torch.empty(B, Sk, Hkv, 16)
        return configs.decodes(_call(q, k, k), H // Hkv, D)

    assert takes(16, 1, 4096, 32, 8)
    assert takes(1, 16, 4096, 8, 8)
    assert not takes(64, 16, 4096, 16, 16)  # programs enough
    assert takes(1, 128, 4096, 32, 8)  # each head's rows would be 32 programs
    assert not takes(1, 128, 4096, 32, 8, D=256)
    assert not takes(1, 128, 2048, 32, 8)  # keys are few
    assert not takes(4, 64, 16384, 32, 8)  # programs enough
