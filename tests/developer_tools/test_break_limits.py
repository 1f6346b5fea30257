"""`scripts/break_limits`: small bombs end in time, and its measure sees what goes too far."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from devtools.limits.bombs import BOMBS, Bomb
from devtools.limits.measuring import measured
from devtools.limits.tables import CSV, DOCUMENT, ROWS

from moectl.bench.read_rows import read_rows
from moectl.checkpoint import open_checkpoint
from moectl.errors import MoectlError, UsageError
from moectl.explain.replay import read_document
from support.sampling import every_nth
from support.scripts import SCRIPTS, loaded

SMALL = 0.01
"""Share of the full sizes: cost that grows with the square of a size shows at this one, too."""

CHECKPOINTS = [bomb for bomb in BOMBS if not bomb.file and not bomb.name.startswith("folder")]


@pytest.mark.parametrize("bomb", every_nth(CHECKPOINTS, 2), ids=lambda bomb: bomb.name)
def test_small_bombs(bomb: Bomb, tmp_path: Path) -> None:
    bomb.make(tmp_path, SMALL)
    begin = time.process_time()
    try:
        open_checkpoint(tmp_path, offline=True)
    except MoectlError as error:
        assert error.exit_code == 4, error
    assert time.process_time() - begin < 6


OF_USERS = [bomb for bomb in BOMBS if bomb.file in (ROWS, CSV, DOCUMENT) and not bomb.name.startswith("a ")]


@pytest.mark.parametrize("bomb", every_nth(OF_USERS, 5), ids=lambda bomb: bomb.name)
def test_small_tables_and_documents(bomb: Bomb, tmp_path: Path) -> None:
    share = 1.0 if "decisions" in bomb.name else 0.05
    bomb.make(tmp_path, share)
    read = read_document if bomb.file == DOCUMENT else read_rows
    begin = time.process_time()
    with pytest.raises(UsageError, match=bomb.file):
        read(tmp_path / bomb.file)
    assert time.process_time() - begin < 8 * share + 1


def test_the_measure(tmp_path: Path) -> None:
    env, bounds = dict(os.environ), {"most_seconds": 20.0, "most_megabytes": 300.0}
    done = measured([sys.executable, "-c", "import sys; sys.exit('so')"], env, **bounds)
    assert (done.status, done.stderr, done.stopped) == (1, "so\n", "")
    grows = "import time; kept = bytearray(b'1') * (400 << 20); time.sleep(60)"
    grown = measured([sys.executable, "-c", grows], env, **bounds)
    assert grown.status == -9 and grown.stopped.endswith("MB") and grown.megabytes > 300
    waits = measured(
        [sys.executable, "-c", "import time; time.sleep(60)"], env, most_seconds=0.5, most_megabytes=300.0
    )
    assert waits.stopped.endswith(" s") and waits.busy < waits.seconds < 20


def test_the_limits_page_has_the_worst_of_every_command() -> None:
    script = loaded("break_limits")
    commands = {
        words[0] for table in (script.CHECKPOINT, *script.OF_FILES.values()) for words in table.values()
    }
    text = (SCRIPTS.parent / "docs" / "checkpoints.md").read_text().partition("| command | seconds | MB |")[2]
    rows = re.findall(
        r"^\| `([a-z-]+)` \| ([0-9.]+) \| ([0-9]+) \|$", text.partition("\n\n")[0], re.MULTILINE
    )
    assert {name for name, _, _ in rows} == commands and len(rows) == len(commands)
    assert all(float(seconds) <= script.SECONDS for _, seconds, _ in rows)
    assert all(int(megabytes) <= script.MEGABYTES for _, _, megabytes in rows)
