"""The forward pass: a job is a block of query rows of one kv head; it walks the key tiles with an online softmax."""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

import functools
import math

import torch
from numba import njit
from torch import Tensor

from .blocks import (
    LN2,
    LOG2E,
    Q_LEN,
    SEQ_COLUMNS,
    bind_scratch,
    block_rows,
    panel_keys,
    set_block,
    tile_entries,
    tile_entry,
)
from .configs import FwdConfig, pick_forward
from .host import call_lanes
from .key_tiles import (
    forget_tiles,
    hold_tile,
    key_row,
    rows_to_prefetch,
    tile_sizes,
    tile_slots,
    tiles_between,
    value_row,
)
from .launch import (
    Launch,
    ScratchLayout,
    accumulation_dtype,
    compile_kernel,
    lane_sizes,
    last_dim_dense,
    shared_fields,
    thread_count,
)
from .memory import (
    atomic_max,
    format_bytes,
    get_i64,
    get_real,
    load_scalar,
    put_real,
    record_at,
    take_ticket,
)
from .panels import (
    copy_vectors,
    fill_vectors,
    prefetch_rows,
    scale_panel,
    scatter_panel,
)
from .plan import Plan
from .products import (
    end_products,
    mix_values,
    pack_for_forward,
    pack_query_panel,
    place_for_forward,
    set_bad_values_aside,
    softmax_panel,
    start_products,
)
from .scores import drop, lane_sees, score_panel
from .simd import (
    Lanes,
    element_bytes,
    inlined,
    key_step,
    operand_bytes,
    panel_width,
)
from .structs import FORWARD_ARGS


@inlined
def add_bad_values(lanes, a, s, panel, seen, out, n0, bad, k0, k1):
    """O^T[lane] += p V of the keys whose values hold an Inf or NaN, for the lanes that see them and for no others."""
    columns = panel_width(lanes)
    for i in range(bad):
        n = get_i64(s.v_bad, i)
        if n < k0 or n >= k1:
            continue
        row = get_i64(s.v_rows, n0 % a.block_n + n)
        for lane in range(columns):
            if lane_sees(lanes, seen, n, lane):
                p = get_real(lanes, panel, n * columns + lane)
                for c in range(a.value_dim):
                    value = load_scalar(lanes, row + c * format_bytes(a.code), a.code)
                    put_real(lanes, out, c * columns + lane, get_real(lanes, out, c * columns + lane) + p * value)


@njit
def forward_tile(lanes, a, s, b, head_kv, n0, n1, panels, use_keep):
    """One key tile [n0, n1) against all panels of the block."""
    columns, size, n = panel_width(lanes), element_bytes(lanes), n1 - n0
    _, v_bad = hold_tile(lanes, a, s, b, head_kv, n0, place_for_forward, pack_for_forward)
    bad = 0
    if v_bad:
        step = key_step(lanes)
        bad = set_bad_values_aside(lanes, a, s, (n + step - 1) // step * step)
    # The next tile's rows come from a far cache: they are asked for while this tile is worked on.
    ahead = rows_to_prefetch(a, s, b, head_kv, n1, n)
    next_k, next_v = key_row(a, b, head_kv, n1), value_row(a, b, head_kv, n1)
    for p in range(panels):
        first, last = ahead * p // panels, ahead * (p + 1) // panels
        prefetch_rows(next_k, a.k_s, first, last, a.dim * format_bytes(a.code))
        prefetch_rows(next_v, a.v_s, first, last, a.value_dim * format_bytes(a.code))
        k0, k1, masked = panel_keys(lanes, s, p, n0, n1)
        if k0 >= k1:
            continue
        score_panel(lanes, a, s, p, s.score, 0, n0, n1, k0, k1, masked, use_keep)
        if bad > 0:
            copy_vectors(lanes, s.extra, s.score, k1 * columns)
        at = p * columns * size
        maxima, sums, alphas = s.lane_max + at, s.lane_sum + at, s.lane_alpha + at
        softmax_panel(lanes, s.score, s.pairs, k0, k1, a.score_scale, maxima, sums, alphas)
        drop(lanes, a, s, p, s.score, n0, k0, k1)
        out = s.o_t + at * a.value_dim_padded
        mix_values(lanes, a, s, s.score, out, alphas, k0, k1)
        if bad > 0:
            add_bad_values(lanes, a, s, s.score, s.extra, out, n0, bad, k0, k1)


@inlined
def finish_row(lanes, a, s, t):
    """lse and the factor that normalises the row's output, the sink taken into the sum."""
    top, total = get_real(lanes, s.lane_max, t) * a.score_scale, float(get_real(lanes, s.lane_sum, t))
    head = get_i64(s.lane_head, t)
    if a.max_logit != 0 and top * LN2 > get_real(lanes, a.max_logit, head):
        atomic_max(lanes, a.max_logit, head, top * LN2)
    factor = 1.0
    if a.sinks != 0:
        sink = get_real(lanes, a.sinks, head) * LOG2E
        highest = max(top, sink)
        if highest != -math.inf:
            factor = math.exp((top - highest) * LN2)
            total = total * factor + math.exp((sink - highest) * LN2)
            top = highest
    put_real(lanes, s.lane_alpha, t, 0.0 if total == 0.0 else factor / total)
    lse = -math.inf if total == 0.0 else top * LN2 + math.log(total)
    if a.sinks != 0 and get_real(lanes, s.lane_max, t) == -math.inf:
        lse = get_real(lanes, a.sinks, head)  # exactly: see `set_gradient_lane`
    put_real(lanes, a.lse, get_i64(s.lane_index, t), lse)


@inlined
def forward_block(lanes, a, s, b, first_head, i):
    """Block i of the query rows of `pack` heads: pack, walk the key tiles, normalise, store."""
    columns, size = panel_width(lanes), element_bytes(lanes)
    first, count = block_rows(a, i, get_i64(a.seq, b * SEQ_COLUMNS + Q_LEN) * a.pack)
    if count <= 0:
        return
    panels, low, high = set_block(lanes, a, s, b, first_head, first, count)
    rows = panels * columns
    for p in range(panels):
        query = s.q_t + p * columns * a.dim_padded * operand_bytes(lanes)
        addresses = s.lane_q + p * columns * 8
        pack_query_panel(lanes, query, addresses, a.code, a.dim, a.dim_padded, a.query_scale)
    fill_vectors(lanes, s.lane_max, rows, -math.inf)
    fill_vectors(lanes, s.lane_sum, rows, 0.0)
    fill_vectors(lanes, s.o_t, rows * a.value_dim_padded, 0.0)
    entry, last_entry = tile_entries(a, b, first_head, i)
    for e in range(entry, last_entry):
        start, end, whole = tile_entry(lanes, a, e, low, high)
        use_keep = a.keep != 0 and not whole
        first_tile, last_tile = tiles_between(a, start, end)
        for tile in range(first_tile, last_tile):
            n0, n1 = max(start, tile * a.block_n), min(end, (tile + 1) * a.block_n)
            forward_tile(lanes, a, s, b, first_head // a.group, n0, n1, panels, use_keep)
    for t in range(count):
        finish_row(lanes, a, s, t)
    for p in range(panels):
        out = s.o_t + p * columns * a.value_dim_padded * size
        scale_panel(lanes, out, a.value_dim, s.lane_alpha + p * columns * size)
        scatter_panel(lanes, out, s.lane_o + p * columns * 8, a.code, a.value_dim)


@functools.cache
def forward_kernel(lanes: Lanes):
    """The compiled forward pass for one accumulation type and vector width."""

    def kernel(address):
        """o = softmax(scores(q k^T)) v, lse = log sum exp(scores), max_logit = max(scores)."""
        a = record_at(address, FORWARD_ARGS)
        s = bind_scratch(a, take_ticket(address + 8))
        forget_tiles(a, s)
        start_products(lanes)
        rows_of_b = a.heads_kv * a.group // a.pack
        job = take_ticket(address)
        while job < a.jobs:
            row, part = job // a.parts, job % a.parts  # a row of jobs: all blocks of the heads that share lanes
            b, first_head = row // rows_of_b, row % rows_of_b * a.pack
            for index in range(part * a.part_blocks, min((part + 1) * a.part_blocks, a.blocks)):
                # Under a causal mask the last blocks are the longest: they go first.
                forward_block(lanes, a, s, b, first_head, a.blocks - 1 - index)
            job = take_ticket(address)
        end_products(lanes)

    return compile_kernel(kernel, f"{lanes.name} forward")


@functools.lru_cache(256)
def forward_layout(lanes: Lanes, block_m: int, block_n: int, dim: int, value_dim: int, slots: int):
    """Scratch of one forward thread."""
    real, panel = lanes.bits // 8, block_n * lanes.panel * (lanes.bits // 8)
    return ScratchLayout(
        lane_sizes(lanes, block_m)
        | tile_sizes(lanes, slots, block_n, dim, value_dim)
        | {"v_bad": 8 * block_n, "score": panel, "extra": panel}
        | {"pairs": panel // 2, "mixed": lanes.panel * value_dim * real}
        | {
            "q_t": block_m * dim * lanes.operand_bytes,
            "o_t": block_m * value_dim * real,
            "trash": max(dim, value_dim) * real,
        }
    )


@functools.lru_cache(256)
def forward_config(jobs_of_a_row: int, rows: int, dim: int, threads: int, lanes: Lanes) -> FwdConfig:
    """The measured default, with shorter blocks where there would be too few jobs to share."""
    config = pick_forward(dim)
    block_m = max(config.block_m // lanes.panel, 1) * lanes.panel
    while block_m > lanes.panel and jobs_of_a_row * -(-rows // block_m) < 4 * threads:
        block_m = (block_m // lanes.panel + 1) // 2 * lanes.panel
    return FwdConfig(block_m, config.block_n)


def job_fields(rows_of_jobs: int, blocks: int, threads: int) -> dict[str, int]:
    """The blocks of the heads that share lanes, cut into jobs: no more than give every thread enough to share.

    The longer a thread stays with a head, the fewer times its keys are packed.
    """
    parts = min(blocks, -(-4 * threads // max(rows_of_jobs, 1))) if threads > 1 else 1
    part_blocks = -(-blocks // max(parts, 1))
    parts = -(-blocks // max(part_blocks, 1))
    return {"parts": parts, "part_blocks": part_blocks, "jobs": rows_of_jobs * parts}


def prepare(q: Tensor, k: Tensor, v: Tensor, o: Tensor, plan: Plan, lanes: Lanes, threads: int) -> Launch:
    """The launch of all calls with this plan and tensors of these shapes and strides."""
    batch, heads, largest_dim = plan.seq.size(0), q.size(-2), max(q.size(-1), v.size(-1))
    config = forward_config(batch * heads, plan.max_q, largest_dim, threads, lanes)
    fields = shared_fields(q, k, v, o, plan, lanes, config.block_m, config.block_n)
    fields |= job_fields(batch * heads // fields["pack"], fields["blocks"], threads)
    dims = fields["dim_padded"], fields["value_dim_padded"]
    if fields["part_blocks"] > 1:
        fields["slots"] = tile_slots(lanes, fields["key_tiles"], sum(dims), config.block_n)
    layout = forward_layout(lanes, fields["block_m"], config.block_n, *dims, fields["slots"])
    return Launch(forward_kernel(lanes), FORWARD_ARGS, fields, layout, threads)


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor | None = None, lanes: Lanes | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        q, k, v: (B, S, H, D) or packed (total, H, D), any strides; q, k share D, v has its own.
        plan: the lowered call.
        out: where to write o: contiguous along its last dim, of q's dtype; allocated where None.
        lanes: accumulation type and vector width; this machine's where None.

    Returns:
        o, lse (natural logarithm), max_logit (H,): the largest visible score of each head; (0,) where not asked for.
    """
    q, k, v = map(last_dim_dense, (q, k, v))
    real = accumulation_dtype(q.dtype)
    lanes = call_lanes(q.dtype, lanes)
    (*outer, rows, heads, dim), value_dim, batch = q.shape, v.size(-1), plan.seq.size(0)
    packed = not outer
    o = torch.empty((*outer, rows, heads, value_dim), dtype=q.dtype, device="cpu") if out is None else out
    lse = torch.empty((heads, rows) if packed else (batch, heads, rows), dtype=real, device="cpu")
    max_logit = torch.full((heads if plan.max_logit else 0,), -math.inf, dtype=real, device="cpu")
    if packed:  # rows between sequences belong to no job
        o.zero_()
        lse.fill_(-math.inf)
    threads = thread_count(4.0 * batch * heads * plan.max_q * plan.max_k * dim)
    key = (lanes, threads, q.dtype, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), o.stride())
    if (launch := plan.launches.get(key)) is None:
        launch = plan.launches[key] = prepare(q, k, v, o, plan, lanes, threads)
    q_at, k_at, v_at, o_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    launch.run(q=q_at, k=k_at, v=v_at, o=o_at, lse=lse.data_ptr(), max_logit=max_logit.data_ptr())
    return o, lse, max_logit
