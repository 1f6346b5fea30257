"""The `moectl` program: its commands, in one table."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import ExitCode, Unavailable
from .bench.command import bench
from .compare import compare
from .convert.command import convert
from .doctor import doctor
from .env import env
from .explain.command import explain
from .list import list_names
from .options import ArgumentKeepingCommand, PrintableGroup
from .output import Output, drop_stdout, print_logs_safely, spell_out
from .parity import parity
from .peers import peers
from .refit import refit
from .run.command import run as run_layers
from .schema import schema
from .serve_check import serve_check
from .synth import synth
from .text_layout import wrap
from .tune.command import tune
from .unconvert import unconvert
from .verify import verify
from .warm.command import warm

EXAMPLES = (
    "moectl explain openai/gpt-oss-120b --gpu h200",
    "moectl convert ./gpt-oss-20b ./marlin --to marlin",
    "moectl bench ./gpt-oss-20b -m 1,8,64",
)

COMMANDS = (
    (explain, "explain"),
    (convert, "convert"),
    (verify, "verify"),
    (serve_check, "serve-check"),
    (unconvert, "unconvert"),
    (refit, "refit"),
    (parity, "parity"),
    (run_layers, "run"),
    (bench, "bench"),
    (tune, "tune"),
    (warm, "warm"),
    (compare, "compare"),
    (peers, "peers"),
    (synth, "synth"),
    (list_names, "list"),
    (schema, "schema"),
    (doctor, "doctor"),
    (env, "env"),
)


def epilog(examples: Sequence[str], more: Sequence[str] = ()) -> str:
    """The epilog of a help page: the examples, then further lines, in lines of at most 80 columns."""
    lines = ["Examples:"]
    for example in examples:
        # A command that goes on in the next line can be pasted.
        lines += " \\\n".join(wrap(example, 76, "  ", "      ")).split("\n")
    for line in more:
        # What follows a word in a column of its own stays in its column.
        column = re.match(r" +\S+ +", line)
        lead = column[0] if column else ""
        lines += wrap(line[len(lead) :], 78, lead, " " * len(lead))
    # A paragraph that begins with a backspace is not wrapped.
    return "\b\n" + "\n".join([*lines, ""])


app = typer.Typer(
    name="moectl",
    cls=PrintableGroup,
    help="Explain, convert, run and bench quantized Mixture-of-Experts layers.",
    epilog=epilog(
        EXAMPLES,
        ["Every option has an environment variable MOECTL_<COMMAND>_<OPTION>: MOECTL_EXPLAIN_GPU=b200."],
    ),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for function, name in COMMANDS:
    module = sys.modules[function.__module__]
    more = getattr(module, "MORE", ())
    app.command(name, cls=ArgumentKeepingCommand, epilog=epilog(module.EXAMPLES, more))(function)


def _version(show: bool) -> None:
    if show:
        Output("moectl").text(f"moectl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run() -> None:
    """Runs the command in sys.argv and exits with an `ExitCode`, even if stdout cannot be written."""
    try:
        try:
            for stream in (sys.stdout, sys.stderr):
                spell_out(stream)
            print_logs_safely()
            app(prog_name="moectl")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
        sys.exit(int(ExitCode.DONE))
    except OSError as error:
        drop_stdout()
        failure = Unavailable(f"cannot write the output: {error.strerror}")
        Output("moectl").complain(failure)
        sys.exit(int(failure.exit_code))
