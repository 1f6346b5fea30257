"""Portable outputs: ordinary checkpoints in the formats that engines load."""
