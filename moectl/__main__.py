"""Where the program starts: interrupts are handled before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once. Until something is being written there is nothing to put in order, and libraries
    that are being imported do not survive an exception in their midst."""
    os.write(2, b"moectl: interrupted\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the program with sys.argv; exits with an `ExitCode`."""
    signal.signal(signal.SIGINT, _leave)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
    from .cli.main import run

    run()


if __name__ == "__main__":
    main()
