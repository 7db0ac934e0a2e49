"""GPUs as data: sizes and peak rates as their makers print them, each with its source.

Peaks are dense (no structured sparsity), at the boost clock, with float32 accumulation. Exponentials: the CUDA C++ programming
guide gives 16 special-function results per clock and SM for compute capabilities 7.5 to 10.0; for a GPU where no source
was found the rate is None, and no bound is computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KIB, MIB, GB, TERA = 1024, 1 << 20, 10**9, 10**12
PER_CLOCK = 16  # exponentials of one SM
#: Maximum shared memory per SM by compute capability: CUDA C++ programming guide, "Technical specifications".
SHARED = {"7.5": 64, "8.0": 164, "8.9": 100, "9.0": 228, "10.0": 228}


@dataclass(frozen=True)
class Gpu:
    """One GPU. Bytes and bytes per second; FLOP/s; SRAM is what one SM (or compute unit) can give to tiles."""

    name: str
    title: str
    sms: int
    sram: int  # bytes per SM
    l2: int
    memory: int
    bandwidth: float
    matrix16: float  # FLOP/s of fp16 and bf16 products
    matrix8: float | None  # of FP8 products
    matrix32: float  # of fp32 products: TF32 where there is a unit for it
    vector: float  # of fp32 arithmetic outside of matrix units, a fused multiply-add as two
    clock: float | None  # Hz, for exponentials
    source: str

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of products in this dtype.

        Raises:
            ValueError: no peak is known for the dtype.
        """
        if dtype in (torch.float16, torch.bfloat16):
            return self.matrix16
        if dtype == torch.float32:
            return self.matrix32
        raise ValueError(f"no peak for {dtype} is listed for {self.title}; give fp16, bf16 or fp32")

    @property
    def exponentials(self) -> float | None:
        """Exponentials per second."""
        return None if self.clock is None else self.sms * PER_CLOCK * self.clock


def _gpu(name: str, title: str, sms: int, sram_kib: int, l2_mib: int, memory_gb: int, bandwidth_gbs: float,
         tflops: tuple[float, float | None, float, float], clock_ghz: float | None, source: str) -> Gpu:  # fmt: skip
    matrix16, matrix8, matrix32, vector = tflops
    return Gpu(
        name, title, sms, sram_kib * KIB, l2_mib * MIB, memory_gb * GB, bandwidth_gbs * GB, matrix16 * TERA,
        None if matrix8 is None else matrix8 * TERA, matrix32 * TERA, vector * TERA,
        None if clock_ghz is None else clock_ghz * 1e9, source,
    )  # fmt: skip


#: TFLOP/s in the order 16 bits, 8 bits, TF32, fp32 outside of matrix units.
_HOPPER = (989.4, 1978.9, 494.7, 66.9)

GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", "T4", 40, SHARED["7.5"], 4, 16, 320, (65, None, 8.1, 8.1), 1.59,
             "NVIDIA T4 datasheet; NVIDIA Turing GPU architecture whitepaper (TU104, appendix A); no TF32: fp32 is FMA code"),
        _gpu("a100-40gb", "A100 SXM4 40 GB", 108, SHARED["8.0"], 40, 40, 1555, (312, None, 156, 19.5), 1.41,
             "NVIDIA A100 Tensor Core GPU architecture whitepaper v1.0, table 4: the FlashAttention paper's GPU"),
        _gpu("a100", "A100 SXM4 80 GB", 108, SHARED["8.0"], 40, 80, 2039, (312, None, 156, 19.5), 1.41,
             "NVIDIA A100 80GB datasheet (SXM4); NVIDIA A100 architecture whitepaper v1.0"),
        _gpu("h100", "H100 SXM5", 132, SHARED["9.0"], 50, 80, 3350, _HOPPER, 1.83,
             "NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2; NVIDIA H100 datasheet; Hopper tuning guide"),
        _gpu("h200", "H200 SXM", 132, SHARED["9.0"], 60, 141, 4800, _HOPPER, 1.83,
             "NVIDIA H200 datasheet (141 GB, 4.8 TB/s; compute as H100 SXM); L2 as CUDA's device query gives it"),
        _gpu("h200-measured", "H200 SXM, measured", 132, SHARED["9.0"], 60, 141, 4297, (775, 1450, 494.7, 66.9), 1.83,
             "on one NVIDIA H200, 2026-11-29: cuBLAS bf16 and e4m3 8192^3 in a burst, device copy of 4.3 GB; rest as h200"),
        _gpu("b200", "B200 SXM", 148, SHARED["10.0"], 126, 180, 8000, (2250, 4500, 1100, 80), 1.85,
             "NVIDIA DGX B200 datasheet (1,440 GB, 64 TB/s over 8); HGX B200 rates; SMs and L2: Chips and Cheese, "
             "'Nvidia's B200: Keeping the CUDA Juggernaut Rolling'; clock from 2250 / (148 SMs x 8192)"),
        _gpu("mi300x", "Instinct MI300X", 304, 64, 32, 192, 5300, (1307.4, 2614.9, 653.7, 163.4), None,
             "AMD Instinct MI300X data sheet; ROCm 'GPU specifications' (LDS 64 KiB; L2 8 x 4 MiB, L3 256 MiB)"),
        _gpu("rtx4090", "GeForce RTX 4090", 128, SHARED["8.9"], 72, 24, 1008, (165.2, 330.3, 82.6, 82.6), 2.52,
             "NVIDIA Ada GPU architecture whitepaper, appendix A; Ada tuning guide"),
    )
}  # fmt: skip


def gpu_of(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        ValueError: it is not in the table.
    """
    if name not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]


def markdown_table() -> str:
    """The table as docs/io-model.md shows it."""
    head = "| `--gpu` | SMs x SRAM | L2 | memory | bandwidth | 16 / 8 / 32 bits | exponentials | source |"
    lines = [head, "|" + "---|" * 8]
    for gpu in GPUS.values():
        peaks = " / ".join("-" if p is None else f"{p / TERA:,.0f}" for p in (gpu.matrix16, gpu.matrix8, gpu.matrix32))
        exponentials = "-" if gpu.exponentials is None else f"{gpu.exponentials / TERA:.1f} T/s"
        cells = (
            f"`{gpu.name}`", f"{gpu.sms} x {gpu.sram // KIB} KiB", f"{gpu.l2 // MIB} MiB", f"{gpu.memory // GB} GB",
            f"{gpu.bandwidth / TERA:.2f} TB/s", f"{peaks} TFLOP/s", exponentials, gpu.source,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
