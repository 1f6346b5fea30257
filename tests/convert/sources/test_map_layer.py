"""Every built-in model's headers are mapped: no tensor of its experts is unknown, and all rows are filled."""

from __future__ import annotations

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.convert.sources import map_layer
from support.sampling import every_nth


@pytest.mark.parametrize("name", every_nth(model_names(), 3))
def test_every_built_in_model_is_mapped(name: str) -> None:
    checkpoint = open_checkpoint(name, offline=True)
    for group in checkpoint.groups:
        layer = group.layers[0]
        mapped = map_layer(checkpoint, group, layer)
        assert {it.mapping.stored for it in mapped.mapped} == group.names.experts.keys()
        for role, (_, shape) in mapped.shapes.items():
            rows = sorted(it.mapping.rows for it in mapped.mapped if it.mapping.role == role)
            assert [first for first, _ in rows] == [0, *(last for _, last in rows[:-1])]
            assert rows[-1][1] == shape[1]
