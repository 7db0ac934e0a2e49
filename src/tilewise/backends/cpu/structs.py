"""What a kernel is told: one record of numbers and addresses. Address 0 means that the thing is absent."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Fields of both passes. `*_b`, `*_s`, `*_h`, `*_m`, `*_n`: strides in bytes along batch, sequence, head, row, key.
_SHARED = (
    *("next_job", "next_thread"),  # counters: every thread takes its tickets here
    *("q", "q_b", "q_s", "q_h", "k", "k_b", "k_s", "k_h", "v", "v_b", "v_s", "v_h", "o", "o_b", "o_s", "o_h"),
    *("code", "dim", "dim_padded", "value_dim", "value_dim_padded", "heads_kv", "group", "pack"),
    *("lse", "lse_b", "lse_h", "seq", "lo", "hi", "bounds_stride"),  # lse strides count elements
    *("block_m", "block_n", "span", "blocks_per_span", "blocks"),  # see blocks.block_rows
    *("slopes", "slopes_b", "slopes_h", "sinks", "drop_threshold", "seed"),
    *("bias", "bias_b", "bias_h", "bias_m", "bias_n", "bias_code", "keep", "keep_b", "keep_h", "keep_m", "keep_n"),
    *("tile_offsets", "tile_b", "tile_h", "tile_starts", "tile_ends", "tile_full"),
    *("tile_rows", "key_tiles", "slots"),  # see key_tiles
    *("jobs", "scratch", "scratch_bytes", "layout", "zeros"),
)
# cap: softcap * log2(e), 0 without; before modifiers, a score in units of log2 is
# score_scale * product_scale * (query_scale * q) . k
_SHARED_REAL = ("query_scale", "product_scale", "score_scale", "softmax_scale", "cap", "drop_scale")

_FORWARD = ("max_logit", "parts", "part_blocks")
_BACKWARD = (
    *("do", "do_b", "do_s", "do_h", "dlse", "delta"),  # dlse and delta have the strides of lse
    *("dq", "dq_b", "dq_s", "dq_h", "dq_chunk", "dq_code"),
    *("dk", "dk_b", "dk_s", "dk_h", "dv", "dv_b", "dv_s", "dv_h"),
    *("dbias", "dbias_b", "dbias_h", "dbias_m", "dbias_n", "dbias_chunk", "dslopes", "dslopes_chunk"),
    *("chunks", "chunk_bounds", "chunk_rows", "groups_h", "member_batches", "member_heads"),
)

#: Per-thread scratch: addresses, filled in by `bind_scratch`. `lane_*`: one entry per query row of the block.
SCRATCH_FIELDS = (
    *("lane_q", "lane_o", "lane_bias", "lane_keep", "lane_lo", "lane_hi", "lane_m", "lane_slope", "lane_first"),
    *("lane_second", "lane_index", "lane_head", "lane_max", "lane_sum", "lane_alpha", "lane_lse", "lane_lse_rest"),
    *("lane_slack", "lane_delta", "lane_do", "lane_dq", "lane_dbias", "lane_dslope"),
    *("panel_lo", "panel_hi", "panel_all_lo", "panel_all_hi", "panel_k0", "panel_k1"),
    *(
        "k",
        "v",
        "k_t",
        "k_slots",
        "v_slots",
        "k_t_slots",
        "tags",
        "k_rows",
        "v_rows",
        "k_bad",
        "v_bad",
    ),  # k, v: see key_tiles.hold_tile
    *("q_t", "q", "do_t", "do", "o_t", "dq_t", "dk", "dv"),
    *("score", "grad", "extra", "slope", "trash", "pairs", "mixed", "p_rows", "ds_rows", "ds_pairs"),
)


def _record(integers, reals=()):
    return np.dtype([(name, np.int64) for name in integers] + [(name, np.float64) for name in reals])


FORWARD_ARGS = _record(_SHARED + _FORWARD, _SHARED_REAL)
BACKWARD_ARGS = _record(_SHARED + _BACKWARD, _SHARED_REAL)
SCRATCH = _record(SCRATCH_FIELDS)
ARGS_BYTES = max(FORWARD_ARGS.itemsize, BACKWARD_ARGS.itemsize)

_RECORDS = (FORWARD_ARGS, BACKWARD_ARGS)  # below by size: the size of a numpy dtype is quicker to look up
_PACK = {  # numpy's own way from a tuple to a record takes three times as long
    record.itemsize: struct.Struct("".join(record[name].char for name in record.names or ()).replace("l", "q")).pack
    for record in _RECORDS
}
_OFFSETS = {r.itemsize: dict(zip(r.names or (), range(0, r.itemsize, 8), strict=True)) for r in _RECORDS}
_put_address = struct.Struct("q").pack_into


def pack(record: np.dtype, fields: Mapping[str, Any]) -> bytes:
    """A record as bytes; fields not given are 0. A name that the record lacks is an error."""
    assert record.names is not None
    values = dict.fromkeys(record.names, 0) | dict(fields)
    if len(values) != len(record.names):
        raise KeyError(f"no such fields: {sorted(values.keys() - set(record.names))}")
    return _PACK[record.itemsize](*values.values())


def put_addresses(record: np.dtype, target: bytearray, addresses: Mapping[str, int]) -> None:
    """Set fields of the record at the start of `target`."""
    offsets = _OFFSETS[record.itemsize]
    for name, address in addresses.items():
        _put_address(target, offsets[name], address)
