# mypy: ignore-errors
"""Gluon's copies by one name, which is not the same in every Triton."""

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first_of(module, *names):
    return next(getattr(module, name) for name in names if hasattr(module, name))


async_load = _first_of(async_copy, "async_load", "async_copy_global_to_shared")
"""cp.async: each thread copies from its pointers into shared memory."""

tma_load = _first_of(tma, "async_load", "async_copy_global_to_shared")
"""A box of a tensor descriptor into shared memory; an mbarrier counts its bytes."""

tma_store = _first_of(tma, "async_store", "async_copy_shared_to_global")
"""Shared memory into a box of a tensor descriptor."""
