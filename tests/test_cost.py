"""The account of `tilewise.cost` against brute force, over every mask of the case list."""

import dataclasses

import pytest
import torch
from cases import CASES

import tilewise
from tilewise import cost, reference
from tilewise.plan import FULL, MASKED, SKIPPED, tile_plan
from tilewise.problem import Problem
from tilewise.spec import AttentionSpec, MaskTerm
from tilewise.testing import Case, bind, make_inputs, problem_of

# All but the cases d1, d3, ..., which differ in their head dim only.
NAMED = [pytest.param(c, id=c.name) for c in CASES if not c.name.removeprefix("d").isdigit()]
BLOCK_M, BLOCK_N = 16, 24


def _visible(inputs, bound):
    """The (heads, rows, keys) of each sequence that the reference sees."""
    found = []
    for q, k, batch in reference.parts(inputs.q, inputs.k, bound):
        found += list(reference.scores(q, k, bound, batch)[1])
    return found


def _tiles(visible, block_m, block_n):
    """Every tile of one head's (rows, keys), with its indices."""
    for i, rows in enumerate(visible.split(block_m)):
        for j, tile in enumerate(rows.split(block_n, dim=1)):
            yield i, j, tile


def _brute_force(inputs, bound, problem):
    """The counts of `Cost`, one tile at a time from the plan of each sequence and head."""
    pairs = loads = rows_loaded = 0
    kinds = dict.fromkeys((FULL, MASKED, SKIPPED), 0)
    for b, visible in enumerate(_visible(inputs, bound)):
        for h in range(problem.H):
            sizes = {"max_q": problem.Sq, "max_k": problem.Sk} if inputs.varlen else {}
            plan = tile_plan(bound, inputs.q.shape, inputs.k.shape, BLOCK_M, BLOCK_N, **sizes, b=b, h=h)
            assert (plan.Sq, plan.Sk) == tuple(visible.shape[1:])
            for i, j, tile in _tiles(visible[h], plan.block_m, plan.block_n):
                kind = int(plan.grid[i, j]) if tile.numel() else SKIPPED
                kinds[kind] += tile.numel() > 0
                if kind == SKIPPED:
                    assert not tile.any(), "a tile with visible pairs is skipped"
                    continue
                assert kind == MASKED or tile.all(), "a tile called full needs the mask"
                pairs, loads, rows_loaded = pairs + tile.numel(), loads + tile.shape[1], rows_loaded + tile.shape[0]
    return pairs, loads, rows_loaded, kinds


@pytest.mark.parametrize("case", NAMED)
def test_counts_match_brute_force(case):
    inputs = make_inputs(case)
    bound, problem = bind(inputs), problem_of(inputs)
    found = cost.cost(problem, bound, (), BLOCK_M, BLOCK_N)
    visible = sum(int(v.sum()) for v in _visible(inputs, bound))
    pairs, loads, rows_loaded, kinds = _brute_force(inputs, bound, problem)
    assert found.visible_pairs == visible
    assert found.visited_pairs == pairs
    assert found.tiles == (kinds[FULL], kinds[MASKED], kinds[SKIPPED])
    D, Dv = problem.D, problem.Dv
    assert (found.forward.flops, found.backward.flops) == (visible * 2 * (D + Dv), visible * 2 * (3 * D + 2 * Dv))
    assert (found.forward.visited_flops, found.backward.visited_flops) == (
        pairs * 2 * (D + Dv),
        pairs * 2 * (3 * D + 2 * Dv),
    )
    assert found.standard_backward.visited_flops == 2 * found.standard_forward.visited_flops
    if bound.bias is None and "dense" not in problem.features:
        rows = problem.total_q * problem.H
        assert found.forward.bytes_read == rows * D * 4 + loads * (D + Dv) * 4 + 8 * rows
        assert found.forward.bytes_written == rows * (Dv * 4 + 4)
        accumulated = (rows + rows_loaded) * D * 4 + problem.total_k * problem.Hkv * (D + Dv) * 4 + rows * 4
        assert found.backward.bytes_written == accumulated


@pytest.mark.parametrize("case", NAMED)
def test_saved_bytes_are_what_autograd_keeps(case):
    saved = []
    for dtype in case.dtypes[-2:]:
        inputs = make_inputs(case, dtype)
        q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        call = tilewise.attention_varlen if inputs.varlen else tilewise.attention
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            call(q, k, v, **inputs.options)
        found = tilewise.explain(q, k, v, **inputs.options).cost.memory.saved
        assert found == sum(t.numel() * t.element_size() for t in saved)


def test_flops_of_plain_attention_are_the_papers():
    B, S, H, D = 2, 256, 4, 64
    q = torch.zeros(()).expand(B, S, H, D)
    found = tilewise.explain(q, q, q).cost
    assert found.forward.flops == 4 * S * S * D * H * B
    assert found.backward.flops == 2.5 * found.forward.flops
    causal = tilewise.explain(q, q, q, causal=True).cost
    assert causal.forward.flops == 4 * (S * (S + 1) // 2) * D * H * B


def test_gqa_reads_keys_once_per_query_head_and_saves_them_once():
    q, k = torch.zeros(()).expand(1, 64, 8, 16), torch.zeros(()).expand(1, 64, 2, 16)
    grouped, plain = tilewise.explain(q, k, k).cost, tilewise.explain(q, q, q).cost
    assert grouped.forward == plain.forward
    assert plain.memory.saved - grouped.memory.saved == 2 * 6 * 64 * 16 * 4


def _problem(n, dtype=torch.float32, H=4, masked=False):
    spec = AttentionSpec((MaskTerm("causal", (None,), 0),) if masked else ())
    return Problem(spec, 1, H, H, n, n, 64, 64, dtype, "cpu", n, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", [0, 1, 2, 8])
def test_memory_is_linear_and_standard_is_quadratic(dtype, workers):
    one, two = (cost.memory(_problem(n, dtype), 0, workers) for n in (4096, 8192))
    assert [b / a for a, b in zip(one, two)] == [2.0, 2.0, 2.0]
    one, two = (cost.standard_memory(_problem(n, dtype)) for n in (4096, 8192))
    assert [b / a for a, b in zip(one[1:], two[1:])] == [4.0, 4.0]
    assert (
        cost.standard_memory(_problem(64, dtype, masked=True)).saved - cost.standard_memory(_problem(64, dtype)).saved
        == 64 * 64
    )


@pytest.mark.parametrize("standard", [True, False])
def test_out_of_memory_point_is_the_last_that_fits(standard):
    memory = 1 << 30
    n = cost.out_of_memory_point(_problem(1), memory, standard)

    def needed(length):
        problem = _problem(length)
        extra = cost.standard_memory(problem) if standard else cost.memory(problem, 0, cost.workers_of(problem))
        return 2 * cost.tensor_bytes(problem) + extra.peak_backward

    assert needed(n) <= memory < needed(n + 1)


def test_tile_masks_bring_their_own_tiles():
    inputs = make_inputs(Case("blocks", Sq=60, Sk=60, mask=(("blocks", 8, 4),)))
    plan = tile_plan(bind(inputs), inputs.q.shape, inputs.k.shape, 32, 32)
    assert (plan.block_m, plan.block_n, tuple(plan.grid.shape)) == (8, 4, (8, 15))


def test_account_is_frozen():
    inputs = make_inputs(Case("plain"))
    found = cost.cost(problem_of(inputs), bind(inputs))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.visible_pairs = 0
