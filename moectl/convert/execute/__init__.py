"""Execution of conversion plans: layer by layer, with bounded memory, resumable."""
