"""Block sizes, chosen by measurement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FwdConfig:
    """Query rows of a job and keys of a tile. Rows are rounded up to whole panels where a job has fewer."""

    block_m: int = 192
    block_n: int = 128

    def __post_init__(self):
        if self.block_m < 1 or self.block_n < 4 or self.block_n % 4:
            raise ValueError(f"block_m must be positive and block_n a multiple of 4, not {self.block_m}, {self.block_n}")


@dataclass(frozen=True)
class BwdConfig:
    """Query rows of a block and keys of a tile; 12 = the micro-kernels' 4 and 6 keys at once."""

    block_m: int = 96
    block_n: int = 96

    def __post_init__(self):
        if self.block_m < 1 or self.block_n < 12 or self.block_n % 12:
            raise ValueError(f"block_m must be positive and block_n a multiple of 12, not {self.block_m}, {self.block_n}")
