"""The host side that both passes share: tensors and a plan become an args record, scratch memory and a launch."""

import ctypes
import math
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
from .structs import ARGS_BYTES, SCRATCH_FIELDS, pack, put_addresses

FORMATS = {
    torch.float32: memory.F32,
    torch.bfloat16: memory.BF16,
    torch.float16: memory.F16,
    torch.float64: memory.F64,
    torch.bool: memory.U8,
    torch.uint8: memory.U8,
}
SMALL_FLOPS = 4_000_000  # below, about 50 us of work: waking threads costs more than it saves
CACHE_LINE = 64
KEPT_SCRATCH_BYTES = 16 << 20  # per thread of a call: its caller keeps scratch up to this size for the next call

_ZEROS = np.zeros(1024, np.float64)  # a row of zeros for absent queries, as long as the largest head dim
_ZEROS_ADDRESS = _ZEROS.ctypes.data


class _Workspace(threading.local):
    """What a calling thread keeps between calls: scratch, and memory for the args record."""

    def __init__(self):
        self.scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.args = bytearray(ARGS_BYTES)
        self.args_address = ctypes.addressof(ctypes.c_char.from_buffer(self.args))


_workspace = _Workspace()


class _CompileNotice(event.Listener):
    """Says once on stderr that Numba compiles; later processes read the disk cache."""

    def __init__(self, what: str):
        self._what, self._said = what, False

    def on_start(self, event):
        if not self._said:
            self._said = True
            line = f"tilewise: compiling the CPU's {self._what} kernel (10 to 20 s, once per machine) ..."
            print(line, file=sys.stderr, flush=True)

    def on_end(self, event):
        pass


def compile_kernel(kernel: Callable, what: str) -> Callable[[int], None]:
    """Compile a kernel that takes the address of its args record, or load it from Numba's disk cache."""
    with event.install_listener("numba:compile", _CompileNotice(what)):
        return njit("void(int64)", nogil=True, cache=True, error_model="numpy")(kernel)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def last_dim_dense(x: Tensor) -> Tensor:
    """`x` with consecutive elements along its last dim: a copy only where they are not."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def stride_fields(name: str, x: Tensor) -> dict[str, int]:
    """Byte strides along batch, sequence and head; a packed tensor has no batch stride."""
    size, (*batch, sequence, head, _) = x.element_size(), x.stride()
    return {f"{name}_b": batch[0] * size if batch else 0, f"{name}_s": sequence * size, f"{name}_h": head * size}


def matrix_strides(name: str, x: Tensor) -> dict[str, int]:
    """Byte strides of a (B, H, max_q, max_k) tensor."""
    strides = (stride * x.element_size() for stride in x.stride())
    return {f"{name}_{dim}": stride for dim, stride in zip("bhmn", strides, strict=True)}


def round_up(x: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below x."""
    return -(-x // multiple) * multiple


def row_index_strides(q: Tensor) -> tuple[int, int]:
    """Strides, in elements, of lse and delta along batch and head: (B, H, Sq), or (H, total_q) for packed q."""
    *batch, rows, heads, _ = q.shape
    return (heads * rows if batch else 0), rows


def modifier_fields(plan: Plan, lanes: Lanes) -> dict[str, Any]:
    """Fields of the score modifiers and masks; whatever the plan lacks stays 0."""
    fields: dict[str, Any] = {}
    scale = plan.softmax_scale
    if plan.softcap is not None:
        # The score panel then holds 2 log2(e) x / softcap, the argument of tanh as `cap_pass` wants it.
        fields.update(cap=plan.softcap * LOG2E, query_scale=scale * 2 * LOG2E / plan.softcap, score_scale=1.0)
    elif plan.slopes is not None or plan.bias is not None or scale == 0:
        fields.update(query_scale=scale * LOG2E, score_scale=1.0)
    else:  # nothing happens to scores before the softmax: q stays exact, the scale joins in the exponent's fma
        fields.update(query_scale=math.copysign(1.0, scale), score_scale=abs(scale) * LOG2E)
    fields["product_scale"] = 1.0
    if lanes.products == "amx":  # its operands are the bits of q: the scale would round them
        fields.update(query_scale=1.0, product_scale=fields["query_scale"])
    if plan.slopes is not None:
        size = plan.slopes.element_size()
        stride_b, stride_h = plan.slopes.stride()
        fields.update(slopes=plan.slopes.data_ptr(), slopes_b=stride_b * size, slopes_h=stride_h * size)
    if plan.bias is not None:
        fields.update(matrix_strides("bias", plan.bias), bias=plan.bias.data_ptr(), bias_code=FORMATS[plan.bias.dtype])
    if plan.keep is not None:
        fields.update(matrix_strides("keep", plan.keep), keep=plan.keep.data_ptr())
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


def shared_fields(q, k, v, o, plan: Plan, lanes: Lanes, block_m: int, block_n: int) -> dict[str, Any]:
    """All fields that forward and backward have in common, but for the addresses of tensors that change from call to call."""
    (*_, heads, dim), heads_kv, value_dim = q.shape, k.size(-2), v.size(-1)
    pack = heads_per_block(plan, heads // heads_kv)
    rows = plan.max_q * pack
    span = plan.tiles.block_m if plan.tiles is not None else max(rows, 1)
    block_m = min(block_m, round_up(span, lanes.panel))
    blocks_per_span = -(-span // block_m)
    lse_b, lse_h = row_index_strides(q)
    columns = 2 * lanes.width
    return {
        **stride_fields("q", q),
        **stride_fields("k", k),
        **stride_fields("v", v),
        **stride_fields("o", o),
        "code": FORMATS[q.dtype],
        "dim": dim,
        "value_dim": value_dim,
        "dim_padded": round_up(dim, columns),
        "value_dim_padded": round_up(value_dim, columns),
        "heads_kv": heads_kv,
        "group": heads // heads_kv,
        "pack": pack,
        "softmax_scale": plan.softmax_scale,
        "lse_b": lse_b,
        "lse_h": lse_h,
        "seq": plan.seq.data_ptr(),
        "lo": plan.lo.data_ptr(),
        "hi": plan.hi.data_ptr(),
        "bounds_stride": plan.bounds_stride,
        "block_m": block_m,
        "block_n": block_n,
        "tile_rows": block_n + lanes.key_step,
        "key_tiles": -(-plan.max_k // block_n),
        "slots": 1,
        "span": span,
        "blocks_per_span": blocks_per_span,
        "blocks": -(-rows // span) * blocks_per_span,
        "zeros": _ZEROS_ADDRESS,
        **modifier_fields(plan, lanes),
    }


class ScratchLayout:
    """Offset of each scratch field from the start of a thread's region, and the size of a region."""

    def __init__(self, sizes: Mapping[str, int]):
        offsets, end = [], round_up(8 * len(SCRATCH_FIELDS), CACHE_LINE)  # the scratch record itself comes first
        for name in SCRATCH_FIELDS:
            offsets.append(end)
            end += round_up(sizes.get(name, 0), CACHE_LINE)
        self.bytes = end + 3 * CACHE_LINE  # an odd multiple of lines between threads spreads cache sets
        self._offsets = np.array(offsets, np.int64)
        self.address = self._offsets.ctypes.data


def lane_sizes(lanes: Lanes, rows: int) -> dict[str, int]:
    """Bytes of the per-row fields of a block of `rows` lanes."""
    real, integer = lanes.bits // 8, 4
    halves = ("lane_lo", "lane_hi", "lane_first", "lane_second")
    reals = ("lane_m", "lane_slope", "lane_max", "lane_sum", "lane_alpha", "lane_lse", "lane_lse_rest")
    reals += ("lane_slack", "lane_delta", "lane_dslope")
    sizes = {name: 8 * rows for name in SCRATCH_FIELDS if name.startswith(("lane_", "panel_"))}
    return sizes | dict.fromkeys(halves, integer * rows) | dict.fromkeys(reals, real * rows)


def scratch_memory(size: int, threads: int) -> Tensor:
    """`size` bytes for each thread and room to align them; small ones are kept per calling thread."""
    kept = _workspace.scratch
    if kept.numel() < size * threads + CACHE_LINE:
        kept = torch.empty(size * threads + CACHE_LINE, dtype=torch.uint8, device="cpu")
        if size <= KEPT_SCRATCH_BYTES:
            _workspace.scratch = kept
    return kept


class Launch:
    """A kernel and its args record, made ready once for all calls that differ in the addresses of their tensors only."""

    def __init__(self, kernel: Callable, record: np.dtype, fields: dict[str, Any], layout: ScratchLayout, threads: int):
        self._kernel, self._record, self._layout = kernel, record, layout
        self._threads = max(1, min(threads, fields["jobs"]))
        self._args = pack(record, fields | {"scratch_bytes": layout.bytes, "layout": layout.address})

    def run(self, **addresses: int) -> None:
        """Run the kernel's jobs, with these fields set."""
        block, args = scratch_memory(self._layout.bytes, self._threads), _workspace.args
        args[: len(self._args)] = self._args
        put_addresses(self._record, args, addresses)
        put_addresses(self._record, args, {"scratch": round_up(block.data_ptr(), CACHE_LINE)})
        pool.run(self._kernel, _workspace.args_address, self._threads)


def thread_count(flops: float) -> int:
    """Threads for a call of this much work."""
    return torch.get_num_threads() if flops >= SMALL_FLOPS else 1
