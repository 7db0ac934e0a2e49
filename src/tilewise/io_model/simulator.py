"""Attention executed with a counted memory: every algorithm of `traffic`, tile by tile, on real numbers.

The results must be attention's, and the counts must be the closed formulas of `traffic`, exactly:
`tests/test_io_simulator.py` holds both to it on random problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise import reference
from tilewise.io_model.machine import Array, Call, Chip, Memory, Tile, finite
from tilewise.plan import schedule
from tilewise.problem import Problem
from tilewise.spec import BoundSpec
from tilewise.traffic import FLASH1, FLASH2, FLASH3, OWNED, STANDARD, Algorithm, reads_bounds


@dataclass(frozen=True)
class Executed:
    """What one pass moved, (loads, stores) by tensor, and computed."""

    counts: dict[str, tuple[int, int]]
    chip: Chip


@dataclass(frozen=True)
class Simulation:
    """Both passes and what they gave: o, dq, dk, dv as (heads, total, dim) arrays."""

    forward: Executed
    backward: Executed
    results: dict[str, Array]


def simulate(
    algorithm: Algorithm, problem: Problem, bound: BoundSpec, tensors: Sequence[Tensor], block_m: int, block_n: int
) -> Simulation:
    """Run an algorithm, forward and backward, in tiles of `block_m` rows by `block_n` keys.

    Args:
        algorithm: one of `traffic`.
        problem, bound: the call; of modifiers only a bias; dropout in the dense layout.
        tensors: q, k, v and do in tilewise's layouts, on the CPU.

    Raises:
        ValueError: the call has modifiers that the simulator does not execute, or is packed and standard or with dropout.
    """
    packed = bound.spec.varlen and (algorithm is STANDARD or bound.seed is not None)
    beside = [f for f in problem.features if f in ("softcap", "alibi", "sinks")]
    if beside or packed:
        raise ValueError(f"the simulator does not execute {', '.join(beside) or 'packed sequences like this'}")
    plan = schedule(problem, bound, block_m, block_n)
    memory = _memory(problem, bound, tensors)
    call = Call(problem, plan, bound.softmax_scale, memory, _kept(problem, bound), reads_bounds(problem, bound))
    call.memory.place("bounds", np.stack([plan.bounds.lo.numpy(), plan.bounds.hi.numpy()]))
    if plan.keep is not None:
        call.memory.place("mask", _whole(plan.keep, problem))
    forward, backward = (_execute(call, one_pass) for one_pass in PASSES[algorithm])
    return Simulation(forward, backward, {name: call.memory.arrays[name] for name in ("o", "dq", "dk", "dv")})


def _execute(call: Call, one_pass: Callable[[Call], None]) -> Executed:
    call.begin()
    one_pass(call)
    return Executed(call.memory.counts(), call.chip)


def _memory(problem: Problem, bound: BoundSpec, tensors: Sequence[Tensor]) -> Memory:
    memory = Memory()
    for name, t in zip(("q", "k", "v", "do"), tensors, strict=True):
        memory.place(name, t.detach().double().flatten(0, -3).movedim(0, 1).numpy())
    memory.allocate("o", (problem.H, problem.total_q, problem.Dv))
    memory.allocate("lse", (problem.H, problem.total_q))
    if bound.bias is not None:
        memory.place("bias", _whole(bound.bias.double(), problem))
    return memory


def _kept(problem: Problem, bound: BoundSpec) -> Array | None:
    """Dropout's factor of every pair: 0, or what makes up for the dropped."""
    if bound.seed is None:
        return None
    keep = reference.keep_dropout(bound, torch.arange(problem.B), problem.H, problem.Sq, problem.Sk)
    return keep.numpy() / (1 - bound.spec.dropout_p)


def _whole(t: Tensor, problem: Problem) -> Array:
    return torch.broadcast_to(t, (problem.B, problem.H, problem.Sq, problem.Sk)).numpy()


# ---- standard attention ----


def standard_forward(call: Call) -> None:
    """FlashAttention, algorithm 0: every matrix in memory, each step reads its operands once."""
    memory, chip, p_ = call.memory, call.chip, call.problem
    used = "p" if call.kept is None else "dropped p"
    for name in ("s", "p", "dropped p", "dropout mask"):
        memory.allocate(name, (p_.B, p_.H, p_.Sq, p_.Sk))
    _place_boolean_mask(call)
    for b, hkv, heads, rows, keys in _groups(call):
        k, v = memory.load("k", hkv, keys), memory.load("v", hkv, keys)
        for h in heads:
            memory.store("s", chip.product(memory.load("q", h, rows), k.T), b, h)
            s = chip.each(memory.load("s", b, h) * call.scale)
            if "bias" in memory.arrays:
                s = chip.each(s + memory.load("bias", b, h))
            if p_.spec.mask:
                s = chip.each(np.where(memory.load("mask", b, h), s, -np.inf))
            e = chip.exp(chip.each(s - finite(chip.reduce(_highest, s))))
            total = chip.reduce(np.sum, e)
            memory.store("p", chip.each(e / np.where(total > 0, total, 1)), b, h)
            if call.kept is not None:
                memory.store("dropped p", chip.each(memory.load("p", b, h) * call.kept[b, h]), b, h)
                memory.store("dropout mask", call.kept[b, h], b, h)
            memory.store("o", chip.product(memory.load(used, b, h), v), h, rows)


def standard_backward(call: Call) -> None:
    """Every gradient from matrices in memory; P is there, nothing is recomputed."""
    memory, chip, p_ = call.memory, call.chip, call.problem
    used = "p" if call.kept is None else "dropped p"
    for name, shape in {
        "dp": (p_.B, p_.H, p_.Sq, p_.Sk), "ds": (p_.B, p_.H, p_.Sq, p_.Sk), "dq": (p_.H, p_.total_q, p_.D),
        "dk": (p_.Hkv, p_.total_k, p_.D), "dv": (p_.Hkv, p_.total_k, p_.Dv),
    }.items():  # fmt: skip
        memory.allocate(name, shape)
    for b, hkv, heads, rows, keys in _groups(call):
        k, v = memory.load("k", hkv, keys), memory.load("v", hkv, keys)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for h in heads:
            dv += chip.product(memory.load(used, b, h).T, memory.load("do", h, rows))
            memory.store("dp", chip.product(memory.load("do", h, rows), v.T), b, h)
            if call.kept is not None:
                memory.store("dp", chip.each(memory.load("dp", b, h) * memory.load("dropout mask", b, h)), b, h)
            p, dp = memory.load("p", b, h), memory.load("dp", b, h)
            delta = chip.reduce(np.sum, chip.each(p * dp))
            memory.store("ds", chip.each(chip.each(p * (dp - delta), 2) * call.scale), b, h)
            memory.store("dq", chip.product(memory.load("ds", b, h), k), h, rows)
            dk += chip.product(memory.load("ds", b, h).T, memory.load("q", h, rows))
        memory.store("dk", dk, hkv, keys)
        memory.store("dv", dv, hkv, keys)


def _groups(call: Call):
    """(sequence, kv head, its query heads, rows, keys)."""
    for b, h, rows, keys in call.sequences():
        if h % call.problem.G == 0:
            yield b, h // call.problem.G, range(h, h + call.problem.G), rows, keys


def _place_boolean_mask(call: Call) -> None:
    p_, n = call.problem, np.arange(call.problem.Sk)
    keep = np.zeros((p_.B, p_.H, p_.Sq, p_.Sk), dtype=bool)
    for b, h, _, _ in call.sequences():
        lo, hi = (t.numpy()[:, None] for t in call.schedule.rows(b))
        keep[b, h] = (lo <= n) & (n < hi)
        plan = call.plan(b, h)
        keep[b, h] &= np.repeat(np.repeat(plan.grid.numpy() > 0, plan.block_m, 0), plan.block_n, 1)[: p_.Sq, : p_.Sk]
        if "mask" in call.memory.arrays:
            keep[b, h] &= call.memory.arrays["mask"][b, h]
    call.memory.place("mask", keep)


def _highest(s: Array, axis: int, keepdims: bool) -> Array:
    return np.max(s, axis=axis, keepdims=keepdims, initial=-np.inf)


# ---- forward ----


def rows_outer_forward(call: Call) -> None:
    """FlashAttention-2, algorithm 1."""
    memory, chip, G = call.memory, call.chip, call.problem.G
    for block, tiles in call.row_tiles():
        h, rows = block.h, block.rows
        q, bounds = memory.load("q", h, rows), call.bounds(block)
        row_max = np.full((len(q), 1), -np.inf)
        row_sum, acc = np.zeros((len(q), 1)), np.zeros((len(q), call.problem.Dv))
        for tile in tiles:
            k, v = memory.load("k", h // G, tile.keys), memory.load("v", h // G, tile.keys)
            s = call.scores(tile, q, k, bounds)
            new_max = chip.each(np.maximum(row_max, chip.reduce(np.max, s)))
            alpha = chip.exp(chip.each(row_max - finite(new_max)))
            p = chip.exp(chip.each(s - finite(new_max)))
            row_sum = chip.each(alpha * row_sum + chip.reduce(np.sum, p), 2)
            acc = chip.each(acc * alpha) + chip.product(call.drop(tile, p), v)
            row_max = new_max
        memory.store("o", chip.each(acc / np.where(row_sum > 0, row_sum, 1)), h, rows)
        with np.errstate(divide="ignore"):
            memory.store("lse", chip.each(finite(row_max) + np.log(row_sum), 2)[:, 0], h, rows)


def keys_outer_forward(call: Call) -> None:
    """FlashAttention, algorithm 1, with its m (maximum) and l (sum) of each row."""
    memory, chip, p_ = call.memory, call.chip, call.problem
    o = call.sum_in_memory("o", (p_.H, p_.total_q, p_.Dv))
    memory.allocate("m, l", (p_.H, p_.total_q, 2))
    memory.store("m, l", np.array([-np.inf, 0.0]))
    for _, hkv, keys, group in call.key_tiles():
        for h, tiles in group:
            k, v = memory.load("k", hkv, keys), memory.load("v", hkv, keys)
            for tile in tiles:
                q, o_i = memory.load("q", h, tile.rows), memory.load(o, h, tile.rows)
                m, l = np.split(memory.load("m, l", h, tile.rows), 2, axis=1)
                s = call.scores(tile, q, k, call.bounds(tile))
                m_tile = chip.reduce(np.max, s)
                p = chip.exp(chip.each(s - finite(m_tile)))
                l_tile = chip.reduce(np.sum, p)
                m_new = chip.each(np.maximum(m, m_tile))
                before = chip.exp(chip.each(m - finite(m_new)))
                now = chip.exp(chip.each(m_tile - finite(m_new)))
                l_new = chip.each(before * l + now * l_tile, 3)
                o_i = (before * l) * o_i + now * chip.product(call.drop(tile, p), v)
                memory.store(o, chip.each(o_i / np.where(l_new > 0, l_new, 1), 4), h, tile.rows)
                memory.store("m, l", np.concatenate([m_new, l_new], axis=1), h, tile.rows)
    call.round(o, "o")


# ---- backward ----


def _gradients(
    call: Call, tile: Tile, operands: tuple[Array, ...], stats: Array, delta: Array, m_l: bool = False
) -> tuple[Array, Array]:
    """p (with dropout) and ds of a tile, recomputed from lse (or m and l)."""
    chip, (q, k, v, do) = call.chip, operands
    s = call.scores(tile, q, k, call.bounds(tile), again=True)
    if m_l:
        exponential = chip.exp(chip.each(s - finite(stats[:, :1]), 1, again=True), again=True)
        p = chip.each(exponential / np.where(stats[:, 1:] > 0, stats[:, 1:], 1), 1, again=True)
    else:
        p = chip.exp(chip.each(s - finite(stats), 1, again=True), again=True)
    dp = call.drop(tile, chip.product(do, v.T))
    return call.drop(tile, p), chip.each(chip.each(p * (dp - delta), 2) * call.scale)


def _delta(chip: Chip, o: Array, do: Array) -> Array:
    return chip.reduce(np.sum, chip.each(o * do))


def _read_and_add(memory: Memory, name: str, value: Array, *at: Any) -> None:
    memory.store(name, memory.load(name, *at) + value, *at)


def _keys_outer_backward(
    call: Call, load_statistics: Callable[..., Any], dq: str | None, m_l: bool = False, add: Callable = _read_and_add
) -> None:
    """dk and dv by blocks of keys; dq added to in slow memory, or left out."""
    memory, chip, p_ = call.memory, call.chip, call.problem
    memory.allocate("dk", (p_.Hkv, p_.total_k, p_.D))
    memory.allocate("dv", (p_.Hkv, p_.total_k, p_.Dv))
    for _, hkv, keys, group in call.key_tiles():
        dk, dv = np.zeros((keys.stop - keys.start, p_.D)), np.zeros((keys.stop - keys.start, p_.Dv))
        for h, tiles in group:
            k, v = memory.load("k", hkv, keys), memory.load("v", hkv, keys)
            for tile in tiles:
                q, do = memory.load("q", h, tile.rows), memory.load("do", h, tile.rows)
                stats, delta = load_statistics(h, tile.rows, do)
                p, ds = _gradients(call, tile, (q, k, v, do), stats, delta, m_l)
                dv += chip.product(p.T, do)
                dk += chip.product(ds.T, q)
                if dq is not None:
                    add(memory, dq, chip.product(ds, k), h, tile.rows)
        memory.store("dk", dk, hkv, keys)
        memory.store("dv", dv, hkv, keys)


def summed_backward(call: Call, add: Callable = _read_and_add) -> None:
    """FlashAttention-2, algorithm 2."""
    memory, chip, p_ = call.memory, call.chip, call.problem
    memory.allocate("delta", (p_.H, p_.total_q, 1))
    for block, _ in call.row_tiles():
        o, do = memory.load("o", block.h, block.rows), memory.load("do", block.h, block.rows)
        memory.store("delta", _delta(chip, o, do), block.h, block.rows)
    dq = call.sum_in_memory("dq", (p_.H, p_.total_q, p_.D))

    def load(h: int, rows: slice, _: Array) -> tuple[Array, Array]:
        return memory.load("lse", h, rows)[:, None], memory.load("delta", h, rows)

    _keys_outer_backward(call, load, dq, add=add)
    call.round(dq, "dq")


def reduced_backward(call: Call) -> None:
    """The same where slow memory adds by itself."""
    summed_backward(call, Memory.add)


def flash1_backward(call: Call) -> None:
    """FlashAttention, algorithm 4."""
    memory, p_ = call.memory, call.problem
    dq = call.sum_in_memory("dq", (p_.H, p_.total_q, p_.D))

    def load(h: int, rows: slice, do: Array) -> tuple[Array, Array]:
        return memory.load("m, l", h, rows), _delta(call.chip, memory.load("o", h, rows), do)

    _keys_outer_backward(call, load, dq, m_l=True)
    call.round(dq, "dq")


def owned_backward(call: Call) -> None:
    """tilewise's portable GPU kernels: dk and dv by blocks of keys, then dq by blocks of rows."""
    memory, chip, p_, G = call.memory, call.chip, call.problem, call.problem.G
    memory.allocate("statistics", (p_.H, p_.total_q, 2))
    memory.allocate("dq", (p_.H, p_.total_q, p_.D))
    for block, _ in call.row_tiles():
        at = (block.h, block.rows)
        delta = _delta(chip, memory.load("o", *at), memory.load("do", *at))
        both = np.concatenate([memory.load("lse", *at)[:, None], delta], axis=1)
        memory.store("statistics", chip.each(-both), *at)

    def load(h: int, rows: slice, _: Array) -> tuple[Array, Array]:
        lse, delta = np.split(-memory.load("statistics", h, rows), 2, axis=1)
        return lse, delta

    _keys_outer_backward(call, load, None)
    for block, tiles in call.row_tiles():
        at = (block.h, block.rows)
        q, do = memory.load("q", *at), memory.load("do", *at)
        stats, delta = load(*at, do)
        bounds, dq = call.bounds(block), np.zeros_like(q)
        for tile in tiles:
            k, v = memory.load("k", tile.h // G, tile.keys), memory.load("v", tile.h // G, tile.keys)
            s = call.scores(tile, q, k, bounds, again=True)
            p = chip.exp(chip.each(s - finite(stats), 1, again=True), again=True)
            dp = call.drop(tile, chip.product(do, v.T, again=True), again=True)
            ds = chip.each(chip.each(p * (dp - delta), 2, again=True) * call.scale, 1, again=True)
            dq += chip.product(ds, k)
        memory.store("dq", dq, *at)


PASSES: dict[Algorithm, tuple[Callable[[Call], None], Callable[[Call], None]]] = {
    STANDARD: (standard_forward, standard_backward),
    FLASH1: (keys_outer_forward, flash1_backward),
    FLASH2: (rows_outer_forward, summed_backward),
    FLASH3: (rows_outer_forward, reduced_backward),
    OWNED: (rows_outer_forward, owned_backward),
}
