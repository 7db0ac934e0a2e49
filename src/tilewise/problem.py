"""Problem: one call without its tensors; and all checks of what a call was given, before any kernel starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.checks import describe
from tilewise.spec import AttentionSpec

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 576  # the largest in use: keys of compressed (latent) attention, 512 and 64 rotary
LARGEST, SMALLEST = 1e30, 1e-30  # magnitudes of scales and caps that leave room in float32


@dataclass(frozen=True)
class Signature:
    """Shape, dtype and device of a tensor: all that checks and dispatch need of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> Signature:
        return cls(t.shape, t.dtype, t.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)} on {self.device}"


@dataclass(frozen=True)
class Problem:
    """One attention call without its tensors."""

    spec: AttentionSpec
    B: int
    H: int
    Hkv: int
    Sq: int  # longest query sequence
    Sk: int  # longest key sequence
    D: int
    Dv: int
    dtype: torch.dtype
    device: str  # "cpu", "cuda", "meta", ...
    total_q: int  # rows of q over all sequences
    total_k: int
    index: int = 0  # of the device among those of its kind

    @property
    def G(self) -> int:
        return self.H // self.Hkv

    @property
    def features(self) -> tuple[str, ...]:
        """The features that this call uses, in the words of the capability table."""
        found = list(self.spec.features)
        if self.G > 1:
            found.append("gqa")
        if self.D != self.Dv:
            found.append("d_ne_dv")
        if self.spec.deterministic:
            found.append("deterministic")
        return tuple(found)


def make_problem(
    q: Signature, k: Signature, v: Signature, aux: Sequence[Signature], spec: AttentionSpec, max_q: int, max_k: int
) -> Problem:
    """Check shapes, dtypes and devices of one call and describe it.

    Raises:
        TypeError: a dtype that is not accepted, or dtypes that differ.
        ValueError: ranks, head counts, sizes or devices that do not fit together.
    """
    _check_qkv(q, k, v, packed=spec.varlen)
    H, D, Hkv, Dv = q.shape[-2], q.shape[-1], k.shape[-2], v.shape[-1]
    _check_heads(H, Hkv, D, Dv)
    named = dict(zip(spec.tensors, aux, strict=False))
    if spec.varlen:
        B = named["cu_seqlens_q"].shape[0] - 1
        Sq, Sk, total_q, total_k = max_q, max_k, q.shape[0], k.shape[0]
    else:
        B, Sq, Sk = q.shape[0], q.shape[1], k.shape[1]
        total_q, total_k = B * Sq, B * Sk
    problem = Problem(spec, B, H, Hkv, Sq, Sk, D, Dv, q.dtype, q.device.type, total_q, total_k, q.device.index or 0)
    _check_tensors(problem, named, q)
    _check_masks(problem, aux[len(spec.tensors) :], q)
    return problem


def _check_qkv(q: Signature, k: Signature, v: Signature, packed: bool) -> None:
    rank, shape = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if len(t.shape) != rank:
            raise ValueError(f"{name} must have {rank} dims {shape}, got {tuple(t.shape)}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, got {t.dtype}")
        if t.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype, got q {q.dtype} and {name} {t.dtype}; cast one of them")
        if t.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {t.device}")
    if tuple(k.shape[:-1]) != tuple(v.shape[:-1]):
        raise ValueError(f"k and v must agree in all dims but the last, got k {tuple(k.shape)} and v {tuple(v.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"q and k must share the head dim, got q {tuple(q.shape)} and k {tuple(k.shape)}")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"q and k must share the batch size, got q {tuple(q.shape)} and k {tuple(k.shape)}")


def _check_heads(H: int, Hkv: int, D: int, Dv: int) -> None:
    if H < 1 or Hkv < 1 or H % Hkv != 0:
        raise ValueError(f"query heads must be a multiple of kv heads (and both >= 1), got {H} and {Hkv}")
    for name, d in (("q and k", D), ("v", Dv)):
        if not 1 <= d <= MAX_HEAD_DIM:
            raise ValueError(f"the head dim of {name} must be in 1..{MAX_HEAD_DIM}, got {d}")


def _check_tensors(problem: Problem, named: dict[str, Signature], q: Signature) -> None:
    B, H = problem.B, problem.H
    full = (B, H, problem.Sq, problem.Sk)
    for name, t in named.items():
        if t.device != q.device and name != "seed":
            raise ValueError(f"{name} must be on {q.device} like q, got {t}")
        if name in ("bias", "alibi_slopes", "sinks") and t.dtype not in DTYPES:
            raise TypeError(f"{name} must be floating point (boolean masks go to `mask`), got {t}")
    if (bias := named.get("bias")) is not None:
        _check_broadcast("bias", bias, full)
    if (slopes := named.get("alibi_slopes")) is not None and tuple(slopes.shape) not in ((H,), (B, H)):
        raise ValueError(f"alibi_slopes must be (H,) = ({H},) or (B, H) = ({B}, {H}), got {tuple(slopes.shape)}")
    if (sinks := named.get("sinks")) is not None and tuple(sinks.shape) != (H,):
        raise ValueError(f"sinks must be (H,) = ({H},), got {tuple(sinks.shape)}")
    for name in ("cu_seqlens_k", "seqused_q", "seqused_k"):
        length = B + 1 if name.startswith("cu") else B
        if (t := named.get(name)) is not None and tuple(t.shape) != (length,):
            raise ValueError(f"{name} must have {length} entries to fit cu_seqlens_q, got {tuple(t.shape)}")


def _check_broadcast(name: str, t: Signature, full: tuple[int, ...]) -> None:
    if len(t.shape) > 4 or any(s not in (1, f) for s, f in zip(t.shape[::-1], full[::-1], strict=False)):
        raise ValueError(f"{name} must broadcast to (B, H, Sq, Sk) = {full}, got {tuple(t.shape)}")


def _check_masks(problem: Problem, aux: Sequence[Signature], q: Signature) -> None:
    B, H, Sq, Sk = problem.B, problem.H, problem.Sq, problem.Sk
    used = 0
    for term in problem.spec.mask:
        tensors = aux[used : used + term.tensors]
        used += term.tensors
        for t in tensors:
            if t.device != q.device:
                raise ValueError(f"the tensors of the {term.name} mask must be on {q.device} like q, got {t}")
        if term.name == "dense":
            _check_broadcast("a dense mask", tensors[0], (B, H, Sq, Sk))
        elif term.name == "blocks":
            block_m, block_n = term.params
            tiles = (B, H, math.ceil(Sq / block_m), math.ceil(Sk / block_n))
            shape = (1,) * (4 - len(tensors[0].shape)) + tuple(tensors[0].shape)
            if shape[2:] != tiles[2:] or shape[0] not in (1, B) or shape[1] not in (1, H):
                raise ValueError(
                    f"the Blocks pattern must be {tiles[2:]}, {tiles[1:]} or {tiles} (ceil(Sq / block_m) by "
                    f"ceil(Sk / block_n) tiles), got {tuple(tensors[0].shape)}"
                )
        elif term.name == "prefix" and tensors and tuple(tensors[0].shape) != (B,):
            raise ValueError(f"Prefix length must be an int or (B,) = ({B},), got {tuple(tensors[0].shape)}")
        elif term.name == "document":
            _check_document(problem, tensors[0].shape, term.params[0])


def _check_document(problem: Problem, ids_shape: Sequence[int], length_k: int) -> None:
    if problem.spec.varlen:
        raise ValueError(
            "a Document mask needs the dense layout: in attention_varlen cu_seqlens separate the documents"
        )
    batch, length_q = ids_shape
    if length_q != problem.Sq or length_k != problem.Sk or batch not in (1, problem.B):
        raise ValueError(
            f"Document ids must cover (B, Sq) = ({problem.B}, {problem.Sq}) queries and (B, Sk) = ({problem.B}, "
            f"{problem.Sk}) keys, got ({batch}, {length_q}) and ({batch}, {length_k})"
        )


def check_number(value: Any, what: str, low: float = 0.0, high: float = LARGEST) -> float:
    """A finite float with ``low <= value < high`` that float32 kernels can hold; 0-dim tensors are accepted."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{what} gets no gradient: detach it, or apply a learnable factor to q instead")
    if isinstance(value, (str, bytes, bool)):
        raise TypeError(f"{what} must be a number, got {describe(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, got {describe(value)}") from None
    if number != number or not low <= number < high:  # NaN differs from itself; math.isfinite breaks dynamic compile
        raise ValueError(f"{what} must be finite and in [{low}, {high}), got {number}")
    if number != 0 and -SMALLEST < number < SMALLEST and what != "dropout_p":
        raise ValueError(f"{what} must be 0 or at least {SMALLEST} in magnitude, got {number}")
    return number


def check_cu_seqlens(name: str, cu_seqlens: Any, total: int, max_seqlen: int | None, used: Tensor | None) -> int:
    """Check the values of one cu_seqlens (on the CPU, where reading them is free) and return the longest sequence.

    On other devices only shapes are checked, since reading values would stall the device: there `max_seqlen` is required.
    """
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dim() != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(f"{name} must be a 1-D int32 tensor [0, l0, l0 + l1, ...], got {describe(cu_seqlens)}")
    if len(cu_seqlens) < 1:
        raise ValueError(f"{name} must hold at least the entry 0, got an empty tensor")
    if cu_seqlens.device.type != "cpu" or not _readable(cu_seqlens):
        if max_seqlen is None:
            raise ValueError(
                f"max_seqlen is required with {name} on {cu_seqlens.device}, and under torch.compile and vmap: reading the "
                "longest length from the tensor would stall the device or break the graph"
            )
        return max_seqlen
    values = cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(values)]
    if values[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{name} must start at 0 and never decrease, got {_head(values)}")
    if values[-1] > total:
        raise ValueError(f"{name} ends at {values[-1]}, but only {total} rows were given")
    if used is not None:
        _check_used(name, used, lengths)
    longest = max(lengths, default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"max_seqlen for {name} is {max_seqlen}, but its longest sequence has {longest} rows")
    return longest if max_seqlen is None else max_seqlen


def _check_used(name: str, used: Any, lengths: list[int]) -> None:
    ints = isinstance(used, Tensor) and used.dtype in (torch.int32, torch.int64)
    if not ints or used.shape != (len(lengths),):
        raise ValueError(f"seqused for {name} must be an int32 tensor ({len(lengths)},), got {describe(used)}")
    values = used.tolist()
    if any(not 0 <= u <= length for u, length in zip(values, lengths, strict=True)):
        raise ValueError(
            f"seqused for {name} must be in 0..length of each sequence, got {_head(values)} of {_head(lengths)}"
        )


def _readable(t: Tensor) -> bool:
    """Whether reading values is possible: not under torch.compile, fake tensors or torch.func.vmap."""
    if type(t) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_batchedtensor(t)  # pyright: ignore[reportAttributeAccessIssue]


def _head(values: list[int]) -> str:
    return str(values) if len(values) <= 10 else f"[{', '.join(map(str, values[:10]))}, ...]"
