"""Scripts that need torch: they run in the project's environment where their own interpreter has none."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"


def enter() -> None:
    """Puts the project on the path, in an interpreter that has torch.

    Where this one has none, the script starts again in .venv; ends the program with status 3 where torch
    is not there either.
    """
    if importlib.util.find_spec("torch") is None:
        python = VENV / "bin" / "python"
        if Path(sys.prefix) == VENV or not python.exists():
            give_up("torch is missing; run scripts/test, which installs it into .venv", 3)
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(0, str(ROOT))


def need_a_gpu() -> None:
    """Ends the program with status 3 where torch sees no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        give_up("it needs a CUDA GPU, and torch sees none", 3)


def give_up(why: str, status: int) -> None:
    """Ends the program with a sentence in its name, and `status`."""
    print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    sys.exit(status)
