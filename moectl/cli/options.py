"""Options that commands share, and the frame every command runs in."""

import copy
import difflib
import functools
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from ..cache.folder import CacheWarning
from ..errors import ExitCode, MoectlError, Unavailable, UsageError
from .output import Output, drop_stdout

Command = TypeVar("Command", bound=Callable[..., Any])

MAX_TOKENS = 1 << 20
"""Most tokens that one call is given."""


def option(*names: str, help: str, own: bool = False, **settings: Any) -> Any:
    """A typer option that can also be set as ``MOECTL_<COMMAND>_<NAME>``.

    NAME is the first long name. ``MOECTL_<NAME>`` works too, unless the option is the command's `own`:
    then other commands have one of the same name that means something else.
    """
    long = next(name for name in names if name.startswith("--"))
    name = long.split("/")[0].lstrip("-").replace("-", "_").upper()
    variables = ["MOECTL_{command}_" + name] + ([] if own else [f"MOECTL_{name}"])
    return typer.Option(*names, help=help, envvar=variables, show_envvar=False, **settings)


CheckpointArg = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder, a config.json, a Hub id org/name[@revision], or a built-in model.",
        show_default=False,
    ),
]
WeightsArg = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="The folder of a checkpoint, or a converted one.", show_default=False
    ),
]
Activation = Annotated[
    str | None,
    option(
        "--activation",
        help="If no key says it: silu, swigluoai:limit=7.",
    ),
]
Routing = Annotated[
    str | None,
    option(
        "--routing",
        own=True,
        help="Likewise: sigmoid,bias,groups=8/4,scale=2.5.",
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


def typed(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The options among parameters `names` that stand on the command line; variables do not count."""
    spelled = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    return [spelled[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def pick(value: str, known: Iterable[str], what: str) -> str:
    """`value` in the spelling of `known`, whatever its case and dashes.

    Raises UsageError with the nearest names when it is none of them.
    """
    spelled = {name.lower().replace("-", "_"): name for name in sorted(known)}
    key = value.lower().replace("-", "_")
    if key in spelled:
        return spelled[key]
    longer = [name for name in spelled if name.startswith(key)] if key else []
    near = [spelled[name] for name in longer or difflib.get_close_matches(key, spelled, n=3, cutoff=0.5)]
    raise UsageError(
        f"{what} {value!r} is not known",
        reason=f"Known are {', '.join(spelled.values())}.",
        hint=f"did you mean {' or '.join(near)}?" if near else "choose one of these",
    )


def framed(name: str) -> Callable[[Command], Command]:
    """Decorate a command: give it an `Output`, turn whatever it raises into a sentence and an exit code.

    The command is called with its own options and `out`; it may return an ExitCode. The options that
    every command has (`SHARED`) are added to it here. A parameter whose type is a record of options, a
    dataclass with fields as a command's parameters, stands for all of them: the command is called with
    the record.
    """

    def decorate(command: Command) -> Command:
        asked = [p for p in inspect.signature(command).parameters.values() if p.name != "out"]
        records: dict[str, Any] = {p.name: p.annotation for p in asked if is_dataclass(p.annotation)}

        @functools.wraps(command)
        def run(*args: Any, json: bool, quiet: bool, debug: bool, **kwargs: Any) -> None:
            out = Output(name, as_json=json, quiet=quiet)
            try:
                made = {
                    one: kind(**{field.name: kwargs.pop(field.name) for field in fields(kind)})
                    for one, kind in records.items()
                }
                with _noted(out):
                    code = command(*args, **kwargs, **made, out=out)
            except BrokenPipeError:
                # The reader went away, as in `moectl ... | head`.
                drop_stdout()
                code = ExitCode.DONE
            except KeyboardInterrupt:
                out.note("interrupted")
                code = ExitCode.INTERRUPTED
            except Exception as error:
                if debug:
                    traceback.print_exc()
                told = explained(error)
                out.error(told)
                code = told.exit_code
            raise typer.Exit(int(code or ExitCode.DONE))

        own = [one for p in asked for one in (_options_of(p.annotation) if p.name in records else [p])]
        parameters = [_of_command(p, name) for p in (*own, *SHARED)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run  # type: ignore[return-value]

    return decorate


@contextmanager
def _noted(out: Output) -> Iterator[None]:
    """Says warnings about the cache as notes, each once; other warnings stay what they are."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", CacheWarning)
        shown = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any) -> None:
            if not issubclass(category, CacheWarning):
                shown(message, category, *where)
            elif str(message) not in said:
                said.add(str(message))
                out.note(str(message))

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _options_of(record: Any) -> list[inspect.Parameter]:
    """The fields of a record of options as parameters of a command."""
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(record)
    ]


def _of_command(parameter: inspect.Parameter, command: str) -> inspect.Parameter:
    """`parameter` with the command's name in its environment variables."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, made, *_ = get_args(parameter.annotation)
    if not getattr(made, "envvar", None):
        return parameter
    mine = copy.copy(made)
    mine.envvar = [variable.replace("{command}", command.upper()) for variable in made.envvar]
    return parameter.replace(annotation=Annotated[kind, mine])


def explained(error: Exception) -> MoectlError:
    """Any error as one that can be shown: what the system or a library refused, or a fault of our own."""
    if isinstance(error, MoectlError):
        return error
    text = str(error).strip().split("\n")[0]
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in text.lower()):
        return Unavailable(f"there is not enough memory for this: {text}", hint="use smaller sizes")
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return Unavailable(f"the system refused: {where}{error.strerror or text}")
    return Unavailable(
        f"internal error: {type(error).__name__}: {text}",
        hint="run it again with --debug and report the traceback",
    )
