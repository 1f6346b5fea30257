"""Modular kernels: prepare and finalize around the experts of one layer."""
