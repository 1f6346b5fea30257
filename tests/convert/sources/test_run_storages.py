"""A layer of every packing, from a file on the disk through plain torch, held to the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moectl.checkpoint.tensors.storage import PER_EXPERT, Storage
from moectl.convert.layouts.registry import layout_named
from moectl.convert.manifest.manifest import read_file_header
from moectl.layer.prepare import checkpoint_layer
from moectl.run import choose_backends, run_layer, this_machine
from support.stored_layers import cases, make_layer

from .test_storages import READABLE, storage_id

ONE_EACH: dict[object, Storage] = {
    (it.format.packing, it.weight): it
    for it in reversed(READABLE)
    if it.arrangement.name in (PER_EXPERT, "fused_blocks")
}


@pytest.mark.parametrize("storage", ONE_EACH.values(), ids=storage_id)
def test_a_layer_runs_from_its_storage(storage: Storage, tmp_path: Path) -> None:
    layer = make_layer(list(cases(storage))[-1])
    save_file({name: t.contiguous() for name, t in layer.contents().items()}, tmp_path / "f")
    headers = read_file_header(tmp_path, "f", (tmp_path / "f").stat().st_size)
    checkpoint = replace(layer.checkpoint()[0], tensors=headers, folder=tmp_path)
    opened, machine = checkpoint_layer(checkpoint), this_machine("cpu")
    backends = choose_backends(opened.problem, machine).names
    assert "torch" in backends
    for backend in backends:
        result = run_layer(opened, backend, machine, tokens=4, repeats=1)
        assert result.check.ok, (backend, result.check)
        assert float(result.y.float().abs().max()) > 0


OWN = layout_named("moectl-mtile64")
HELD = [
    storage for storage in ONE_EACH.values() if any(case.weight in OWN.weights for case in cases(storage))
]


@pytest.mark.parametrize("storage", HELD, ids=storage_id)
def test_moectls_own_layout_holds_the_same_weights(storage: Storage, tmp_path: Path) -> None:
    held = 0
    for case in cases(storage):
        layer = make_layer(case)
        save_file({name: t.contiguous() for name, t in layer.contents().items()}, tmp_path / "f")
        headers = read_file_header(tmp_path, "f", (tmp_path / "f").stat().st_size)
        opened = checkpoint_layer(replace(layer.checkpoint()[0], tensors=headers, folder=tmp_path))
        refusals = list(OWN.refusals(OWN.pad(opened.problem)))
        if refusals:
            assert "F16 scales, got F32" in refusals[0] or opened.problem.act_order == "group"
            continue
        held += 1
        prepared = opened.prepared("moectl", "cpu")
        for expert in range(opened.problem.experts):
            assert torch.equal(prepared.expert(expert).w13, opened.reference(expert).w13)
            assert torch.equal(prepared.expert(expert).w2, opened.reference(expert).w2)
    assert held


def test_integers_with_and_without_zero_points_are_among_them() -> None:
    formats = {case.weight for storage in HELD for case in cases(storage)}
    assert {(weight.bits, weight.zero_point) for weight in formats if weight.name != "mxfp4"} >= {
        (4, False), (4, True), (8, False), (8, True)
    }  # fmt: skip
    assert {"gptq", "awq"} <= {storage.format.packing for storage in HELD}
