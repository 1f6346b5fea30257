"""Conversion of canonical tensors to stored ones and back: chains of steps, one recipe per layer."""
