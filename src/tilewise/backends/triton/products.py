"""Products of tiles that Triton's kernels share."""

import triton
import triton.language as tl


@triton.jit
def product_from(start, x, y, PRECISION: tl.constexpr):
    """``start + x y^T``: `start` is what the sums begin with, broadcast to the tile."""
    return tl.dot(x, tl.trans(y), tl.broadcast_to(start, [x.shape[0], y.shape[0]]), input_precision=PRECISION)
