"""Converted folders that are loaded for a backend: older layouts, damage, scales that are no numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import Chain, WeightLayout, layout_named
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.recipe.recipe import StoredOutput
from moectl.convert.steps.transforms import Xor
from moectl.convert.steps.value_steps import Shapes
from moectl.errors import CheckpointError
from moectl.layer.prepare import converted_layer, load_prepared, prepare
from moectl.problem.moe_problem import MoEProblem

LAYER = "moectl-layer-00000.experts"


def sign(folder: Path, document: dict[str, Any]) -> None:
    """Writes the manifest with a READY that fits it."""
    data = json.dumps(document).encode()
    (folder / "moectl.json").write_bytes(data)
    (folder / "READY").write_text(hashlib.sha256(data).hexdigest() + "\n")


@pytest.fixture
def folder(gpt_oss: Path, tmp_path: Path) -> Path:
    """A gpt-oss checkpoint in moectl's own layout."""
    out = tmp_path / "out"
    convert(plan_conversion(open_checkpoint(gpt_oss), layout_named("moectl-mtile64")), out)
    return out


def other_version(layout: WeightLayout, version: int) -> WeightLayout:
    """`layout` as a release might have had it that stored its codes inverted."""

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> dict[str, StoredOutput]:
        return {
            role: dataclasses.replace(output, chain=Chain((Xor(255), *output.chain.steps)))
            if role in ("w13", "w2")
            else output
            for role, output in layout.build(problem, shapes, requantize).items()
        }

    return dataclasses.replace(layout, version=version, build=build)


@pytest.mark.parametrize("version", [1, 9])
def test_another_version_of_a_layout_is_laid_out_anew(gpt_oss: Path, tmp_path: Path, version: int) -> None:
    """Its name alone says nothing; the chains in the manifest are the way back, of any version."""
    checkpoint, out = open_checkpoint(gpt_oss), tmp_path / "out"
    layout = other_version(layout_named("moectl-mtile64"), version)
    convert(plan_conversion(checkpoint, layout), out)
    got, wanted = load_prepared(out, 1, "moectl"), prepare(checkpoint, 1, "moectl")
    assert got.relaid == "moectl-mtile64 of another version -> moectl-mtile64"
    assert all(torch.equal(got.weights[role], t) for role, t in wanted.weights.items())


def test_this_version_is_loaded_as_it_is(folder: Path) -> None:
    assert load_prepared(folder, 1, "moectl").relaid == ""


def test_a_step_that_nobody_knows_is_refused(folder: Path) -> None:
    document = json.loads((folder / "moectl.json").read_text())
    document["layout"]["version"] = 9
    document["groups"][0]["roles"]["w13"]["made"]["chain"].append({"step": "twist"})
    sign(folder, document)
    with pytest.raises(CheckpointError, match="is no known step"):
        load_prepared(folder, 0, "moectl")


@pytest.mark.parametrize("backend", ["torch", "moectl"])
def test_a_flipped_bit_is_found_on_loading(folder: Path, backend: str) -> None:
    data = bytearray((folder / LAYER).read_bytes())
    data[-100] ^= 1
    (folder / LAYER).write_bytes(data)
    with pytest.raises(CheckpointError, match="fails its SHA-256 check"):
        load_prepared(folder, 0, backend, check=True)
    assert load_prepared(folder, 1, backend, check=True).nbytes > 0


@pytest.mark.parametrize("backend", ["torch", "moectl"])
def test_a_signed_scale_that_is_no_number_is_refused(folder: Path, backend: str) -> None:
    place = load_manifest(folder).open_layer(0)["w2_scale"]
    data = bytearray((folder / LAYER).read_bytes())
    data[place.start] = 255
    (folder / LAYER).write_bytes(data)
    document = json.loads((folder / "moectl.json").read_text())
    record = next(layer for layer in document["layers"] if layer["layer"] == 0)
    record["sha256"][place.name] = hashlib.sha256(data[place.start : place.end]).hexdigest()
    sign(folder, document)
    with pytest.raises(CheckpointError, match="E8M0 byte 255"):
        converted_layer(load_manifest(folder), 0).prepared(backend, "cpu")
