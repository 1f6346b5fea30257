"""Compiles kernels for any GPU on a machine without one, and inspects their machine code."""
