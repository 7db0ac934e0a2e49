"""One call lowered for the CPU kernels: numbers and tensors, no semantics left."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TileRanges:
    """Key ranges to visit, per block of `block_m` query rows, in compressed rows (CSR).

    Block row ``i`` of sequence ``b``, head ``h`` visits entries ``offsets[b, h, i] .. offsets[b, h, i + 1]`` of
    `starts`, `ends` (keys ``[start, end)``, ascending, disjoint) and `full` (1: every row sees every key of the
    range, `Plan.keep` need not be read). Leading dims of `offsets` may be broadcast (stride 0).
    """

    block_m: int
    offsets: Tensor  # int64 (B, H, ceil(max_q / block_m) + 1), possibly expanded
    starts: Tensor  # int32 (entries,)
    ends: Tensor  # int32 (entries,)
    full: Tensor  # uint8 (entries,)


@dataclass(frozen=True)
class Plan:
    """What the kernels need beyond q, k, v.

    Row ``r`` of sequence ``b`` is at position ``m = r + shift[b]`` and sees keys ``[lo, hi)`` where both are read at
    index ``b * bounds_stride + q_start[b] + r``; they are proper: ``0 <= lo <= hi <= k_len[b]``.
    """

    seq: Tensor  # int64 (B, 5): q_start, q_len, k_start, k_len, shift; dense layout: starts 0, lengths Sq and Sk
    max_q: int
    max_k: int
    lo: Tensor  # int32
    hi: Tensor  # int32
    bounds_stride: int
    softmax_scale: float
    softcap: float | None = None
    slopes: Tensor | None = None  # (B, H) in the accumulation dtype, possibly expanded
    bias: Tensor | None = None  # (B, H, max_q, max_k), any floating dtype, possibly expanded (stride 0)
    sinks: Tensor | None = None  # (H,) in the accumulation dtype
    keep: Tensor | None = None  # bool (B, H, max_q, max_k), possibly expanded
    tiles: TileRanges | None = None
    dropout_p: float = 0.0
    seed: int = 0
    max_logit: bool = True  # whether the largest score of each head is asked for
    #: What the passes made ready for calls with this plan, by shapes and strides: a training loop has few of both.
    launches: dict[tuple, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
