# mypy: ignore-errors
"""What Gluon calls by other names in other versions of Triton, by one name."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first_of(place, *names):
    return next(getattr(place, name) for name in names if hasattr(place, name))


async_load = _first_of(async_copy, "async_load", "async_copy_global_to_shared")
"""cp.async: each thread copies from its pointers into shared memory."""

tma_load = _first_of(tma, "async_load", "async_copy_global_to_shared")
"""A box of a tensor descriptor into shared memory; an mbarrier counts its bytes."""

reinterpret = _first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
"""``reinterpret(shared, dtype, shape, layout)``: the same shared memory as another array."""

thread_barrier = _first_of(gl, "barrier", "thread_barrier")
"""All threads of a program, or of a partition of it, wait for each other."""
