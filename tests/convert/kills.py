"""Kills conversions at random writes and resumes each; called with one JSON argument, prints one object.

Everything happens in forks of a process that has imported everything and loaded compiled code: a fork costs a
hundredth of a start.
"""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import warm

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.execute.rank_plans import check_outputs, convert_ranks, plan_ranks
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.conversion_plan import ConversionPlan
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.rank_slice import RankShard

PWRITE = os.pwrite


def forked(action: Callable[[], None]) -> int:
    """What became of a fork that does `action`: 0, 1 for an exception, or minus the signal."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            action()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Writes:
    """Counts writes; the one with number `last` writes half of its bytes, and kills the process."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self._last, self._lock = 0, last, threading.Lock()

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self.count += 1
            if self.count == self._last:
                PWRITE(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
        return PWRITE(fd, data, offset)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main(options: dict[str, Any]) -> int:
    source, work = Path(options["source"]), Path(options["work"])

    def run(out: Path, resume: bool = False) -> None:
        checkpoint = open_checkpoint(source)
        layout = layout_for(options["target"], checkpoint.groups[0].problem.scheme.weight, None)

        def plan(shard: RankShard) -> ConversionPlan:
            return plan_conversion(checkpoint, layout, max_memory=options["max_memory"], shard=shard)

        plans = plan_ranks(out, *options.get("ranks", (1, 1)), None, plan)
        check_outputs(source, out, plans, resume)
        convert_ranks(
            plans,
            lambda item, progress: convert(
                item.plan, item.folder, resume=resume, threads=options["threads"], progress=progress
            ),
        )

    def counted() -> None:
        os.pwrite = writes = Writes()
        run(work / "reference")
        (work / "count").write_text(str(writes.count))

    warm()
    assert forked(counted) == 0
    total = int((work / "count").read_text())
    wanted = folder_bytes(work / "reference")
    points = random.Random(options["seed"]).choices(range(2, total), k=options["points"])
    points += range(total - options.get("last", 0) + 1, total + 1)
    outcome: dict[str, Any] = {"writes": total, "points": points, "partial": 0, "layers": 0, "wrong": []}
    for number, point in enumerate(points):
        out = work / f"out{number}"

        def killed(out: Path = out, point: int = point) -> None:
            os.pwrite = Writes(point)
            run(out)

        if forked(killed) != -signal.SIGKILL:
            outcome["wrong"].append(f"write {point} was never reached")
            continue
        left = {path.name for path in out.rglob("*")}
        outcome["partial"] += "READY" not in left and any(".experts" in name for name in left)
        outcome["layers"] += any(name.endswith(".experts") for name in left)
        if forked(lambda out=out: run(out, resume=True)) or folder_bytes(out) != wanted:
            outcome["wrong"].append(f"not resumed after write {point}")
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
