"""Decisions of one vLLM release, made by its own code on a machine without a GPU, as a script.

Runs in a process of its own, with the release's modules on the path and without moectl. Standard input is a
JSON document (`grid`, `cells`, `jobs`, `out`); a JSON-lines file of decisions is written for each device and
package profile. `ask.py` asks about one checkpoint instead.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

_MACHINE: Any = importlib.import_module("assumed_machine")
_RECORDER: Any = importlib.import_module("cell_recorder")


def _run(grid: dict[str, Any], device: str, profile: str, cells: list[dict[str, Any]], out: Path) -> None:
    row, assumed = grid["DEVICES"][device], grid["PROFILES"][profile]
    _MACHINE.set_machine(set(assumed["packages"]), assumed["env"], row)
    recorder = _RECORDER.Recorder(grid, row)
    partial = out.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as lines:
        for cell in cells:
            lines.write(json.dumps(recorder.record(cell), separators=(",", ":")) + "\n")
    partial.rename(out)


def main() -> int:
    """Record every run, `jobs` at a time, each in a process of its own."""
    document = json.load(sys.stdin)
    _MACHINE.stand_in()
    grid, out = document["grid"], Path(document["out"])
    grid["PARALLEL"] |= grid.get("PARALLEL_EXTRA", {})
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        runs.setdefault((cell["device"], cell["profile"]), []).append(cell)
    waiting, running, failed = list(runs.items()), dict[int, str](), 0
    while waiting or running:
        while waiting and len(running) < document["jobs"]:
            (device, profile), cells = waiting.pop(0)
            child = os.fork()
            if not child:
                code = 1
                try:
                    _run(grid, device, profile, cells, out / f"{device}.{profile}.jsonl")
                    code = 0
                except BaseException:  # a child must not return into the parent's loop
                    traceback.print_exc()
                os._exit(code)
            running[child] = f"{device} {profile}"
        child, status = os.wait()
        if child not in running:
            continue  # Started by an imported package.
        name = running.pop(child)
        print(f"{name}: {'failed' if status else 'recorded'}", file=sys.stderr, flush=True)
        failed += bool(status)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
