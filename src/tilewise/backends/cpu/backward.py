"""The backward pass: a job owns a chunk of keys of one kv head, so its gradients need no atomics and no fixed order."""

# Numba passes the first argument of intrinsics itself.
# pyright: reportCallIssue=false

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.base import Grads, Needs

from .blocks import K_LEN, K_START, Q_LEN, SEQ_COLUMNS, bind_scratch, block_rows, set_block, tile_entries, tile_entry
from .configs import BwdConfig
from .gradients import backward_tile, set_gradient_lane
from .host import call_lanes
from .key_tiles import forget_tiles, tile_sizes, tile_slots, tiles_between
from .launch import (
    FORMATS,
    Launch,
    ScratchLayout,
    compile_kernel,
    lane_sizes,
    last_dim_dense,
    matrix_strides,
    round_up,
    shared_fields,
    stride_fields,
    thread_count,
)
from .memory import get_i64, get_real, put_real, record_at, take_ticket
from .panels import fill_vectors, scale_vectors, scatter_panel, unpack_tile
from .plan import Plan
from .products import delta_pass, end_products, pack_query_panel, pack_rows, start_products
from .simd import Lanes, element_bytes, inlined, operand_bytes, panel_width
from .structs import BACKWARD_ARGS

BALANCED = 0.85  # share of the threads' time that is work, at least, when the keys are cut into chunks
MOST_CHUNKS = 16  # per thread and group
PARTIAL_BYTES = 200 << 20  # of dq in all chunks, at most: memory stays linear whatever the number of threads


@inlined
def pack_block(lanes, a, s, panels):
    """Q and dO of the block, as query panels for the scores and as rows for dK and dV."""
    columns, size = panel_width(lanes), element_bytes(lanes)
    rows = panels * columns
    for p in range(panels):
        lane, operand = p * columns, p * columns * operand_bytes(lanes)
        query, gradient = s.q_t + operand * a.dim_padded, s.do_t + operand * a.value_dim_padded
        pack_query_panel(lanes, query, s.lane_q + lane * 8, a.code, a.dim, a.dim_padded, a.query_scale)
        pack_query_panel(lanes, gradient, s.lane_do + lane * 8, a.code, a.value_dim, a.value_dim_padded, 1.0)
        pack_query_panel(lanes, s.o_t, s.lane_o + lane * 8, a.code, a.value_dim, a.value_dim_padded, 1.0)
        delta_pass(lanes, gradient, s.o_t, a.value_dim, s.lane_delta + lane * size)
    pack_rows(lanes, s.q, a.block_m, s.lane_q, rows, a.code, a.dim, a.dim_padded)
    pack_rows(lanes, s.do, a.block_m, s.lane_do, rows, a.code, a.value_dim, a.value_dim_padded)


@inlined
def finish_block(lanes, a, s, b, chunk, first_head, first, count, panels):
    """Store dq; add the block's share of the slopes' gradients."""
    columns, size = panel_width(lanes), element_bytes(lanes)
    for p in range(panels if a.dq != 0 else 0):
        dq = s.dq_t + p * columns * a.dim_padded * size
        scale_vectors(lanes, dq, a.dim * columns, a.softmax_scale)
        scatter_panel(lanes, dq, s.lane_dq + p * columns * 8, a.dq_code, a.dim)
    if a.dslopes != 0:
        row = a.dslopes + chunk * a.dslopes_chunk + b * a.heads_kv * a.group * size
        for head in range(first_head, first_head + a.pack):
            share = 0.0
            for t in range(count):
                if get_i64(s.lane_head, t) == head:
                    share += get_real(lanes, s.lane_dslope, t)
            put_real(lanes, row, head, get_real(lanes, row, head) - share)


@inlined
def backward_block(lanes, a, s, b, first_head, i, chunk, chunk_start, chunk_end):
    """Block i of the query rows of `pack` heads against the chunk's keys."""
    columns = panel_width(lanes)
    first, count = block_rows(a, i, get_i64(a.seq, b * SEQ_COLUMNS + Q_LEN) * a.pack)
    if count <= 0:
        return
    panels, low, high = set_block(lanes, a, s, b, first_head, first, count)
    rows = panels * columns
    for t in range(rows):
        packed = first + min(t, count - 1)
        set_gradient_lane(lanes, a, s, b, chunk, t, packed // a.pack, first_head + packed % a.pack, t < count)
    fill_vectors(lanes, s.lane_dslope, rows, 0.0)
    fill_vectors(lanes, s.dq_t, rows * a.dim_padded, 0.0)
    low, high = max(low, chunk_start), min(high, chunk_end)
    keep_delta = a.delta != 0 and chunk == 0
    if low < high or keep_delta:
        pack_block(lanes, a, s, panels)
    if keep_delta:
        for t in range(count):
            put_real(lanes, a.delta, get_i64(s.lane_index, t), get_real(lanes, s.lane_delta, t))
    if low < high:
        entry, last_entry = tile_entries(a, b, first_head, i)
        for e in range(entry, last_entry):
            start, end, whole = tile_entry(lanes, a, e, low, high)
            use_keep = a.keep != 0 and not whole
            first_tile, last_tile = tiles_between(a, start, end)
            for tile in range(first_tile, last_tile):
                n0, n1 = max(start, tile * a.block_n), min(end, (tile + 1) * a.block_n)
                backward_tile(lanes, a, s, b, first_head // a.group, n0, n1, chunk_start, panels, use_keep)
    finish_block(lanes, a, s, b, chunk, first_head, first, count, panels)


@inlined
def backward_chunk(lanes, a, s, b, head_kv, chunk):
    """All query rows of one kv head against one chunk of its keys; dk and dv are rounded once, at the end."""
    bounds = a.chunk_bounds + (b * (a.chunks + 1) + chunk) * 8
    start, end = get_i64(bounds, 0), get_i64(bounds, 1)
    if a.dk != 0:
        fill_vectors(lanes, s.dk, a.chunk_rows * a.dim_padded, 0.0)
    if a.dv != 0:
        fill_vectors(lanes, s.dv, a.chunk_rows * a.value_dim_padded, 0.0)
    for first_head in range(head_kv * a.group, (head_kv + 1) * a.group, a.pack):
        for i in range(a.blocks):
            backward_block(lanes, a, s, b, first_head, i, chunk, start, end)
    token = get_i64(a.seq, b * SEQ_COLUMNS + K_START) + start
    if a.dk != 0:
        dk = a.dk + b * a.dk_b + token * a.dk_s + head_kv * a.dk_h
        unpack_tile(lanes, s.dk, a.chunk_rows, end - start, dk, a.dk_s, a.code, a.dim, a.softmax_scale)
    if a.dv != 0:
        dv = a.dv + b * a.dv_b + token * a.dv_s + head_kv * a.dv_h
        unpack_tile(lanes, s.dv, a.chunk_rows, end - start, dv, a.dv_s, a.code, a.value_dim, 1.0)


@functools.cache
def backward_kernel(lanes: Lanes):
    """The compiled backward pass for one accumulation type and vector width."""

    def kernel(address):
        """p = exp(s - lse), ds = p (dp - delta), dq = scale ds k, dk = scale ds^T q, dv = p^T do.

        A job is a chunk of keys of a group: the (sequence, kv head) pairs whose bias gradient is one and the same.
        """
        a = record_at(address, BACKWARD_ARGS)
        s = bind_scratch(a, take_ticket(address + 8))
        forget_tiles(a, s)
        start_products(lanes)
        job = take_ticket(address)
        while job < a.jobs:
            group, chunk = job // a.chunks, job % a.chunks
            for member in range(a.member_batches * a.member_heads):
                b = group // a.groups_h * a.member_batches + member // a.member_heads
                head_kv = group % a.groups_h * a.member_heads + member % a.member_heads
                backward_chunk(lanes, a, s, b, head_kv, chunk)
            job = take_ticket(address)
        end_products(lanes)

    return compile_kernel(kernel, f"{lanes.name} backward")


def weight_sizes(lanes: Lanes, panels: int, block_n: int) -> dict[str, int]:
    """Bytes of P^T and dS^T of a block against a key tile: of all panels, or of one and all of them rounded."""
    panel = block_n * lanes.panel
    if lanes.products == "fma":
        return dict.fromkeys(("score", "grad"), panels * panel * lanes.bits // 8)
    rounded = panels * panel * lanes.operand_bytes
    sizes = {"score": panel * lanes.bits // 8, "grad": panel * lanes.bits // 8}
    return sizes | {"p_rows": rounded, "ds_rows": rounded, "ds_pairs": rounded}


@functools.lru_cache(256)
def backward_layout(lanes: Lanes, block_m: int, block_n: int, dim: int, value_dim: int, chunk_rows: int, slots: int):
    """Scratch of one backward thread."""
    real, operand = lanes.bits // 8, lanes.operand_bytes
    tiles = tile_sizes(lanes, slots, block_n, dim, value_dim)
    return ScratchLayout(
        lane_sizes(lanes, block_m)
        | tiles
        | {"k_t_slots": tiles["k_slots"] if lanes.products == "amx" else 0}
        | weight_sizes(lanes, block_m // lanes.panel, block_n)
        | dict.fromkeys(("extra", "slope"), block_n * lanes.panel * real)
        | {"o_t": lanes.panel * value_dim * operand, "dq_t": block_m * dim * real}
        | dict.fromkeys(("q_t", "q"), block_m * dim * operand)
        | dict.fromkeys(("do_t", "do"), block_m * value_dim * operand)
        | {"k_bad": 8 * block_n, "trash": max(dim, value_dim) * 8}
        | {"dk": chunk_rows * dim * real, "dv": chunk_rows * value_dim * real}
    )


def chunk_count(groups: int, threads: int, max_k: int, block_n: int, dq_bytes: int) -> int:
    """The fewest chunks per group that keep the threads busy: each chunk costs a partial dq of `dq_bytes`."""
    most = min(MOST_CHUNKS * -(-threads // max(groups, 1)), max_k // block_n, PARTIAL_BYTES // max(dq_bytes, 1))
    most = max(most, 1)
    for chunks in range(1, most + 1):
        jobs = groups * chunks
        if jobs >= BALANCED * round_up(jobs, threads):
            return chunks
    return most


def chunk_bounds(plan: Plan, chunks: int, key_rows: Sequence[int]) -> np.ndarray:
    """(B, chunks + 1) keys: each sequence's key rows cut so that every chunk is seen by equally many rows."""
    bounds = np.zeros((len(key_rows), chunks + 1), np.int64)
    bounds[:, -1] = key_rows
    if chunks == 1:
        return bounds
    lo, hi, seq = plan.lo.numpy(), plan.hi.numpy(), plan.seq.numpy()
    for b, keys in enumerate(key_rows):
        rows = slice(b * plan.bounds_stride + seq[b, 0], b * plan.bounds_stride + seq[b, 0] + seq[b, 1])
        starts, ends = (np.bincount(x[rows], minlength=keys + 1)[: keys + 1] for x in (lo, np.maximum(lo, hi)))
        work = np.cumsum(np.cumsum(starts - ends))
        shares = work[-1] * np.arange(1, chunks) / chunks
        bounds[b, 1:-1] = np.minimum(np.searchsorted(work, shares) + 1, keys)
    return bounds


def broadcast_size(bias: Tensor) -> list[int]:
    """The bias's shape with 1 for every dim along which it is broadcast."""
    return [1 if stride == 0 else size for size, stride in zip(bias.shape, bias.stride(), strict=True)]


def group_fields(batch: int, heads_kv: int, bias: Tensor | None) -> dict[str, int]:
    """How (sequence, kv head) pairs form groups: pairs that add to the same bias gradient belong together."""
    sizes = (batch, heads_kv) if bias is None else broadcast_size(bias)[:2]
    member_batches, member_heads = max(batch, 1) if sizes[0] == 1 else 1, heads_kv if sizes[1] == 1 else 1
    return {"member_batches": member_batches, "member_heads": member_heads, "groups_h": heads_kv // member_heads}


def gradient_fields(buffers: Grads, dims: int, bias: Tensor | None) -> dict[str, int]:
    """Strides of the gradients' buffers; dq has `dims` dims, or one more where keys come in chunks."""
    fields = {}
    if buffers.dq is not None:
        size = buffers.dq.element_size()
        chunked = buffers.dq.dim() > dims
        fields |= stride_fields("dq", buffers.dq[0] if chunked else buffers.dq)
        fields |= {"dq_chunk": buffers.dq.stride(0) * size if chunked else 0, "dq_code": FORMATS[buffers.dq.dtype]}
    for name in ("dk", "dv"):
        if (buffer := getattr(buffers, name)) is not None:
            fields |= stride_fields(name, buffer)
    if buffers.dslopes is not None:
        fields["dslopes_chunk"] = buffers.dslopes.stride(0) * buffers.dslopes.element_size()
    if buffers.dbias is not None and bias is not None:
        fields |= matrix_strides("dbias", buffers.dbias[0].expand(bias.shape))
        fields["dbias_chunk"] = buffers.dbias.stride(0) * buffers.dbias.element_size() if len(buffers.dbias) > 1 else 0
    return fields


def allocate(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, plan: Plan, needs: Needs, chunks: int, device: str = "cpu"
) -> Grads:
    """Buffers for the kernel to fill, those of dq, dbias and dslopes by chunk.

    Rows of a packed tensor that belong to no sequence keep their zeros.
    """
    new = torch.zeros if q.dim() == 3 else torch.empty
    heads, batch, bias, dbias = q.size(-2), plan.seq.size(0), plan.bias, None
    dq_shape, dq_dtype = (q.shape, q.dtype) if chunks == 1 else ((chunks, *q.shape), lse.dtype)
    if needs.dbias:
        assert bias is not None
        partials = chunks if bias.stride(3) == 0 else 1  # chunks own their keys, unless the bias has none
        dbias = lse.new_zeros((partials, *broadcast_size(bias)), device=device)
    return Grads(
        dq=new(dq_shape, dtype=dq_dtype, device=device) if needs.dq else None,
        dk=new(k.shape, dtype=k.dtype, device=device) if needs.dk else None,
        dv=new(v.shape, dtype=v.dtype, device=device) if needs.dv else None,
        dbias=dbias,
        dslopes=lse.new_zeros((chunks, batch, heads), device=device) if needs.dslopes else None,
        dsinks=torch.zeros_like(lse, device=device) if needs.dsinks else None,
    )


def sink_gradient(plan: Plan, lse: Tensor, delta: Tensor) -> Tensor:
    """dsinks[h] = -sum over rows of exp(sink - lse) delta."""
    assert plan.sinks is not None
    sinks = plan.sinks.view(-1, 1)
    shares = torch.where(lse == -math.inf, 0.0, torch.exp(sinks - lse) * delta)
    return -(shares.sum(-1) if shares.dim() == 2 else shares.sum((0, 2)))


class Prepared(NamedTuple):
    """What calls with the same plan, shapes and strides share."""

    launch: Launch
    chunks: int
    bounds: np.ndarray  # the launch knows only its address


def prepare(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, plan: Plan, needs: Needs, lanes: Lanes,
    threads: int,
) -> Prepared:  # fmt: skip
    """The launch of all calls with this plan, these needs and tensors of these shapes and strides."""
    batch, heads_kv, config = plan.seq.size(0), k.size(-2), BwdConfig()
    block_m = max(config.block_m // lanes.panel, 1) * lanes.panel
    groups = group_fields(batch, heads_kv, plan.bias if needs.dbias else None)
    jobs = batch * heads_kv // (groups["member_batches"] * groups["member_heads"])
    chunks = chunk_count(jobs, threads, plan.max_k, config.block_n, q.numel() * lse.element_size())
    key_rows = plan.seq[:, K_LEN].tolist() if q.dim() == 3 else [k.size(1)] * batch
    bounds = chunk_bounds(plan, chunks, key_rows)
    longest = max(key_rows, default=0) if chunks == 1 else int(np.diff(bounds).max(initial=0))
    chunk_rows = longest + lanes.grad_step  # the micro-kernels' last keys may lie beyond the end

    fields = shared_fields(q, k, v, o, plan, lanes, block_m, config.block_n) | stride_fields("do", do) | groups
    fields |= gradient_fields(allocate(q, k, v, lse, plan, needs, chunks, device="meta"), q.dim(), plan.bias)
    fields |= {"chunks": chunks, "chunk_bounds": bounds.ctypes.data, "chunk_rows": chunk_rows, "jobs": jobs * chunks}
    dims = fields["dim_padded"], fields["value_dim_padded"]
    if fields["blocks"] > 1:
        tiles = longest // config.block_n + 2  # a chunk may begin and end within a tile
        fields["slots"] = tile_slots(lanes, min(tiles, fields["key_tiles"]), sum(dims), config.block_n)
    layout = backward_layout(lanes, fields["block_m"], config.block_n, *dims, chunk_rows, fields["slots"])
    return Prepared(Launch(backward_kernel(lanes), BACKWARD_ARGS, fields, layout, threads), chunks, bounds)


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    plan: Plan,
    needs: Needs,
    lanes: Lanes | None = None,
) -> Grads:
    """Run the backward kernel.

    Args:
        do, dlse: gradients of o and lse; None means zero.
        q, k, v, plan: as in `forward`; o, lse: what it returned.
        needs: which gradients to return.

    Returns:
        The gradients; dbias has size 1 along dims where the bias has stride 0, dslopes is (B, H).
    """
    do = torch.zeros_like(o) if do is None else do
    do, q, k, v, o = map(last_dim_dense, (do, q, k, v, o))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    lanes = call_lanes(q.dtype, lanes)
    threads = thread_count(10.0 * q.numel() * plan.max_k)
    shapes = q.dtype, q.shape, k.shape, v.shape
    key = (lanes, threads, needs, *shapes, q.stride(), k.stride(), v.stride(), o.stride(), do.stride())
    if (prepared := plan.launches.get(key)) is None:
        prepared = plan.launches[key] = prepare(do, q, k, v, o, lse, plan, needs, lanes, threads)
    launch, chunks, _ = prepared
    buffers = allocate(q, k, v, lse, plan, needs, chunks)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dlse": dlse, **buffers._asdict()}
    tensors["delta"] = tensors.pop("dsinks")  # the kernel leaves delta where the sinks' gradient then comes from
    launch.run(**{name: x.data_ptr() for name, x in tensors.items() if x is not None})

    dq, dk, dv, dbias, dslopes, delta = buffers
    return Grads(
        dq=dq if dq is None or chunks == 1 else dq.sum(0).to(q.dtype),
        dk=dk,
        dv=dv,
        dbias=None if dbias is None else dbias.sum(0),
        dslopes=None if dslopes is None else dslopes.sum(0),
        dsinks=None if delta is None else sink_gradient(plan, lse, delta),
    )
