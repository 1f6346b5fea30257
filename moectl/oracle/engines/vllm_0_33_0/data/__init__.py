"""Lists of vLLM 0.33.0, as JSON files."""

from pathlib import Path

GRID = Path(__file__).with_name("grid.json")
"""Inputs behind the names in recorded decisions: models, schemes, devices, deployments, package profiles."""
TUNED = Path(__file__).with_name("tuned.json")
"""Tuned files that the release ships."""
VARIABLES = Path(__file__).with_name("variables.json")
"""Every environment variable that the release knows."""
