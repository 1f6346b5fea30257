"""Pictures of what commands print on a terminal of some width, as SVG files of the documents."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMMANDS = {
    "explain": "moectl explain openai/gpt-oss-120b --gpu h100 --tp 2",
    "explain-matrix": "moectl explain moonshotai/Kimi-K2-Thinking"
    " --gpu h200,b200,rtx5090,mi300x --tp 8,16,32",
    "bench": "moectl bench --rows docs/bench_h200.jsonl --model gpt-oss-120b",
    "compare": "moectl compare docs/bench_h200_earlier.jsonl docs/bench_h200.jsonl"
    " --backend moectl --model gpt-oss-120b,qwen3-30b",
}
"""The commands by the names of their pictures, run in the repository."""

WIDTHS = (80, 120)

PICTURES = {
    ROOT / "docs" / "img" / f"{name}-{columns}.svg": (command, columns)
    for name, command in COMMANDS.items()
    for columns in WIDTHS
}
"""Files, with their command and the columns of the terminal."""

FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich's own, without the font that it has browsers fetch."""


def picture(command: str, columns: int) -> str:
    """An SVG of a terminal with `command` and its output in colours."""
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME
    from rich.text import Text

    console = Console(
        width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(terminal_output(command, columns)))
    return console.export_svg(title="", theme=SVG_EXPORT_THEME, code_format=FORMAT, unique_id="terminal")


def terminal_output(command: str, columns: int) -> str:
    """What a moectl command writes to a terminal with so many columns; SystemExit if it fails."""
    program, *arguments = shlex.split(command)
    if program != "moectl":
        raise SystemExit(f"only moectl commands are run, got {command!r}")
    ours = ("MOECTL_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONPATH")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    environment = kept | {"TERM": "xterm-256color", "MOECTL_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment["PYTHONIOENCODING"] = "utf-8"
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "moectl", *arguments, "--color", "always"],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        env=environment,
    )
    os.close(terminal)
    written = b""
    with os.fdopen(screen, "rb", buffering=0) as reader, suppress(OSError):  # how such a terminal ends
        while chunk := reader.read(65536):
            written += chunk
    if process.wait() not in (0, 1):
        raise SystemExit(f"{command}: exit code {process.returncode}: {written.decode(errors='replace')}")
    return written.decode().replace("\r\n", "\n").rstrip("\n")
