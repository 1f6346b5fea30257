"""Timing of kernel calls: cold caches, interleaved rounds, device rates."""
