"""`scripts/break_bits` flips bits in every kind of byte, and knows who did not notice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from devtools.breaking.bits import Flip, Place, Specimen, Tally, UnnoticedError, places_below, specimens
from safetensors.torch import save_file

KINDS = {
    "converted": {
        "weights",
        "scales",
        "biases",
        "routers",
        "other tensors",
        "headers",
        "moectl.json",
        "READY",
    },
    "ranks": {"a rank's moectl.json", "weights", "metadata of headers", "length of headers"},
    "portable": {"moectl-report.json", "config.json", "model.safetensors.index.json", "scales"},
    "unfinished": {"progress-1-of-1.jsonl", "weights"},
    "source": {"tokenizer.json", "config.json", "weights", "metadata of headers"},
}
"""Some kinds of byte that each thing has."""


def test_flips_in_every_kind_of_byte_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECTL_CACHE", str(tmp_path / "cache"))
    tally = Tally()
    for specimen in specimens(tmp_path):
        assert KINDS[specimen.name] <= specimen.places.keys()
        for kind in specimen.places:
            tally.flip(specimen, kind, 1, seed=3)
    assert tally.defects == []
    assert tally.flips.total() >= 50 and tally.ends.total() > 100
    assert tally.ends["converted: scales", "refused"] >= 4
    assert tally.ends["converted: tokenizer.json", "unaffected"] >= 1


def test_places_cover_every_byte(tmp_path: Path) -> None:
    import torch

    tensors = {"layers.0.mlp.experts.w": torch.ones(3), "router": torch.ones(2), "norm": torch.ones(1)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    (tmp_path / "b.json").write_text("{}")
    found = places_below(tmp_path)
    assert {"weights", "routers", "other tensors", "headers", "metadata of headers", "b.json"} < set(found)
    covered = {
        (place.file, at)
        for places in found.values()
        for place in places
        for at in range(place.start, place.end)
    }
    assert len(covered) == sum(path.stat().st_size for path in tmp_path.iterdir())
    (metadata,) = found["metadata of headers"]
    assert metadata.file.read_bytes()[metadata.start : metadata.end] == b'{"format":"pt"}'


def test_a_flip_that_is_not_noticed_is_a_defect_and_undone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8))

    def check(flip: Flip, number: int) -> str:
        if any(path.read_bytes()) and number == 1:
            raise UnnoticedError("all the same")
        return "refused"

    specimen, tally = Specimen("it", {"bytes": [Place(path, 2, 4)]}, {"a command": check}), Tally()
    assert {specimen.flip("bytes", random.Random(n)).offset for n in range(30)} == {2, 3}
    for number in (0, 1):
        tally.flip(specimen, "bytes", number, seed=0)
    assert path.read_bytes() == bytes(8)
    assert tally.flips["it: bytes"] == 2 and tally.ends["it: bytes", "refused"] == 1
    ((kind, command, bit, words),) = tally.defects
    assert (kind, command, words) == ("it: bytes", "a command", "UnnoticedError: all the same")
    assert bit.endswith("of file")
