"""A kernel with a fault, by which a memory checker can show that it sees."""

import torch
import triton
import triton.language as tl


@triton.jit
def out_of_bounds_kernel(x):
    tl.store(x + (1 << 22), 1.0)


def write_out_of_bounds() -> None:
    out_of_bounds_kernel[(1,)](torch.zeros(16, device="cuda"))
    torch.cuda.synchronize()
