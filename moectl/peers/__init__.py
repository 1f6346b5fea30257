"""Kernels of other libraries, fetched from PyPI into a directory for comparisons. Imports no torch.

Which files of which wheels is pinned in ``data/peers.json`` with their SHA-256. Nothing is installed into the
user's environment, and nothing that was fetched is executed here.
"""
