"""The host side that both passes share: tensors and a plan become an args record, scratch memory and a launch."""

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.core import event
from torch import Tensor

from tilewise.predicates import drop_threshold

from . import memory, pool
from .blocks import LOG2E
from .plan import Plan
from .simd import Lanes
from .structs import SCRATCH_FIELDS, fill

FORMATS = {
    torch.float32: memory.F32,
    torch.bfloat16: memory.BF16,
    torch.float16: memory.F16,
    torch.float64: memory.F64,
    torch.bool: memory.U8,
    torch.uint8: memory.U8,
}
SMALL_FLOPS = 4_000_000  # below, about 50 us of work: waking threads costs more than it saves
KEPT_SCRATCH_BYTES = 16 << 20  # a thread keeps scratch up to this size for its next call

_ZEROS = np.zeros(1024, np.float64)  # a row of zeros for absent queries, as long as the largest head dim
_kept = threading.local()


class _CompileNotice(event.Listener):
    """Says once on stderr that Numba compiles; later processes read the disk cache."""

    def __init__(self):
        self._said = False

    def on_start(self, event):
        if not self._said:
            self._said = True
            print("tilewise: compiling CPU kernels, once per machine ...", file=sys.stderr, flush=True)

    def on_end(self, event):
        pass


def compile_kernel(kernel: Callable) -> Callable[[int], None]:
    """Compile a kernel that takes the address of its args record, or load it from Numba's disk cache."""
    with event.install_listener("numba:compile", _CompileNotice()):
        return njit("void(int64)", nogil=True, cache=True, error_model="numpy")(kernel)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def last_dim_dense(x: Tensor) -> Tensor:
    """`x` with consecutive elements along its last dim: a copy only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def tensor_fields(name: str, x: Tensor) -> dict[str, int]:
    """Address and byte strides along batch, sequence and head; a packed tensor has no batch stride."""
    size = x.element_size()
    strides = x.stride()
    batch, sequence, head = (0, *strides[:2]) if x.dim() == 3 else strides[:3]
    return {name: x.data_ptr(), f"{name}_b": batch * size, f"{name}_s": sequence * size, f"{name}_h": head * size}


def matrix_fields(name: str, x: Tensor) -> dict[str, int]:
    """Address and byte strides of a (B, H, max_q, max_k) tensor."""
    strides = (stride * x.element_size() for stride in x.stride())
    return {name: x.data_ptr(), **{f"{name}_{dim}": stride for dim, stride in zip("bhmn", strides, strict=True)}}


def round_up(x: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below x."""
    return -(-x // multiple) * multiple


def row_index_strides(q: Tensor) -> tuple[int, int]:
    """Strides, in elements, of lse and delta along batch and head: (B, H, Sq), or (H, total_q) for packed q."""
    rows, heads = (q.shape[0], q.shape[1]) if q.dim() == 3 else (q.shape[1], q.shape[2])
    return (0 if q.dim() == 3 else heads * rows), rows


def modifier_fields(plan: Plan, real: torch.dtype) -> dict[str, Any]:
    """Fields of the score modifiers and masks; whatever the plan lacks stays 0."""
    fields: dict[str, Any] = {}
    if plan.softcap is not None:
        # The score panel then holds 2 log2(e) x / softcap, the argument of tanh as `cap_pass` wants it.
        fields.update(cap=plan.softcap * LOG2E, query_scale=plan.softmax_scale * 2 * LOG2E / plan.softcap)
    else:
        fields.update(query_scale=plan.softmax_scale * LOG2E)
    if plan.slopes is not None:
        size = plan.slopes.element_size()
        stride_b, stride_h = plan.slopes.stride()
        fields.update(slopes=plan.slopes.data_ptr(), slopes_b=stride_b * size, slopes_h=stride_h * size)
    if plan.bias is not None:
        fields.update(matrix_fields("bias", plan.bias), bias_code=FORMATS[plan.bias.dtype])
    if plan.keep is not None:
        fields.update(matrix_fields("keep", plan.keep))
    if plan.sinks is not None:
        fields.update(sinks=plan.sinks.data_ptr())
    if plan.dropout_p > 0.0:
        seed = (plan.seed + 2**63) % 2**64 - 2**63  # the same 64 bits as a signed number
        fields.update(drop_threshold=drop_threshold(plan.dropout_p), drop_scale=1 / (1 - plan.dropout_p), seed=seed)
    if plan.tiles is not None:
        offsets, tiles = plan.tiles.offsets, plan.tiles
        fields.update(tile_offsets=offsets.data_ptr(), tile_b=offsets.stride(0) * 8, tile_h=offsets.stride(1) * 8)
        fields.update(tile_starts=tiles.starts.data_ptr(), tile_ends=tiles.ends.data_ptr())
        fields.update(tile_full=tiles.full.data_ptr())
    return fields


def heads_per_block(plan: Plan, group: int) -> int:
    """Query heads of one kv head that share a block's lanes: all of them, unless each has tile lists of its own."""
    return group if plan.tiles is None else 1


def shared_fields(q, k, v, o, lse, plan: Plan, lanes: Lanes, block_m: int, block_n: int) -> dict[str, Any]:
    """All fields that forward and backward have in common, scratch apart."""
    heads, heads_kv = q.shape[-2], k.shape[-2]
    pack = heads_per_block(plan, heads // heads_kv)
    rows = plan.max_q * pack
    span = plan.tiles.block_m if plan.tiles is not None else max(rows, 1)
    block_m = min(block_m, round_up(span, lanes.panel))
    blocks_per_span = -(-span // block_m)
    lse_b, lse_h = row_index_strides(q)
    columns = 2 * lanes.width
    return {
        **{
            name: value
            for pair in zip("qkvo", (q, k, v, o), strict=True)
            for name, value in tensor_fields(*pair).items()
        },
        "code": FORMATS[q.dtype],
        "dim": q.shape[-1],
        "value_dim": v.shape[-1],
        "dim_padded": round_up(q.shape[-1], columns),
        "value_dim_padded": round_up(v.shape[-1], columns),
        "heads_kv": heads_kv,
        "group": heads // heads_kv,
        "pack": pack,
        "softmax_scale": plan.softmax_scale,
        "lse": lse.data_ptr(),
        "lse_b": lse_b,
        "lse_h": lse_h,
        "seq": plan.seq.data_ptr(),
        "lo": plan.lo.data_ptr(),
        "hi": plan.hi.data_ptr(),
        "bounds_stride": plan.bounds_stride,
        "block_m": block_m,
        "block_n": block_n,
        "span": span,
        "blocks_per_span": blocks_per_span,
        "blocks": -(-rows // span) * blocks_per_span,
        "zeros": _ZEROS.ctypes.data,
        **modifier_fields(plan, accumulation_dtype(q.dtype)),
    }


def scratch_layout(sizes: Mapping[str, int]) -> tuple[np.ndarray, int]:
    """(offset of each field, bytes in all) of one thread's scratch; the scratch record itself comes first."""
    offsets, end = [], round_up(8 * len(SCRATCH_FIELDS), 64)
    for name in SCRATCH_FIELDS:
        offsets.append(end)
        end += round_up(sizes.get(name, 0), 64)
    return np.array(offsets, np.int64), end + 64 * 3  # an odd multiple of lines between threads spreads cache sets


def lane_sizes(lanes: Lanes, rows: int) -> dict[str, int]:
    """Bytes of the per-row fields of a block of `rows` lanes."""
    real, integer = lanes.bits // 8, 4
    halves = ("lane_lo", "lane_hi", "lane_first", "lane_second")
    reals = ("lane_m", "lane_slope", "lane_max", "lane_sum", "lane_alpha", "lane_lse", "lane_lse_rest")
    reals += ("lane_slack", "lane_delta", "lane_dslope")
    sizes = {name: 8 * rows for name in SCRATCH_FIELDS if name.startswith(("lane_", "panel_"))}
    return sizes | dict.fromkeys(halves, integer * rows) | dict.fromkeys(reals, real * rows)


def scratch_memory(size: int) -> Tensor:
    """At least `size` bytes, aligned to cache lines; small ones are kept per calling thread."""
    kept = getattr(_kept, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = torch.empty(size + 64, dtype=torch.uint8)
        if size <= KEPT_SCRATCH_BYTES:
            _kept.scratch = kept
    return kept


def launch(kernel, record: np.dtype, fields: dict[str, Any], layout: tuple[np.ndarray, int], threads: int) -> None:
    """Run the kernel's jobs on up to `threads` threads."""
    offsets, size = layout
    threads = max(1, min(threads, fields["jobs"]))
    memory_block = scratch_memory(size * threads)
    tickets = np.zeros(2, np.int64)
    start = -(-memory_block.data_ptr() // 64) * 64
    args = fill(
        record,
        {
            **fields,
            "tickets": tickets.ctypes.data,
            "layout": offsets.ctypes.data,
            "scratch": start,
            "scratch_bytes": size,
        },
    )
    pool.run(kernel, args.ctypes.data, threads)


def thread_count(flops: float) -> int:
    """Threads for a call of this much work."""
    return torch.get_num_threads() if flops >= SMALL_FLOPS else 1
