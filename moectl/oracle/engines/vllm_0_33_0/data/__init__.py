"""Lists of vLLM 0.33.0, and of names by release, as JSON files."""

from pathlib import Path

GRID = Path(__file__).with_name("grid.json")
"""Inputs behind the names in recorded decisions: models, schemes, devices, deployments, package profiles."""
TUNED = Path(__file__).with_name("tuned.json")
"""Tuned files, with the releases that ship them."""
NAMES = Path(__file__).with_name("names.json")
"""Environment variables, backends and exchanges of the command line, with the releases that know them."""
