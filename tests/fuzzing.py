"""Random problems in two draws: a `Structure`, which decides what code a kernel has, then many `Case`s of it.

A GPU kernel takes seconds to compile and microseconds to run, so there many problems have to share their kernels. Triton
compiles one kernel for integers that divide by 16 and another for those that do not (and for 1): where that counts,
`sizes` keeps all integers of a structure on one side, whatever products of them are strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from tilewise.testing import Case

ALIGNS = st.sampled_from((None, "bottom_right", "top_left"))
DENSITIES = st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0))
STRIDES = st.sampled_from(("contiguous", "transposed", "sliced", "expanded", "reversed"))
LONGEST = {"any": 150, "odd": 240, "sixteens": 240}
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Structure:
    """Everything of a problem that is not lengths, limits, scales or values."""

    dtype: torch.dtype
    sizes: str  # "any", or only "odd" ones, or "sixteens"
    varlen: bool
    used: tuple[bool, bool]
    B: int | None  # None: more than one, drawn for each problem
    H: int
    Hkv: int
    D: int
    Dv: int
    intervals: tuple[tuple, ...]  # recipes of masks without their numbers
    tiles: tuple[tuple, ...]
    softcap: bool
    scaled: bool
    alibi: str | None
    bias: str | None
    sinks: bool
    dropout: float
    strides: str
    constants: bool = False  # bias and slopes get no gradients: other kernels run without them


def numbers(sizes: str, low: int = 0, high: int = 150) -> st.SearchStrategy[int]:
    """Integers of a kind: "any" in low..high, or "odd" ones from 3 and "sixteens" from 0 or 16."""
    if sizes == "odd":
        return st.integers(1, (high - 1) // 2).map(lambda n: 2 * n + 1)
    if sizes == "sixteens":
        return st.integers(-(-low // 16), high // 16).map(lambda n: 16 * n)
    return st.integers(low, high)


def _broadcast(of: str) -> st.SearchStrategy[str]:
    """Dims of a tensor that broadcasts to `of`: some replaced by 1, leading ones dropped."""
    kept = st.tuples(*(st.sampled_from((d, "1")) for d in of)).map("".join)
    return st.builds(lambda dims, start: dims[start:], kept, st.integers(0, len(of) - 1))


def _interval_recipes(align: str | None, varlen: bool) -> st.SearchStrategy[list[tuple]]:
    side = st.sampled_from((None, "side"))
    options = [
        st.just(("causal", align)),
        st.tuples(st.just("window"), side, side, st.just(align)),
        st.just(("chunk", "size")),
        st.sampled_from((("prefix", "length"), ("prefix", "B"))),
    ]
    if not varlen:
        options.append(st.tuples(st.just("document"), st.sampled_from(("S", "BS"))))
    return st.lists(st.one_of(options), max_size=2)


def _tile_recipes() -> st.SearchStrategy[list[tuple]]:
    sizes = st.sampled_from((8, 16, 24, 64))
    blocks = st.tuples(st.just("blocks"), sizes, sizes, st.sampled_from(("QK", "HQK", "BHQK")))
    dense = st.tuples(st.just("dense"), _broadcast("BHQK"))
    return st.lists(st.one_of(blocks, dense), max_size=2)


@st.composite
def structures(
    draw, dtypes: tuple[torch.dtype, ...], sizes: tuple[str, ...] = ("any",), dims: st.SearchStrategy[int] | None = None
) -> Structure:
    """Structures of all masks and modifiers, in these dtypes, kinds of sizes and head dims (default 1 to 40)."""
    varlen, align, dims = draw(st.booleans()), draw(ALIGNS), st.integers(1, 40) if dims is None else dims
    group, Hkv, D = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(dims)
    kind = draw(st.sampled_from(sizes))
    return Structure(
        dtype=draw(st.sampled_from(dtypes)),
        sizes=kind,
        varlen=varlen,
        used=(draw(st.booleans()), draw(st.booleans())) if varlen else (False, False),
        B=None if kind == "any" else draw(st.sampled_from((None, None, 1))),
        H=group * Hkv,
        Hkv=Hkv,
        D=D,
        Dv=draw(st.one_of(st.just(D), dims)),
        intervals=tuple(draw(_interval_recipes(align, varlen))),
        tiles=tuple(draw(_tile_recipes())),
        softcap=draw(st.sampled_from((False, False, True))),
        scaled=draw(st.booleans()),
        alibi=draw(st.sampled_from((None, None, "H", "BH"))),
        bias=draw(st.one_of(st.none(), _broadcast("BHQK"))),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.7))),
        strides=draw(STRIDES),
    )


@st.composite
def problems(draw, of: Structure) -> Case:
    """Problems of one structure."""
    limits = {"side": numbers(of.sizes, 0, 90), "size": numbers(of.sizes, 1, 70), "length": numbers(of.sizes, 0, 150)}
    masks = [tuple(draw(limits[x]) if x in limits else x for x in recipe) for recipe in of.intervals]
    return Case(
        H=of.H,
        Hkv=of.Hkv,
        D=of.D,
        Dv=of.Dv,
        mask=(*masks, *((*recipe, draw(DENSITIES)) for recipe in of.tiles)),
        softcap=draw(st.sampled_from((0.5, 5.0, 50.0))) if of.softcap else None,
        softmax_scale=draw(st.sampled_from((1.0, 0.05))) if of.scaled else None,
        alibi=of.alibi,
        bias=of.bias,
        sinks=of.sinks,
        dropout=of.dropout,
        strides=of.strides,
        magnitude=draw(st.sampled_from((1.0, 3.0))),
        poison=draw(st.booleans()),
        needs=("q", "k", "v", "sinks") if of.constants else None,
        **(_packed_sizes(draw, of) if of.varlen else _dense_sizes(draw, of)),
    )


def _dense_sizes(draw, of: Structure) -> dict:
    some = of.sizes == "any"
    lengths = numbers(of.sizes, 0 if some else 16, LONGEST[of.sizes])
    B = draw(st.integers(0, 3) if some else st.integers(2, 4)) if of.B is None else of.B
    return {"B": B, "Sq": draw(lengths), "Sk": draw(lengths)}


def _packed_sizes(draw, of: Structure) -> dict:
    sizes: dict = {}
    spare = draw(st.integers(0, 2))
    if of.sizes == "any":
        pairs = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=4))
    else:  # the longest sequences are what kernels are told
        longest = [draw(numbers(of.sizes, 16, LONGEST[of.sizes] // 2)) for _ in "qk"]
        count = draw(st.integers(1, 4)) if of.B is None else 0
        pairs = [tuple(draw(st.integers(0, n)) for n in longest) for _ in range(count)]
        pairs.insert(draw(st.integers(0, count)), tuple(longest))
        while any((sum(lengths) + spare) % 16 == 0 for lengths in zip(*pairs, strict=True)):
            spare += 1  # rows in all: kernels are told these, too
    sizes["spare"] = spare
    sizes["lengths_q"], sizes["lengths_k"] = tuple(q for q, _ in pairs), tuple(k for _, k in pairs)
    for name, of_lengths, used in (("used_q", "lengths_q", of.used[0]), ("used_k", "lengths_k", of.used[1])):
        if used:
            sizes[name] = tuple(draw(st.integers(0, length)) for length in sizes[of_lengths])
    return sizes


def drawn(strategy: st.SearchStrategy, count: int, seed: int) -> list:
    """`count` examples, the same in every process; each from a seed of its own, as hypothesis varies those it has."""
    return [_example(strategy, seed * 10_000 + i) for i in range(count)]


def _example(strategy: st.SearchStrategy, seed: int):
    found: list = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=3, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(strategy)
    def collect(example):
        found.append(example)

    collect()
    return found[-1]  # the first is always the simplest
