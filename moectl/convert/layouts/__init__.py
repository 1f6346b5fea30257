"""Kernel weight layouts, one file each."""
