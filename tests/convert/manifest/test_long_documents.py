"""Manifests, reports and logs that are too long are refused before their entries are looked at."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moectl.convert.manifest.manifest import load_directory
from moectl.convert.manifest.manifest_records import LOG, MANIFEST, READY, REPORT, ready_bytes
from moectl.convert.manifest.progress_log import open_log
from moectl.convert.manifest.signed_document import LONGEST_LIST, LONGEST_MANIFEST
from moectl.convert.portable.report_fragments import read_report
from moectl.errors import CheckpointError


@pytest.mark.parametrize("name", ["files", "layers", "rest", "ranks"])
def test_a_manifest_of_too_many(name: str, tmp_path: Path) -> None:
    for count, refusal in ((LONGEST_LIST, "is incomplete"), (LONGEST_LIST + 1, f"lists 65537 '{name}'")):
        data = json.dumps({"format_version": 2, name: [0] * count}).encode()
        (tmp_path / MANIFEST).write_bytes(data)
        (tmp_path / READY).write_bytes(ready_bytes(data))
        with pytest.raises(CheckpointError, match=refusal):
            load_directory(tmp_path)


@pytest.mark.parametrize("name", ["experts", "files"])
def test_a_report_of_too_many(name: str, tmp_path: Path) -> None:
    for count, refusal in ((LONGEST_LIST, "is incomplete"), (LONGEST_LIST + 1, f"lists 65537 '{name}'")):
        (tmp_path / REPORT).write_text(json.dumps({name: [0] * count}))
        with pytest.raises(CheckpointError, match=refusal):
            read_report(tmp_path)


def test_a_log_without_end(tmp_path: Path) -> None:
    (tmp_path / LOG).touch()
    os.truncate(tmp_path / LOG, 1 << 40)
    with pytest.raises(CheckpointError, match=f"{1 << 40} bytes, expected at most {LONGEST_MANIFEST}"):
        open_log(tmp_path, {})
    assert (tmp_path / LOG).stat().st_size == 1 << 40
