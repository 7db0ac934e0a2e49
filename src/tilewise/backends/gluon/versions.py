"""What Triton's versions name differently. Kernels of this folder take these from here, and nothing else depends on a version.

| here | Triton 3.6 | Triton 3.9 |
|---|---|---|
| `thread_barrier()` | `gl.thread_barrier` | `gl.barrier` |
| `copy_in(desc, start, barrier, tile)` | `tma.async_copy_global_to_shared` | `tma.async_load` |
| `copy_out(desc, start, tile)` | `tma.async_copy_shared_to_global` | `tma.async_store` |
| `add_to(desc, start, tile)` | no name for it | `tma.async_atomic_add` |
| `reinterpreted(tile, dtype, shape, layout)` | `tile._reinterpret` | `tile.reinterpret` |
"""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

NEWER = hasattr(gl, "barrier")

thread_barrier = gl.barrier if NEWER else gl.thread_barrier
copy_in = tma.async_load if NEWER else tma.async_copy_global_to_shared
copy_out = tma.async_store if NEWER else tma.async_copy_shared_to_global


@builtin
def add_to(desc, start, tile, _semantic=None):
    """Have the copy engine add a tile in shared memory to the box of `desc` at `start`."""
    start = _semantic._convert_to_ir_values(start, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, start, tile.handle)


@builtin
def reinterpreted(tile, dtype, shape, layout, _semantic=None):
    """The memory of a tile as one of another dtype, shape and layout."""
    method = tile.reinterpret if NEWER else tile._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
