"""Recording of one release: its files, a process that imports them, and the decisions in the cells' order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from devtools.conformance import read_decisions
from devtools.conformance.grid import CELL
from moectl.errors import MoectlError, Unavailable
from moectl.oracle.engines.vllm_0_33_0.own_code import WORKER

from .wheel import wheel_files

DEPENDENCIES = (
    "humming-kernels",
    "compressed-tensors==0.17.0",
    "cachetools",
    "pybase64",
    "cbor2",
    "pyzmq",
    "psutil",
    "cloudpickle",
    "blake3",
    "py-cpuinfo",
    "msgspec",
    "prometheus_client",
)
"""Small packages that vLLM imports, beside those of moectl's own environment."""
IMPORTED = ("torch", "triton", "transformers", "pydantic", "flashinfer")
"""Large ones that must be installed: FlashInfer's functions decide, and nothing stands in for torch."""


def read_cells(recordings: Sequence[Path]) -> list[dict[str, Any]]:
    """The cases of `recordings`, each once. Raises UsageError for a file that cannot be read."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for path in recordings:
        for _, row in read_decisions(path):
            cell = {name: row[name] for name in CELL}
            found.setdefault(tuple(cell.values()), cell)
    return list(found.values())


def record(
    version: str, cells: list[dict[str, Any]], grid: dict[str, Any], cache: Path, jobs: int
) -> Iterator[dict[str, Any]]:
    """vLLM's decisions in `cells`, in that order.

    `cache` keeps downloaded files, outside of the repository. Raises UsageError for a version that PyPI does
    not have, Unavailable without a network or a package of `IMPORTED`, MoectlError if the release cannot be
    asked.
    """
    if missing := [name for name in IMPORTED if find_spec(name) is None]:
        raise Unavailable(
            f"recording needs {', '.join(missing)}, which this Python ({sys.executable}) does not have",
            hint="run it in moectl's environment, with '.[run]' and flashinfer-python installed",
        )
    site, dependencies = wheel_files("vllm", version, cache), _dependencies(cache)
    with tempfile.TemporaryDirectory() as folder:
        document = {"grid": grid, "cells": cells, "jobs": jobs, "out": folder}
        # The folder of this package must not come first: its modules have common names.
        path = os.pathsep.join((str(site), str(dependencies)))
        ran = subprocess.run(
            [sys.executable, str(WORKER)],
            input=json.dumps(document),
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            stdout=sys.stderr,
        )
        if ran.returncode:
            raise MoectlError(f"vLLM {version} could not be asked about every cell; its errors are above")
        rows: dict[tuple[object, ...], dict[str, Any]] = {}
        for written in Path(folder).glob("*.jsonl"):
            with written.open(encoding="utf-8") as lines:
                for row in map(json.loads, lines):
                    rows[tuple(row[name] for name in CELL)] = row
        yield from (rows[tuple(cell.values())] for cell in cells)


def _dependencies(cache: Path) -> Path:
    """The folder with what vLLM imports and moectl does not, installed if it is not there."""
    folder = cache / "dependencies"
    if not folder.is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, *DEPENDENCIES], check=True, stdout=sys.stderr)
    return folder
