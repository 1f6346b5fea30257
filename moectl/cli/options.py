"""Options that commands share, and the frame every command runs in."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from ..errors import ExitCode, MoectlError
from .output import Output

Command = TypeVar("Command", bound=Callable[..., Any])


def option(*names: str, help: str, **settings: Any) -> Any:
    """A typer option that can also be set as ``MOECTL_<NAME>`` (the first long name, upper case)."""
    long = next(name for name in names if name.startswith("--"))
    variable = "MOECTL_" + long.split("/")[0].lstrip("-").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, show_envvar=False, **settings)


CheckpointArg = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder, a config.json, a Hub id org/name[@revision], or a built-in model.",
        show_default=False,
    ),
]
Offline = Annotated[bool, option("--offline", help="Do not ask the Hub.")]
Layer = Annotated[int | None, option("--layer", help="Layer number; default: the first MoE layer.", min=0)]
Device = Annotated[str | None, option("--device", help="cpu or cuda; default: a GPU if there is one.")]
Seed = Annotated[int, option("--seed", help="Seed of random data.", min=0)]

SHARED = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, made])
    for name, made in {
        "json": option("--json", help="Print one JSON document."),
        "quiet": option("--quiet", "-q", help="Print the essential line only."),
        "debug": option("--debug", help="Show tracebacks."),
    }.items()
)
"""Options of every command."""


def framed(name: str) -> Callable[[Command], Command]:
    """Decorate a command: give it an `Output`, turn MoectlError and interrupts into exit codes.

    The command is called with its own options and `out`; it may return an ExitCode. The options that
    every command has (`SHARED`) are added to it here.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*args: Any, json: bool, quiet: bool, debug: bool, **kwargs: Any) -> None:
            out = Output(name, as_json=json, quiet=quiet)
            try:
                code = command(*args, **kwargs, out=out)
            except MoectlError as error:
                if debug:
                    raise
                out.error(error)
                raise typer.Exit(int(error.exit_code)) from error
            except KeyboardInterrupt:
                out.note("interrupted")
                raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
            except BrokenPipeError:
                # The reader went away (`moectl ... | head`): end quietly, and keep the interpreter
                # from failing again when it flushes stdout at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise typer.Exit(int(ExitCode.DONE)) from None
            raise typer.Exit(int(code or ExitCode.DONE))

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "out"]
        parameters = [*own, *SHARED]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run  # type: ignore[return-value]

    return decorate
