"""Kernels of other libraries as backends."""
