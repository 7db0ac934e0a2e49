"""Running the backward pass on Hopper: rows prepared, one kernel for all sums, dq rounded, what broke repaired."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tilewise.backends.base import Grads, Needs
from tilewise.backends.device.gradients import sink_gradient
from tilewise.backends.device.launch import Launcher, layout_key
from tilewise.backends.device.lower import LOG2E, Lowered, per_row, strided, visit
from tilewise.backends.device.order import heads_together, multiprocessors
from tilewise.tiles import cdiv

from .backward_repair import repair_kernel
from .backward_rows import ALIGNED, CHAINED, ROWS, STARTS, Shape, finish_kernel, prepare_kernel
from .backward_sm90 import backward_kernel
from .configs import BackwardConfig, backward_config, options, padded
from .descriptors import boxes, lines, numbers

COMPILED = not triton.knobs.runtime.interpret  # there kernels do not follow one another
NOTES_READ = 32  # at a time, by each program
_prepare, _backward, _finish, _repair = Launcher(), Launcher(), Launcher(), Launcher()


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Lowered,
    needs: Needs, config: BackwardConfig | None = None,
) -> Grads:  # fmt: skip
    """Run the backward kernels: shapes as in `forward`, `do` like o and `dlse` like lse, absent where they are zero.

    dq is a sum of float32 in the order in which programs finish: its last bits differ from run to run.
    """
    config = config or backward_config(q.shape[-1], v.shape[-1], call.scoring.scale is None, call.scoring.block_m or 0)
    do = torch.zeros_like(o) if do is None else do
    new = torch.zeros_like if call.varlen else torch.empty_like  # rows between packed sequences belong to no program
    dq, dk, dv = (new(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    launch = _Launch(q, k, v, do, lse, (dq, dk, dv), call, config)
    if needs.dsinks and call.varlen:  # the gradient is a sum over rows, also over those between sequences
        launch.minus_lse.zero_()
        launch.minus_delta.zero_()
    launch.prepare(o, dlse)
    launch.sum()
    launch.finish()
    launch.repair()
    found = [x if needed else None for x, needed in ((dq, needs.dq), (dk, needs.dk), (dv, needs.dv))]
    return Grads(*found, dsinks=launch.dsinks() if needs.dsinks else None)


class _Launch:
    """The kernels of one backward call, each with what they share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, sums: tuple[Tensor, Tensor, Tensor], call: Lowered,
        config: BackwardConfig,
    ):  # fmt: skip
        self.q, self.k, self.v, self.do, self.lse = q, k, v, do, lse
        self.dq, self.dk, self.dv = sums
        self.call, self.config = call, config
        lengths, heads_kv = call.lengths, k.shape[-2]
        aligned = cdiv(lengths.max_q, ALIGNED.value) * ALIGNED.value
        batch_rows, head_rows = (
            (0, (lengths.total_q // ALIGNED.value + call.B) * ALIGNED.value)
            if call.varlen
            else (call.H * aligned, aligned)
        )
        group = call.H // heads_kv
        together = heads_together(call, 2 * group * lengths.max_q, q, v)  # twice: the sum of dq is streamed, too
        self.shape = Shape(
            call.H, heads_kv, group, cdiv(lengths.max_k, config.block_n), together, call.B * heads_kv, batch_rows,
            head_rows,
        )  # fmt: skip
        rows = max(call.H * head_rows, call.B * batch_rows)
        new = lse.new_empty
        self.dq_sum, self.minus_lse, self.minus_delta = new(rows * self.columns), new(rows), new(rows)
        self.starts = new((rows, STARTS.value), dtype=torch.bfloat16) if call.scoring.scale is None else None
        self.row_tiles = aligned // ROWS
        self.row_notes = self.row_tiles * call.H * call.B
        key_notes = self.shape.all_heads * self.shape.tiles * 2
        self.broken_rows, self.broken_keys = (new(n, dtype=torch.int32) for n in (self.row_notes, key_notes))

    @property
    def key(self) -> tuple:
        return self.call.kind, layout_key(self.q, self.k, self.v, self.do), self.config

    @property
    def columns(self) -> int:
        """Columns of all tiles."""
        return max(self.widths[2:])

    @property
    def part(self) -> int:
        """Columns of a consumer's share of dq, which has 64 rows."""
        return self.columns * self.config.block_m // 128

    @property
    def widths(self) -> tuple[int, int, int, int]:
        D, DV = self.q.shape[-1], self.v.shape[-1]
        return D, DV, padded(D), padded(DV)

    def prepare(self, o: Tensor, dlse: Tensor | None) -> None:
        _, DV, _, BLOCK_DV = self.widths
        args = (
            strided(o), strided(self.do), None if dlse is None else per_row(dlse), per_row(self.lse), self.minus_lse,
            self.minus_delta, self.starts, self.dq_sum, self.call.lengths, self.call.scoring, self.row_tiles, *self.shape,
            DV, BLOCK_DV, self.columns, ROWS, COMPILED,
        )  # fmt: skip
        _prepare.start(prepare_kernel, (self.key, layout_key(o, dlse)), self.row_notes, args, {"num_warps": 4})

    def sum(self) -> None:
        config, call = self.config, self.call
        columns, keys = self.columns, 64 if config.wide else config.block_n // 2
        lists = visit(call, config.block_m, config.block_n, transposed=True) if call.lists_tiles else None
        args = (
            boxes(self.q, config.block_m, columns), boxes(self.k, config.block_n, columns),
            boxes(self.v, config.block_n, columns), boxes(self.do, config.block_m, columns),
            *self.numbers(), lines(self.dq_sum, 64 * self.part), boxes(self.dk, keys, columns),
            boxes(self.dv, keys, columns), self.broken_keys, call.lengths, call.ordered_interval, lists, call.scoring,
            call.bound.softmax_scale, *self.shape, config,
        )  # fmt: skip
        grid = self.shape.tiles * self.shape.all_heads
        _backward.start(backward_kernel, self.key, grid, args, options(config) | CHAINED)

    def numbers(self) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        """What comes with tiles of q and of do: -lse and -delta, or both with q, see `store_starts`."""
        rows = self.config.block_m
        if self.starts is not None:
            return numbers(self.starts, [rows, STARTS.value]), None
        return numbers(self.minus_lse, [rows]), numbers(self.minus_delta, [rows])

    def finish(self) -> None:
        args = (
            self.dq_sum, strided(self.dq), self.broken_rows, self.call.lengths, self.call.bound.softmax_scale, self.row_tiles,
            *self.shape, self.q.shape[-1], self.columns, self.part, ROWS,
            COMPILED,
        )  # fmt: skip
        _finish.start(finish_kernel, self.key, self.row_notes, args, {"num_warps": 4} | CHAINED)

    def repair(self) -> None:
        tensors = (self.q, self.k, self.v, self.do)
        args = (
            *map(strided, tensors), self.minus_lse, self.minus_delta, *map(strided, (self.dq, self.dk, self.dv)),
            self.broken_rows, self.broken_keys, self.call.lengths, self.call.ordered_interval, self.call.scoring,
            self.call.bound.softmax_scale, self.row_tiles, *self.shape, *self.widths, ROWS, NOTES_READ,
            2 if self.config.wide else 1, COMPILED,
        )  # fmt: skip
        grid = multiprocessors(self.q.device)
        _repair.start(repair_kernel, self.key, grid, args, {"num_warps": 8, "num_stages": 1} | CHAINED)

    def dsinks(self) -> Tensor:
        shape = (-1, self.call.H, self.shape.head_rows) if not self.call.varlen else (self.call.H, self.shape.head_rows)
        lse = self.minus_lse * (-self.call.scoring.factor / LOG2E)
        return sink_gradient(self.call.sinks, lse.reshape(shape), self.minus_delta.reshape(shape))
