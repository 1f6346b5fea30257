"""Checkpoint storage formats that can be read and given back, one file each."""
