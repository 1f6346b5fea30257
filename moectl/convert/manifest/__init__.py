"""The manifest of a converted directory: its records, checked when read."""
