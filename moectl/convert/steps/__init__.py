"""Reversible steps from canonical tensors to stored ones."""
