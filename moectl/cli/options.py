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
Json = Annotated[bool, option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, option("--quiet", "-q", help="Print the essential line only.")]
Debug = Annotated[bool, option("--debug", help="Show tracebacks.")]
Offline = Annotated[bool, option("--offline", help="Do not ask the Hub.")]
Layer = Annotated[int | None, option("--layer", help="Layer number; default: the first MoE layer.", min=0)]
Device = Annotated[str | None, option("--device", help="cpu or cuda; default: a GPU if there is one.")]
Seed = Annotated[int, option("--seed", help="Seed of random data.", min=0)]


def framed(name: str) -> Callable[[Command], Command]:
    """Decorate a command: give it an `Output`, turn MoectlError and interrupts into exit codes.

    The command is called as typer calls it, plus `out`; it may return an ExitCode.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            debug = kwargs.get("debug", False)
            out = Output(name, as_json=kwargs.get("json", False), quiet=kwargs.get("quiet", False))
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

        signature = inspect.signature(command)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p for p in signature.parameters.values() if p.name != "out"]
        )
        return run  # type: ignore[return-value]

    return decorate
