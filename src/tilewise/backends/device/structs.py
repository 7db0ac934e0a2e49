"""What a kernel is told, in NamedTuples. A field that is None is absent: the code for it is not generated.

They are flat: where a kernel branches, Triton 3.6 loses the constants (None, a stride of 1) of structs within structs.
"""

from typing import NamedTuple

import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


class Strided(NamedTuple):
    """A tensor of rows: element strides along batch (0 in packed layouts), row and head; elements of a row are dense."""

    data: Tensor
    batch: int
    row: int
    head: int


class Lengths(NamedTuple):
    """Where sequences lie. Dense layout: `max_q`, `max_k` are the lengths and `cu_*` are absent."""

    max_q: int
    max_k: int
    total_q: int
    total_k: int
    aligned: int  # 1: bottom-right, m = row + k_len - q_len; 0: top-left, m = row
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_q: Tensor | None = None
    used_k: Tensor | None = None


class Interval(NamedTuple):
    """All interval masks of a call: the row at position m sees keys from ``m - left`` to ``m + right`` and so on."""

    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    chunk: int | None = None
    low: Tensor | None = None  # of each row, int32, at `batch` * b + row (packed: + first row of the sequence)
    high: Tensor | None = None
    batch: int | None = None
    first: Tensor | None = None  # of each key, the rows [first, end) that see it, int32, at `key_batch` * b + key
    end: Tensor | None = None
    key_batch: int | None = None


class Elements(NamedTuple):
    """A (B, H, Sq, Sk) tensor; where it is broadcast, strides are absent."""

    data: Tensor
    batch: int | None
    head: int | None
    row: int | None
    key: int | None


class Scoring(NamedTuple):
    """From q.k to the scores that the softmax sees, in units of log2: cap tanh(scale q.k / cap) - slope |m - n| + bias.

    Where nothing modifies the scores, `scale` is absent and the softmax takes the whole factor into its exponent.
    (B, H, Sq, Sk) tensors come with their strides `*_b`, `*_h`, `*_m`, `*_n`, 0 where broadcast.
    """

    factor: float
    scale: float | None = None
    cap: float | None = None
    coarse: int | None = None  # whether `cap` comes with the tanh of the special function unit: see `scoremods.tanh`
    slopes: Tensor | None = None  # at slopes_batch * b + h
    slopes_batch: int | None = None
    bias: Tensor | None = None
    bias_b: int | None = None
    bias_h: int | None = None
    bias_m: int | None = None
    bias_n: int | None = None
    dense: Tensor | None = None  # bool
    dense_b: int | None = None
    dense_h: int | None = None
    dense_m: int | None = None
    dense_n: int | None = None
    pattern: Tensor | None = None  # bool, block-sparse: entry (row // block_m, key // block_n)
    pattern_b: int | None = None
    pattern_h: int | None = None
    pattern_m: int | None = None
    pattern_n: int | None = None
    block_m: int | None = None
    block_n: int | None = None
    seed: Tensor | None = None  # of dropout, int64 (1,)
    drop_threshold: int | None = None
    drop_scale: float | None = None


class Rows(NamedTuple):
    """The query rows of a tile, inside a kernel: vectors along the tile, but for b, and h where they are of one head."""

    b: tl.tensor
    h: tl.tensor
    index: tl.tensor  # in the sequence
    m: tl.tensor
    valid: tl.tensor
    lo: tl.tensor  # sees keys [lo, hi)
    hi: tl.tensor
    first_key: tl.tensor  # of dropout
    second_key: tl.tensor


class Boxed(NamedTuple):
    """The rows of one sequence and head in boxes of a tensor descriptor, inside a kernel."""

    boxes: tl.tensor_descriptor
    b: tl.tensor
    h: tl.tensor
    start: tl.tensor  # of the sequence


class Keys(NamedTuple):
    """The keys and values of one sequence and head, inside a kernel."""

    k: tl.tensor | Boxed  # see `seqinfo.matrix`
    v: tl.tensor | Boxed
    k_row: tl.tensor  # strides
    v_row: tl.tensor
    length: tl.tensor


class Walk(NamedTuple):
    """The tiles that a program visits, inside a kernel: entries [first, last), those outside [full_first, full_last)
    partial. An entry is a tile, or a place in `listed`, the list of tiles."""

    first: tl.tensor
    full_first: tl.tensor
    full_last: tl.tensor
    last: tl.tensor
    listed: tl.tensor


class Visit(NamedTuple):
    """Tile lists: row i of (b, h) visits `partial` tiles that need masking, then `full` ones, listed in `tiles`."""

    tiles: Tensor  # int32 (.., rows, columns)
    partial: Tensor  # int32 (.., rows): how many
    full: Tensor
    batch: int  # strides of the counts, in rows
    head: int
    columns: int
