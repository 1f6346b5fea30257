"""A process that imports an engine, in place of moectl, and writes the engine's decisions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from moectl.errors import MoectlError
from moectl.oracle.engines.vllm_0_33_0.own_code import WORKER

STAND_INS = WORKER.parent
"""The folder with `stand_ins`, which every worker imports by that name."""


def ask_worker(
    worker: Path, source: Path | None, document: dict[str, Any], subject: str
) -> list[dict[str, Any]]:
    """The rows that the script `worker` writes to the file `out` of its question.

    `source` is the folder with the engine's package; None: as installed. The script reads `document`, with
    `out`, as JSON from standard input. Raises MoectlError if it fails: `subject` could not be asked.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.jsonl")
        found = [str(path) for path in (source, STAND_INS) if path is not None]
        ran = subprocess.run(
            [sys.executable, str(worker)],
            input=json.dumps({**document, "out": str(out)}),
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(found), "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            stderr=subprocess.PIPE,
        )
        if ran.returncode:
            raise MoectlError(f"{subject} could not be asked: {ran.stderr[-2000:]}")
        with out.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
