"""Fused-MoE runners, their kernels, the reference, timing."""
