"""vLLM's own decisions for one checkpoint's layers, in the Python that runs this file.

Standard input is a JSON document: the tables and cells of a `Recorder`, the device, and `bare`, which is
true for a release of which only the Python files are there. The answer is written as JSON to its `out`;
what else is printed is of no interest.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = str(Path(__file__).resolve().parent)


def answer(document: dict[str, Any]) -> dict[str, Any]:
    """The version that answers, whether it found the device itself, and a row for each cell."""
    if find_spec("vllm") is None:
        return {"absent": True}
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    machine: Any = importlib.import_module("assumed_machine")
    recording: Any = importlib.import_module("cell_recorder")
    while FOLDER in sys.path:
        sys.path.remove(FOLDER)  # Names of modules here are common.
    row, own_device = document["device"], False
    if document["bare"]:
        machine.stand_in()
        machine.set_machine(set(document["packages"]), document["env"], row)
    else:
        os.environ |= document["env"]
        own_device = found_itself(row)
        if not own_device:
            machine.set_device(row)
    version = importlib.import_module("vllm").__version__
    recorder = recording.Recorder(document["grid"], row)
    rows = [recorder.record(cell) for cell in document["cells"]]
    return {"version": version, "own_device": own_device, "rows": rows}


def found_itself(row: dict[str, Any]) -> bool:
    """True if the device that vLLM finds in this machine is that of `row`."""
    platform = importlib.import_module("vllm.platforms").current_platform
    try:
        if not getattr(platform, f"is_{row['kind']}")():
            return False
        if row["kind"] == "cpu":
            return True
        same = platform.get_device_name().replace("_", " ") == row["name"].replace("_", " ")
        return same and ("cc" not in row or tuple(platform.get_device_capability()) == tuple(row["cc"]))
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False


def main() -> int:
    """Answer the question; an exception is an answer, too."""
    document = json.load(sys.stdin)
    try:
        found = answer(document)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    Path(document["out"]).write_text(json.dumps(found, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
