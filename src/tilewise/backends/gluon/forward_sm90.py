"""The forward pass on Hopper (FlashAttention-3, algorithms 1 and 2): a producer warp, two or three consumer warpgroups.

One program for each multiprocessor stays and takes one tile of query rows after the other.
"""

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import Lowered, per_row, strided, visit
from tilewise.backends.device.order import heads_together, multiprocessors
from tilewise.backends.device.structs import Interval
from tilewise.masks import Document
from tilewise.tiles import cdiv

from .configs import SHORT, ForwardConfig, forward_config, listed_config, options, padded
from .descriptors import parted_boxes
from .forward_consumer import Shared, consume
from .forward_producer import ROWS, produce, words
from .pipeline import barriers_ready, make_queue, make_ring, make_tiles
from .repair import repair_noted

_launcher = Launcher()


@gluon.jit(do_not_specialize=["heads", "group", "tiles", "together", "all_heads", "D", "DV"])
def forward_kernel(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, o_desc, o_tail, q, k, v, o, lse, max_logit, counter, lengths, interval,
    visit, scoring, sinks, heads, group, tiles, together, all_heads, D, DV, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """o = softmax(scores(q k^T)) v, lse = log sum exp(scores), max_logit = max(scores).

    Programs draw their work from `counter`, if any, which begins as 0. Behind it each item is given the number of the one that
    its program had before it, or -1, in case that some are to be repaired.
    """
    GROUPS: gl.constexpr = CFG.groups
    queries = make_ring(q_desc, q_tail, CFG.query_stages, 1)
    keys = make_ring(k_desc, k_tail, CFG.stages, GROUPS)
    values = make_ring(v_desc, v_tail, CFG.stages, GROUPS)
    out = queries.tiles if CFG.shares_out else make_tiles(o_desc, GROUPS)
    if o_tail is None:
        out_tails = None
    elif CFG.shares_out:
        out_tails = queries.tails
    else:
        out_tails = make_tiles(o_tail, GROUPS)
    ITEM: gl.constexpr = words(GROUPS, visit is not None or interval.low is not None, visit is not None)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    noted = gl.allocate_shared_memory(gl.int32, [GROUPS + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for g in gl.static_range(GROUPS):
        noted.index(g).store(gl.full([1], 0, gl.int32, ONE))
    shared = Shared(make_queue(ITEM, GROUPS), queries, keys, values, out, out_tails, noted)
    barriers_ready()
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (produce, (q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, lse, counter, lengths, interval, visit, shared, heads,
                       group, tiles, together, all_heads, CFG)),
        ], [4, 1], [CFG.registers, CFG.producer_registers])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (consume, (0, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (consume, (2, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (produce, (q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, lse, counter, lengths, interval, visit, shared, heads,
                       group, tiles, together, all_heads, CFG)),
        ], [4, 4, 1], [CFG.registers, CFG.registers, CFG.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (consume, (1, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (consume, (2, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (consume, (3, o_desc, o_tail, lse.data, max_logit, interval, visit, scoring, sinks, shared, CFG)),
            (produce, (q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, lse, counter, lengths, interval, visit, shared, heads,
                       group, tiles, together, all_heads, CFG)),
        ], [4, 4, 4, 1], [CFG.registers, CFG.registers, CFG.registers, CFG.producer_registers])  # fmt: skip
    last_place = gl.program_id(0)
    if counter is not None:
        last_place = gl.max(noted.index(GROUPS).load(ONE), 0)
    for g in range(GROUPS):
        if gl.max(noted.index(g).load(ONE), 0) > 0:
            repair_noted(
                q, k, v, o, lse, counter, last_place, g, lengths, interval, scoring, heads, group, tiles, together, all_heads,
                D, DV, BLOCK_D, BLOCK_DV, GROUPS,
            )  # fmt: skip


def _config(D: int, DV: int, call: Lowered) -> ForwardConfig:
    if call.lists_tiles:
        return listed_config(D, DV, call.scoring.block_n or 0)
    bounds = call.interval
    if any(isinstance(mask, Document) for mask in call.bound.interval_masks):  # most are much shorter than the sequence
        return replace(forward_config(D, DV, SHORT, False, call.scoring.scale is None), draws=True)
    even = not call.varlen and bounds == Interval()
    plain = not call.varlen and call.scoring.scale is None and bounds == Interval(right=bounds.right)
    return forward_config(D, DV, call.lengths.max_k, even, plain, diagonal(call) if plain else 0)


def diagonal(call: Lowered) -> int:
    """Rows, 128 or 64, such that the last keys of rows 0, 128 and so on begin a tile of so many keys; 0: no such number.

    With 64, rows that begin at a multiple of 64 have one key tile at most that needs a mask, their last one. With 128, rows
    from 128 i to 128 i + 63 see no more than half of it, too: for that no row may see keys beyond the last one.
    """
    lengths, right = call.lengths, call.interval.right
    if call.varlen or right is None or call.interval != Interval(right=right):
        return 0
    last = right + (lengths.max_k - lengths.max_q) * lengths.aligned  # that row 0 sees
    if last % 128 == 0 and lengths.max_q + last <= lengths.max_k:
        return 128
    return 64 if last % 64 == 0 else 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Lowered, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        q, k, v: (B, S, H, D) or packed (total, H, D), as `descriptors.as_boxes` makes them; q, k share D, v has its own.
        call: the lowered call.
        config: the measured one where None.

    Returns:
        o, lse (natural logarithm), max_logit (H,): the largest visible score of each head; (0,) where not asked for.
    """
    D, DV, G = q.shape[-1], v.shape[-1], call.H // k.shape[-2]
    config = config or _config(D, DV, call)
    o = q.new_empty((*q.shape[:-1], DV))
    lse = q.new_empty(call.lse_shape, dtype=torch.float32)
    asked = call.bound.spec.max_logit
    max_logit = lse.new_full((call.H,), -float("inf")) if asked else lse.new_empty(0)
    if call.varlen:  # rows between sequences belong to no program
        o.zero_()
        lse.fill_(-float("inf"))
    tiles = cdiv(call.lengths.max_q, config.block_m)
    items, programs = tiles * call.B * call.H, multiprocessors(q.device)
    if config.draws and items <= programs:  # one for each program: nothing to draw
        config = replace(config, draws=False)
    counter = torch.full((1 + items,), 0, dtype=torch.int32, device=q.device) if config.draws else None
    descriptors = (
        *parted_boxes(q, ROWS.value),
        *parted_boxes(k, config.block_n),
        *parted_boxes(v, config.block_n),
        *parted_boxes(o, ROWS.value),
    )
    args = (
        *descriptors, strided(q), strided(k), strided(v), strided(o), per_row(lse), max_logit if asked else None, counter,
        call.lengths, call.interval, visit(call, config.block_m, config.block_n), call.scoring, call.sinks, call.H, G, tiles,
        heads_together(call, call.lengths.max_k, k, v, G), call.B * call.H, D, DV, padded(D), padded(DV),
        config,
    )  # fmt: skip
    key = (call.kind, layout_key(q, k, v), config)
    _launcher.start(forward_kernel, key, min(items, programs), args, options(config))
    return o, lse, max_logit
