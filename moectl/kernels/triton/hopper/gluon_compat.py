# mypy: ignore-errors
"""Gluon functions whose names differ between versions of Triton, each under one name."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first_of(namespace, *names):
    return next(getattr(namespace, name) for name in names if hasattr(namespace, name))


async_load = _first_of(async_copy, "async_load", "async_copy_global_to_shared")
"""cp.async: each thread copies from its pointers into shared memory."""

tma_load = _first_of(tma, "async_load", "async_copy_global_to_shared")
"""Copies a box of a tensor descriptor into shared memory by TMA; an mbarrier counts its bytes."""

reinterpret = _first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
"""``reinterpret(shared, dtype, shape, layout)``: another view of the same shared memory."""

thread_barrier = _first_of(gl, "barrier", "thread_barrier")
"""Barrier of all threads of a program, or of one of its partitions."""
