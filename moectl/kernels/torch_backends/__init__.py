"""Backends in plain torch: any layout, CPU or GPU."""
