"""Readers of untrusted input, and changed inputs to break them with."""
