"""Block sizes, chosen by measurement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FwdConfig:
    """Query rows of a job and keys of a tile. Rows are rounded up to whole panels where a job has fewer."""

    block_m: int = 192
    block_n: int = 128

    def __post_init__(self):
        if self.block_m < 1 or self.block_n < 1 or self.block_n % 32:
            raise ValueError(
                f"block_m must be positive and block_n a multiple of 32, not {self.block_m}, {self.block_n}"
            )


@dataclass(frozen=True)
class BwdConfig:
    """Query rows of a block and keys of a tile; 96: micro-kernels take 4, 6 or 32 keys at once."""

    block_m: int = 96
    block_n: int = 96

    def __post_init__(self):
        if self.block_m < 1 or self.block_n < 1 or self.block_n % 96:
            raise ValueError(
                f"block_m must be positive and block_n a multiple of 96, not {self.block_m}, {self.block_n}"
            )


def pick_forward(dim: int) -> FwdConfig:
    """Rows of a job for the larger of the two head dims.

    Each job packs every key tile that it visits, so longer jobs pack less; their q and o should stay near the
    second-level cache. Measured on one Zen 3 core (512 KiB L2), 2026-11-29, S2048 full, fp32, GFLOP/s at 192 / 384 / 768
    rows: D64 78 / 80 / 80; S8192 causal D64 68 / 72 / 76; S2048 causal D128 77 / 77 / 76.
    """
    return FwdConfig(block_m=768) if dim <= 64 else FwdConfig(block_m=384) if dim <= 128 else FwdConfig()
