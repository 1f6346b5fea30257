"""A layer of every packing, from a file on the disk through plain torch, held to the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from moectl.checkpoint.storage import PER_EXPERT, Storage
from moectl.convert.manifest import read_file_header
from moectl.prepare import checkpoint_layer
from moectl.run import choose_backends, run_layer, this_machine

from .stored import cases, make_layer
from .test_storages import READABLE, storage_id

ONE_EACH: dict[object, Storage] = {
    (it.format.packing, it.weight): it
    for it in reversed(READABLE)
    if it.arrangement in (PER_EXPERT, "fused_blocks")
}


@pytest.mark.parametrize("storage", ONE_EACH.values(), ids=storage_id)
def test_a_layer_runs_from_its_storage(storage: Storage, tmp_path: Path) -> None:
    layer = make_layer(list(cases(storage))[-1])
    save_file({name: t.contiguous() for name, t in layer.contents().items()}, tmp_path / "f")
    headers = read_file_header(tmp_path, "f", (tmp_path / "f").stat().st_size)
    checkpoint = replace(layer.checkpoint()[0], tensors=headers, folder=tmp_path)
    opened, machine = checkpoint_layer(checkpoint), this_machine("cpu")
    (backend,) = choose_backends(opened.problem, machine)
    assert backend == "torch"
    result = run_layer(opened, backend, machine, tokens=4, repeats=1)
    assert result.check.ok, result.check
    assert float(result.y.float().abs().max()) > 0
