"""Directories of compiled kernels that are written by several processes, or not to their end."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from moectl.errors import Unavailable
from moectl.files.atomic import write_file
from moectl.files.lock import folder_lock
from moectl.kernels.triton import layer_binaries
from moectl.layer import kernel_files
from moectl.layer.kernel_files import INDEX, export_kernels


def test_an_interrupted_export_goes_on_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before is not listed, so that a reader takes none of it."""
    triton_cache, folder = tmp_path / "triton", tmp_path / "kernels"
    monkeypatch.setattr(kernel_files, "cache_directory", lambda: triton_cache)
    binaries = [SimpleNamespace(name="k", key=key * 52, cached=True) for key in "AB"]
    for binary in binaries:
        (triton_cache / binary.key).mkdir(parents=True)
        for suffix in ("json", "cubin"):
            (triton_cache / binary.key / f"k.{suffix}").write_text(binary.key)

    def full(path: Path, data: bytes) -> None:
        if path.parent.name == "B" * 52:
            raise Unavailable("the disk is full")
        write_file(path, data)

    monkeypatch.setattr(kernel_files, "write_file", full)
    with pytest.raises(Unavailable, match="full"):
        export_kernels(binaries, folder)  # type: ignore[arg-type]
    assert not kernel_files.read_index(folder).kernels
    monkeypatch.setattr(kernel_files, "write_file", write_file)
    assert export_kernels(binaries, folder) == 2  # type: ignore[arg-type]
    assert set(kernel_files.read_index(folder).kernels) == {"A" * 52, "B" * 52}


def test_of_two_exports_neither_loses_the_others_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    export_kernels([], folder)
    with folder_lock(folder):
        other = threading.Thread(target=export_kernels, args=([], folder))
        other.start()
        other.join(0.1)
        assert other.is_alive()
    other.join(10)
    assert [path.name for path in folder.iterdir()] == [INDEX]


def test_another_python_or_build_of_triton_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    export_kernels([], folder)
    assert kernel_files.differences(folder) == []
    here = layer_binaries.compiler()
    assert set(kernel_files.read_index(folder).built) > {"moectl", "triton", *here}
    monkeypatch.setattr(layer_binaries.sys, "version_info", (3, 99, 0))
    monkeypatch.setattr(layer_binaries, "triton_key", lambda: "another library")
    there = [f"{name} {here[name]} there, {layer_binaries.compiler()[name]} here" for name in here]
    assert kernel_files.differences(folder) == there and there[0].endswith("there, 3.99 here")
