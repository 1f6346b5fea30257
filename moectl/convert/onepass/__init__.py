"""Chains of steps composed into one pass over a tensor, on CPUs and GPUs."""
