"""Tiles of the Hopper kernels: ordered rules, each with what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel divides its work; tiles have 64 rows for each group.

    Args:
        groups: consumer warpgroups, 2 to 4.
        block_n: keys of a tile.
        stages: tiles of keys, and of values, in shared memory.
        registers: of a consumer's thread; the producer has the rest.
        early: half of the exponentials are computed before the wait for the previous product.
        query_stages: consumers' tiles of queries in shared memory; more than `groups`, and the next ones come early.
        draws: programs draw their work from a counter, which is one more kernel to fill; else it is shared out beforehand.
        shares_out: the output leaves through the queries' shared memory.
        slack: sums are rescaled when a row's maximum has grown by more than this, in units of log2; with 0 the largest
            weight is exactly 1, and errors are those of FlashAttention-3. Simulated at D128, 1,024 keys, over those errors, on
            normal numbers and with outliers: 8 1.04 and 1.16, 2 1.03 and 1.02. What 0 costs: 3% at D128, D256.
        aligned: of each consumer's key tiles the last one is masked and no other, see `forward_sm90.diagonal`.
        halves: consumers whose rows see only the left half of that tile work on no more; of two it is always the first one.
    """

    groups: int
    block_n: int
    stages: int
    registers: int
    early: bool
    query_stages: int
    draws: bool = True
    shares_out: bool = False
    slack: float = 2.0
    aligned: bool = False
    halves: bool = False

    def __post_init__(self):
        if self.halves and not (self.aligned and self.block_n == 128 and self.groups in (2, 3)):
            raise ValueError("halves are those of aligned tiles of 128 keys, for two or three consumers")
        if self.groups not in (2, 3, 4):
            raise ValueError(f"groups must be 2, 3 or 4, not {self.groups}")
        if self.block_n not in (64, 128):
            raise ValueError(f"block_n must be 64 or 128, not {self.block_n}")
        if self.query_stages % self.groups and self.stages > 2:
            raise ValueError("consumers that share query stages must not be more than two tiles of keys apart")

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return 64 * self.groups

    @property
    def max_registers(self) -> int:
        """Registers of each thread at the start: of 65,536, for `groups` + 1 warpgroups, a multiple of 8."""
        return 65536 // (128 * (self.groups + 1)) // 8 * 8

    @property
    def producer_registers(self) -> int:
        """Of a producer's thread: what consumers leave; its one warp pays for a whole warpgroup."""
        return (self.groups + 1) * self.max_registers - self.groups * self.registers


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward kernel divides its work between two consumer warpgroups.

    Args:
        block_m: rows of a tile, 64 or 128.
        block_n: keys of a program: 128, or 64 in the wide form, in which consumers share them.
        stages: row tiles in shared memory.
        registers: of a consumer's thread, once the producer has given up its own.
    """

    block_m: int
    block_n: int
    stages: int = 2
    registers: int = 240

    def __post_init__(self):
        if (self.block_m, self.block_n) not in ((64, 64), (64, 128), (128, 128)):
            raise ValueError(f"no kernel has tiles of {self.block_m} rows and {self.block_n} keys")

    @property
    def max_registers(self) -> int:
        """Registers of each thread at the start: of 65,536, for three warpgroups, a multiple of 8."""
        return 168

    @property
    def producer_registers(self) -> int:
        """Of a producer's thread: what consumers leave."""
        return 3 * self.max_registers - 2 * self.registers

    @property
    def wide(self) -> bool:
        return self.block_n == 64

    @property
    def frees(self) -> int:
        """Consumers that free a row tile: in the wide form the one through whose rows its share of dq has left."""
        return 1 if self.wide else 2

    @property
    def swizzle(self) -> int:
        """Bytes, of ds in shared memory: its halves of 32 columns in the wide form are 64 bytes."""
        return 64 if self.wide else 128


def options(config: ForwardConfig | BackwardConfig) -> dict[str, int]:
    """What the compiler is told; `num_warps` counts those of one warpgroup, the kernel asks for the others itself."""
    return {"num_warps": 4, "maxnreg": config.max_registers}


def padded(dim: int) -> int:
    """Columns of a tile that holds a head dim; the copy engine fills in zeros."""
    return max(64, 1 << (dim - 1).bit_length())


def parts(dim: int) -> tuple[int, int]:
    """Columns of the two parts of a tile that holds a head dim; one part is enough where the second is 0."""
    width = padded(dim)
    return (width // 2, width // 4) if dim > 64 and 4 * dim <= 3 * width else (width, 0)


def held(dim: int) -> int:
    """Columns of both."""
    return sum(parts(dim))


SHORT = 1024  # keys

# Measured on one NVIDIA H200, 2026-11-30, bf16, 16,384 tokens, hidden size 2048, causal / full; TFLOP/s. See notes.md.


@lru_cache(maxsize=1024)
def forward_config(D: int, Dv: int, max_k: int, even: bool, plain: bool, diagonal: int = 0) -> ForwardConfig:
    """For tiles of the larger of the two head dims.

    Args:
        D, Dv: head dims.
        max_k: keys of the longest sequence.
        even: all tiles of rows take equally long.
        plain: nothing modifies the scores, which takes registers, and keys are bounded above at most.
        diagonal: rows, 128 or 64, on whose multiples the diagonal lies, see `forward_sm90.diagonal`; else 0.
    """
    dim = max(held(D), held(Dv))
    # D128 causal, neither / aligned / halves, too: 512: 319 / 332 / 342, 1024: 468 / 482 / 491, 4096: 665 / 675 / 680. D256:
    # 512: 343 / 352, 4096: 732 / 734. Not timed with parts of 96 and 192.
    aligned = diagonal > 0 and dim in (64, 128, 256)
    if dim == 64:
        # Slack 8 -> 0, 1024: 344 -> 332 / 471 -> 451, 4096: 497 -> 490 / 554 -> 547, 16384: 574 -> 568 / 582 -> 586.
        # 512: 269 / 412, 1024: 335 / 463; three consumers 222 / 366 and 309 / 434. Aligned, causal: 253 -> 264 and 338 -> 343.
        # 16384 in documents of 1,500: 298; three consumers 257, two 280.
        if plain and max_k <= SHORT:
            return ForwardConfig(
                groups=4, block_n=64, stages=4, registers=112, early=False, query_stages=8, draws=False, slack=0.0,
                aligned=aligned,
            )  # fmt: skip
        # 4096: 499 / 552, with 4 stages or 3 query stages within 1%; 16384: 557 / 578. Work shared out beforehand 529 instead
        # of 543 (4096, full): three tiles a head, 132 programs. Causal, neither / aligned / halves, too: 2048: 431 / 436 /
        # 448, 4096: 493 / 496 / 504, 16384: 567 / 574 / 582.
        return ForwardConfig(
            groups=3, block_n=128, stages=2, registers=160, early=False, query_stages=6, slack=0.0, aligned=aligned,
            halves=aligned,
        )  # fmt: skip
    if dim in (96, 128):  # 512: 328 / 553, shared out beforehand 305 / 547; 16384: 752 / 751
        return ForwardConfig(
            groups=2, block_n=128, stages=2, registers=240, early=True, query_stages=4, draws=not even, aligned=aligned,
            halves=aligned and diagonal == 128,
        )  # fmt: skip
    if dim == 192 and parts(Dv) == (128, 0):  # 16384: 806 / 818
        return ForwardConfig(
            groups=2, block_n=128, stages=2, registers=240, early=True, query_stages=2, draws=not even, shares_out=True
        )  # fmt: skip
    # 512: 352 / 557, shared out beforehand 304 / 570; with two query stages 337 / 549. 16384: 817 / 830; early off 796 / 811
    # and 240 registers 797 / 808 against 792 / 811 in another run.
    same = parts(D) == parts(Dv)
    return ForwardConfig(
        groups=2, block_n=64, stages=2, registers=232, early=True, query_stages=3 if same else 2, draws=not even,
        shares_out=same, aligned=aligned,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def listed_config(D: int, Dv: int, block_n: int) -> ForwardConfig:
    """The same for lists of tiles; `block_n`: keys of a block, a multiple of 64. All consumers visit all tiles of a list.

    So rows of a tile should be those of one block: at D64, 16384, butterfly of 128 x 128, two consumers 439, three 178.
    """
    config = forward_config(D, Dv, block_n, False, False)
    if max(held(D), held(Dv)) == 64:
        config = ForwardConfig(
            groups=2, block_n=128, stages=4, registers=240, early=False, query_stages=4, slack=0.0
        )  # fmt: skip
    if block_n % config.block_n:
        return replace(config, block_n=64, stages=2 * config.stages)
    return config


@lru_cache(maxsize=1024)
def backward_config(D: int, Dv: int, plain: bool, block_m: int = 0) -> BackwardConfig:
    """For tiles of the larger of the two head dims.

    Args:
        D, Dv: head dims.
        plain: nothing modifies the scores, which takes registers.
        block_m: rows of a block of block-sparse attention: none of them begins within a tile.
    """
    dim = max(padded(D), padded(Dv))
    if dim == 64:
        return BackwardConfig(block_m=64 if block_m % 128 or not plain else 128, block_n=128)
    if dim == 128 and plain:
        return BackwardConfig(block_m=64, block_n=128)
    return BackwardConfig(block_m=64, block_n=64)
