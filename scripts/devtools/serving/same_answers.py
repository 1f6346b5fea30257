"""One vLLM engine's answers: as it starts, after it has slept, and after it has read its weights anew.

`python -m devtools.serving.same_answers CHECKPOINT ARGUMENTS OUT` writes a JSON object: the classes of the
experts, and answers by moment. With ``enable_sleep_mode`` among the ARGUMENTS the engine sleeps at level 1,
wakes up, and reloads its weights.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moectl.files.atomic import replace_file
from moectl.files.strict_json import json_bytes

from .one_engine import ENVIRONMENT, Engine, expert_classes, started


def moments(checkpoint: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the engine answers; the object grows by one moment each time."""
    import torch

    llm = started(checkpoint, arguments)
    engine = Engine(llm)
    row: dict[str, Any] = {"experts": llm.apply_model(expert_classes)[0], "answers": {}}
    row["answers"]["started"] = engine.answers_again()
    yield row
    if not arguments.get("enable_sleep_mode"):
        return
    before = torch.cuda.mem_get_info()[0]
    llm.sleep(level=1)
    row["freed_bytes"] = torch.cuda.mem_get_info()[0] - before
    llm.wake_up()
    row["answers"]["awake"] = engine.answers_again()
    yield row
    llm.collective_rpc("reload_weights")
    row["answers"]["reloaded"] = engine.answers_again()
    yield row


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for found in moments(sys.argv[1], json.loads(sys.argv[2])):
        replace_file(Path(sys.argv[3]), json_bytes(found))
