"""For scripts that need torch: runs them in the project's environment if their interpreter has none."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"


def enter() -> None:
    """Puts the project on the path of an interpreter that has torch.

    If this interpreter lacks torch, the script is restarted in .venv; exits with status 3 if torch is missing
    there, too.
    """
    if importlib.util.find_spec("torch") is None:
        python = VENV / "bin" / "python"
        if Path(sys.prefix) == VENV or not python.exists():
            give_up("torch is missing; run scripts/test, which installs it into .venv", 3)
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(0, str(ROOT))


def need_a_gpu() -> None:
    """Exits with status 3 if torch sees no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        give_up("it needs a CUDA GPU, and torch sees none", 3)


def give_up(reason: str, status: int) -> None:
    """Prints `reason` after the script's name and exits with `status`."""
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    sys.exit(status)
