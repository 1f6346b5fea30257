"""Opens Hub references, one for each line of its input, each in a fork of this process.

The Hub's client reads its settings when it is imported: each fork imports it anew, with the environment of
its line. What the client itself imports is there already, and takes longer.
"""

import json
import os
import signal
import sys
import traceback
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, constants, errors, hf_hub_download, hf_hub_url, utils  # noqa: F401

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source import hub  # noqa: F401
from moectl.errors import MoectlError


def forget_the_client() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == huggingface_hub.__name__]:
        del sys.modules[name]


def opened(ref: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a test wants to know of a checkpoint, or of the error instead of it."""
    try:
        found = open_checkpoint(ref, **options)
    except MoectlError as error:
        return {"error": type(error).__name__, "exit": int(error.exit_code), "text": str(error)}
    return {
        "kind": found.origin.kind,
        "name": found.origin.name,
        "revision": found.origin.revision,
        "note": found.origin.note,
        "tensors": {name: [info.file, info.start, info.end] for name, info in found.tensors.items()},
        "problem": repr(found.groups[0].problem),
        "folder": str(found.folder),
    }


def main() -> None:
    forget_the_client()
    for line in sys.stdin:
        asked = json.loads(line)
        process = os.fork()
        if process == 0:
            signal.alarm(120)
            code = 1
            try:
                os.environ.clear()
                os.environ.update(asked["environment"])
                print(json.dumps(opened(asked["ref"], asked["options"])))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
