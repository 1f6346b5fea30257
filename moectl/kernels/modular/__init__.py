"""Modular fused-MoE kernels: prepare, the experts of one layer, finalize."""
