"""Converts in a process of its own, which a test may kill, interrupt, starve or measure.

Called with one JSON argument; prints one JSON object: the outcome, and the memory that was used. Without an
argument it imports everything once, converts in forks, one for each line of its input, and prints the outcome
of each and a line with its exit status. A fork's memory is no measure: it touches pages that its parent has.
"""

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.onepass.compose import compose
from moectl.convert.onepass.executors import load
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.steps.transforms import Rearrange, Xor
from moectl.convert.worker_partition import parse_partition
from moectl.errors import MoectlError
from moectl.files.tensor_table import TensorType


def resident_bytes() -> int:
    """Resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def forget_peak() -> None:
    """Lets the peak start anew: imports reach higher than what they leave resident."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most resident memory since `forget_peak`."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def warm() -> None:
    """Compiles and allocates what the first conversion of a process does once."""
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    run = load("cpu")[0]
    for step in (Rearrange("e n k -> e k n"), Xor(1)):
        program = compose((step,), TensorType("U8", (1, 16, 16)))
        if run is not None and program is not None:
            t = torch.zeros((1, 16, 16), dtype=torch.uint8)
            run(program, t, torch.empty_like(t))


def main(options: dict[str, Any]) -> int:
    checkpoint = open_checkpoint(options["source"])
    layout = layout_for(options["target"], checkpoint.groups[0].problem.scheme.weight, None)
    plan = plan_conversion(checkpoint, layout, max_memory=options.get("max_memory"))
    if "file_size" in options:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_size"], resource.RLIM_INFINITY))
    if options.get("hide_disk_usage"):
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50)  # type: ignore[assignment]

    def progress(done: int, total: int, text: str) -> None:
        if "signal" in options and done >= options["at"] * total:
            os.kill(os.getpid(), getattr(signal, options["signal"]))

    warm()
    forget_peak()
    before = resident_bytes()
    outcome: dict[str, Any] = {
        "planned": plan.peak_memory,
        "layer": plan.layers[0].bytes_in,
    }
    try:
        summary = convert(
            plan,
            Path(options["out"]),
            resume=options.get("resume", False),
            progress=progress,
            partition=parse_partition(options["part"]) if "part" in options else None,
        )
        outcome |= {"converted": summary.converted, "resumed": summary.resumed}
        code = 0
    except MoectlError as error:
        outcome |= {"error": str(error), "kind": type(error).__name__}
        code = int(error.exit_code)
    except KeyboardInterrupt:
        outcome["kind"] = "KeyboardInterrupt"
        code = 130
    outcome["above"] = peak_bytes() - before
    print(json.dumps(outcome))
    return code


def serve() -> None:
    warm()
    for line in sys.stdin:
        options = json.loads(line)
        process = os.fork()
        if process == 0:
            code = 1
            signal.alarm(120)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
            try:
                code = main(options)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        sys.exit(main(json.loads(sys.argv[1])))
