"""Tile sizes of the Triton kernels: ordered rules, each with what was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tilewise.backends.device.descriptors import boxable, boxes
from tilewise.backends.device.lower import Lowered
from tilewise.backends.device.order import multiprocessors
from tilewise.backends.device.precision import tf32_allowed
from tilewise.tiles import DECODE_ROWS, cdiv, packs, splits

HOPPER, BLACKWELL = 90, 100
BARRIERS = 2048  # bytes of shared memory beside the tiles
LISTS = 5 << 10  # the same for loops over lists of tiles: what compiled kernels had at most
BIAS = 4  # bytes for each pair of row and key of a tile, where a bias is added to the scores
OPERANDS = 32 << 10  # the same on Blackwell, whose matrix units take p and ds from there


@dataclass(frozen=True)
class Config:
    """Rows and keys of a tile, and how Triton compiles the kernel."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    descriptors: bool = True  # stream through tensor descriptors (TMA), where alignment allows it
    owned: int = 0  # matrices whose owned rows come through descriptors, too: products then read them from registers
    registers: int | None = None  # of a thread, at most: 168 let three programs of four warps share a multiprocessor
    turned: bool = False  # each program of dk and dv begins at rows of its own, not all at the same

    def __post_init__(self):
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n), ("num_warps", self.num_warps)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value}")
        if self.block_m < 16 or self.block_n < 16:
            raise ValueError(f"tiles have at least 16 rows and keys, not {self.block_m} x {self.block_n}")


@dataclass(frozen=True)
class DecodeConfig(Config):
    """The same for few rows over many keys, and the number of parts into which the keys are divided."""

    splits: int = 1


def options(config: Config) -> dict[str, int]:
    """What Triton's launcher is told."""
    told = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.registers is not None and _arch() == HOPPER:  # where limits were measured; others have other matrix units
        told["maxnreg"] = config.registers
    return told


def _arch() -> int:
    """Of an NVIDIA GPU, see HOPPER; 0 for others."""
    if triton.knobs.runtime.interpret:
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


def streamed(config: Config, rows: int, x: Tensor, y: Tensor) -> tuple[Any, Any]:
    """Descriptors of two tensors that a kernel reads in tiles of `rows` rows; Nones where it is to do without."""
    if not (config.descriptors and boxable(x, y)):
        return None, None
    return boxes(x, rows, padded(x.shape[-1])), boxes(y, rows, padded(y.shape[-1]))


def owned(config: Config, rows: int, *tensors: Tensor) -> tuple[Any, ...]:
    """The same of the first tensors, as many as the config says, of which a program reads `rows` rows, once."""
    first = tensors[: config.owned]
    if not (first and boxable(*first)):
        first = ()
    return (*(boxes(x, rows, padded(x.shape[-1])) for x in first), *(None,) * (len(tensors) - len(first)))


def padded(dim: int) -> int:
    """Columns of a tile that holds a head dim: matrix units take powers of two from 16 on."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How products are computed. float32: as sums of six bfloat16 products, float32's accuracy from matrix units.

    TF32 where the user allows PyTorch that for its own products. Triton's interpreter knows exact ones only.
    """
    if dtype != torch.float32 or triton.knobs.runtime.interpret:
        return "ieee"
    return "tf32" if tf32_allowed() else "bf16x6"


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return 1 << 30  # Triton's interpreter
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 << 10)  # not told for AMD: 64 KiB


def fitted(config: Config, owned: int, streamed: int, by_rows: bool, limit: int, of_pair: int = 0) -> Config:
    """The config with fewer stages, then smaller tiles, until it fits in `limit` bytes of shared memory.

    Args:
        config: of a kernel that owns `block_m` rows and streams tiles of `block_n` keys (`by_rows`), or the reverse.
        owned, streamed: bytes of one owned and of one streamed row over all matrices that products read.
        by_rows: see config.
        limit: see `shared_memory`.
        of_pair: bytes of one row and one key beside these.
    """
    beside = BARRIERS + (OPERANDS if _arch() >= BLACKWELL else 0)
    while True:
        mine, theirs = (config.block_m, config.block_n) if by_rows else (config.block_n, config.block_m)
        if mine * owned + config.num_stages * theirs * streamed + mine * theirs * of_pair + beside <= limit:
            return config
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif theirs > 16:
            config = replace(config, **{"block_n" if by_rows else "block_m": theirs // 2})
        elif mine > 16:
            config = replace(config, **{"block_m" if by_rows else "block_n": mine // 2})
        else:
            return config  # as small as tiles get: the compiler says what is missing


# Measured on one NVIDIA H200, 2026-11-30, bf16, 16,384 tokens, hidden size 2048, TFLOP/s of the products that the kernel does,
# causal / full ("modified" and "biased": causal, one sequence of 4K at D64 and of 8K at D128). Of `keys` and `uneven`: see
# `traits`. Programs of 512 keys are short: there more of them on a multiprocessor pay.


def pick_forward(dim: int, dtype: torch.dtype, keys: int, uneven: bool, work: str) -> Config:
    """For the larger of the two head dims."""
    if dtype == torch.float32:
        return Config(64, 32, 4, 2) if dim <= 128 else Config(32, 16, 4, 1)
    if dim <= 64:
        if work != "plain":
            return Config(64, 64, 4, 3, registers=168)  # ALiBi 302, dropout 180; (128, 64, 4, 3, False) 292, 187
        # Four programs. 1K 321 / 409, 4K 433 / 465, 16K 466 / 477; (128, 64, 4, 3, False) 269 / 334, 375 / 403, 418 / 418,
        # (64, 128, 4, 2) with 168 registers 266 / 371, 402 / 450, 454 / 476
        return Config(64, 64, 4, 3, owned=1, registers=128)
    if dim <= 128:
        if work == "biased":
            return Config(64, 64, 4, 2)  # 314; with a third stage, one program a multiprocessor, 240
        if work == "modified":
            return Config(64, 64, 4, 3)  # dropout 342, softcap 417, ALiBi 447; by addresses 322, 402, 458
        if keys <= 512 and uneven:
            # 512 causal 228; by descriptors 204, (64, 64, 4, 3, False) 209
            return Config(64, 32, 4, 3, False, registers=168)
        # 1K 341 / 472, 4K 508 / 546, 16K 568 / 576; q in shared memory 335 / 443, 484 / 511, 535 / 534
        return Config(64, 64, 4, 3, owned=1)
    if dim <= 256:
        return Config(128, 64, 8, 2, False)  # 1K 345 / 435, 4K 511 / 518, 16K 569 / 546; by descriptors 5% less
    return Config(64, 32, 8, 1) if dim <= 512 else Config(32, 32, 8, 1)


def pick_dkdv(dim: int, dtype: torch.dtype, keys: int, uneven: bool, work: str) -> tuple[Config, Config]:
    """Of dk and of dv, for the larger of the two head dims: where both are equal, one kernel computes both.

    The kernel owns `block_n` keys and walks tiles of `block_m` rows. Beyond 128 columns one kernel cannot hold both
    sums in registers: computing p twice costs less than spilling them.
    """
    if dtype == torch.float32:
        config = Config(32, 64, 4, 1) if dim <= 64 else Config(32, 32, 4, 1) if dim <= 128 else Config(16, 16, 4, 1)
        return config, config
    if dim <= 64:
        # 1K 315 / 421, 4K 451 / 510, 16K 510 / 536, dropout 226, softcap 261, ALiBi 390; (128, 64, 4, 2) 292 / 419, 446 / 510,
        # 515 / 547, 137, 154, 247
        config = Config(64, 64, 4, 3)
        if work == "plain" and uneven and keys <= 512:
            config = Config(32, 64, 4, 3, registers=168)  # 512 causal 234; (64, 64, 4, 3) 216, with a limit 190
        return config, config
    if dim <= 128:
        if work == "biased":
            config = Config(64, 64, 4, 1)  # 305; (32, 64, 4, 2) 286, (64, 64, 4, 2) 202
        elif work == "modified":
            config = Config(32, 64, 4, 3)  # dropout 366, softcap 484, ALiBi 477; (64, 64, 4, 2) 260, 373, 390
        else:
            # 1K 369 / 454, 4K 564 / 579, 16K 641 / 561; (32, 64, 4, 3) 365 / 451, 504 / 543, 558 / 563; turned 16K 646 / 622,
            # 4K full 636 instead of 583, a window of 1K 436 instead of 462
            config = Config(64, 64, 4, 2, turned=not uneven)
        return config, config
    if dim <= 256:
        # dk 1K 346 / 459, 16K 519 / 573, (64, 64, 4, 2) 275 / 368, 456 / 425; dv 1K 342 / 463, 16K 604 / 610, (64, 128, 8, 2)
        # 332 / 425, 575 / 544; one kernel (64, 64, 8, 2) 16K 378 / 339; dk turned 16K 530 / 550
        of_dk = Config(32, 128, 8, 3, False)
        if work != "plain":
            return of_dk, Config(32, 128, 8, 4)
        # k in registers: dv 1K 394 / 488, 4K 608 / 611, 16K 698 / 620; turned 371 / 512, 584 / 666, 680 / 704
        return of_dk, Config(32, 128, 8, 4, owned=1, turned=not uneven)
    config = Config(16, 32, 8, 1) if dim <= 512 else Config(16, 16, 8, 1)
    return config, config


def pick_dq(dim: int, dtype: torch.dtype, keys: int, uneven: bool, work: str) -> Config:
    """For the larger of the two head dims; the kernel owns `block_m` rows and walks tiles of `block_n` keys."""
    if dtype == torch.float32:
        return Config(64, 32, 4, 1) if dim <= 128 else Config(16, 16, 4, 1)
    if dim <= 64:
        if work != "plain":
            return Config(
                64, 64, 4, 3, registers=168
            )  # dropout 311, softcap 258, ALiBi 460; (128, 64, 4, 3) 270, 211, 425
        # Four programs. 1K 377 / 513, 4K 545 / 602, 16K 603 / 641; (64, 64, 4, 3) 329 / 525, 475 / 596, 518 / 624,
        # (128, 64, 4, 3) 354 / 480, 526 / 565, 595 / 594; 512 causal 262, with 168 registers 260
        return Config(64, 64, 4, 2, registers=128)
    if dim <= 128:
        if work != "plain":
            return Config(128, 64, 8, 3)  # ALiBi 599; (64, 64, 4, 2) 513
        if keys > 1024 and uneven:
            return Config(128, 64, 8, 3)  # the whole pass, causal, 4K 391, 16K 456; with the next one 383, 446
        # q and do in registers: 4K full 668, 16K full 698, window of 1K 538; two stages 600, 592, 507; (128, 64, 8, 3) 647,
        # 689, 447
        return Config(64, 64, 4, 3, owned=2)
    if dim <= 256:
        if work != "plain":
            return Config(128, 32, 8, 3, False)
        # q in registers: 1K 433 / 549, 4K 631 / 656, 16K 705 / 695; without, by addresses 409 / 507, 578 / 594, 648 / 616, by
        # descriptors 16K 583 / 587
        return Config(128, 32, 8, 3, owned=1)
    return Config(16, 32, 8, 1) if dim <= 512 else Config(16, 16, 8, 1)


def pick_decode(dim: int, dtype: torch.dtype, rows: int) -> Config:
    """For the larger of the two head dims and tiles of that many rows; the kernel walks tiles of `block_n` keys."""
    if dtype == torch.float32:
        return Config(rows, 32, 4, 2) if dim <= 128 else Config(min(rows, 32), 16, 4, 1)
    if dim <= 128:
        # One query, 16 sequences of 16K keys, 32/8 heads of 128, undivided: 4,458 GB/s of keys and values; by descriptors
        # 4,445, 3 stages 4,376, 128 keys 4,455. Divided in 2, 4 and 8: 4,286, 4,256, 4,154.
        return Config(rows, 64, 4, 4, False)
    return Config(min(rows, 32), 32, 4, 2)


def traits(call: Lowered) -> tuple[int, bool, str, bool]:
    """What of a call decides about tiles: (`width`, whether rows see different keys, `work`, whether tiles are listed)."""
    return call.width, bool(call.bound.masks), call.work, call.lists_tiles


def _room(device: torch.device, work: str, listed: bool) -> dict[str, int]:
    """What `fitted` is told of the memory for tiles."""
    return {"limit": shared_memory(device) - LISTS * listed, "of_pair": BIAS * (work == "biased")}


#: Programs of the ordinary kernel on one multiprocessor at one time.
RESIDENT = 2


def decodes(call: Lowered, group: int, dim: int) -> bool:
    """Whether a call is for the decode kernel: few rows, and heads that share keys or too few programs otherwise.

    Or more rows of up to 128 columns, 16K keys, 32/8 heads; us, and those of the ordinary kernel: 1 sequence of 32 rows 53,
    179; of 64 87, 180; of 128 138, 180; 4 sequences of 16 rows 102, 182; of 32 141, 182; of 64 186, 182.
    """
    rows, slots = call.lengths.max_q, multiprocessors(call.device)
    if rows * group > DECODE_ROWS:
        return dim <= 128 and packs(call.B, call.H, group, rows, call.reach, slots)
    return group > 1 or call.B * call.H < RESIDENT * slots


def decode_config(
    D: int, Dv: int, dtype: torch.dtype, device: torch.device, rows: int, heads: int, keys: int
) -> DecodeConfig:
    """The measured tiles of the decode kernel, as far as they fit the device, and the parts of the keys.

    Args:
        D, Dv, dtype, device: of the call.
        rows: of one sequence and kv head.
        heads: sequences times kv heads.
        keys: that the rows of one sequence see at most.
    """
    tiled = _decode_tiles(D, Dv, dtype, device, rows)
    # By tiles, not keys: a cache of keys and values that grows by one at each step finds its config here.
    return _decode_parts(tiled, heads * cdiv(rows, tiled.block_m), cdiv(keys, tiled.block_n), multiprocessors(device))


@lru_cache(maxsize=1024)
def _decode_tiles(D: int, Dv: int, dtype: torch.dtype, device: torch.device, rows: int) -> Config:
    owned, streamed = padded(D) * dtype.itemsize, (padded(D) + padded(Dv)) * dtype.itemsize
    picked = pick_decode(max(D, Dv), dtype, min(DECODE_ROWS, padded(max(1, rows))))
    return fitted(picked, owned, streamed, True, shared_memory(device))


@lru_cache(maxsize=1024)
def _decode_parts(tiled: Config, programs: int, tiles: int, slots: int) -> DecodeConfig:
    return DecodeConfig(**asdict(tiled), splits=splits(tiles, max(1, programs), slots))


@lru_cache(maxsize=1024)
def forward_config(
    D: int, Dv: int, dtype: torch.dtype, device: torch.device, keys: int, uneven: bool, work: str, listed: bool
) -> Config:
    """The measured tiles of the forward kernel, as far as they fit the device."""
    owned, streamed = padded(D) * dtype.itemsize, (padded(D) + padded(Dv)) * dtype.itemsize
    picked = pick_forward(max(D, Dv), dtype, keys, uneven, work)
    return fitted(picked, owned, streamed, True, **_room(device, work, listed))


@lru_cache(maxsize=1024)
def backward_configs(
    D: int, Dv: int, dtype: torch.dtype, device: torch.device, keys: int, uneven: bool, work: str, listed: bool
) -> tuple[Config, Config, Config]:
    """The same for dq, dk and dv."""
    width, room, dim = (padded(D) + padded(Dv)) * dtype.itemsize, _room(device, work, listed), max(D, Dv)
    of_dk, of_dv = pick_dkdv(dim, dtype, keys, uneven, work)
    keys_of_dv = width if of_dk == of_dv else padded(D) * dtype.itemsize
    return (
        fitted(pick_dq(dim, dtype, keys, uneven, work), width, width, True, **room),
        fitted(of_dk, width, width, False, **room),
        fitted(of_dv, keys_of_dv, width, False, **room),
    )
