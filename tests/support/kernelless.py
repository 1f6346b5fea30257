"""A checkpoint whose layers none of moectl's kernels take."""

from pathlib import Path

from moectl.synth import synthesize


def without_kernels(folder: Path) -> Path:
    """A small Mixtral in `folder` whose experts have GELU without approximation."""
    synthesize("mistralai/Mixtral-8x7B-v0.1", folder, layers=1, hidden=256, intermediate=128)
    config = folder / "config.json"
    text = config.read_text()
    assert '"hidden_act": "silu"' in text
    config.write_text(text.replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    return folder
