"""Options that commands share, and the decorator that every command runs in."""

import copy
import difflib
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ..cache.cache_file import CacheWarning
from ..errors import ExitCode, MoectlError, Unavailable, UsageError, install_hint
from ..files.strict_json import shown
from ..printable import printable, printable_line
from ..whole_numbers import whole_number
from .output import COLORS, Output, drop_stdout

Command = TypeVar("Command", bound=Callable[..., Any])


MOST_NAMED = 12
"""Names to list besides near ones."""


def option(*names: str, help: str, own: bool = False, **settings: Any) -> Any:
    """A typer option that can also be set as ``MOECTL_<COMMAND>_<NAME>``.

    NAME is the first long name. ``MOECTL_<NAME>`` works too, unless the option is the command's `own`: other
    commands have one of the same name with another meaning.
    """
    long = next(name for name in names if name.startswith("--"))
    name = long.split("/")[0].lstrip("-").replace("-", "_").upper()
    variables = ["MOECTL_{command}_" + name] + ([] if own else [f"MOECTL_{name}"])
    return typer.Option(*names, help=help, envvar=variables, show_envvar=False, **settings)


CheckpointArg = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A directory, a config.json, a Hub id org/name[@revision], or a built-in model.",
        show_default=False,
    ),
]
WeightsArg = Annotated[
    str,
    typer.Argument(metavar="CKPT", help="A checkpoint's directory, or a converted one.", show_default=False),
]
ActivationOption = Annotated[
    str | None,
    option(
        "--activation",
        help="If config.json does not say: silu, swigluoai:limit=7.",
    ),
]
RoutingOption = Annotated[
    str | None,
    option(
        "--routing",
        own=True,
        help="If config.json does not say: sigmoid,bias,groups=8/4,scale=2.5.",
    ),
]
Offline = Annotated[bool, option("--offline", help="Do not contact the Hub.")]
Layer = Annotated[int | None, option("--layer", help="Layer number; default: the first MoE layer.", min=0)]
SEED = option("--seed", help="Seed of random data.", min=0)
Seed = Annotated[int, SEED]


@dataclass(frozen=True)
class ParsedOption:
    """An option whose text is parsed to the value of a record's field.

    Attributes:
        option: a result of `option`.
        parse: makes the value from what was typed, or from `default`.
        kind: the type on the command line.
        default: the value of an option that is not given.
    """

    option: Any
    parse: Callable[[Any], Any]
    kind: Any = str | None
    default: Any = None


class RecordOptions:
    """Command line options for some of the fields of a record of the library.

    A field's type and default are those of the record, unless it has a `ParsedOption`. A parameter of a
    command that is annotated with ``Annotated[Callable[..., Record], RecordOptions(Record, ...)]`` stands
    for all of these options; the command gets a function that takes the remaining fields and makes the record
    from what was typed. It raises what parsing raises.
    """

    def __init__(self, record: Callable[..., Any], **options: Any) -> None:
        self.record, self.options = record, options

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that have options."""
        return tuple(self.options)

    def parameters(self) -> list[inspect.Parameter]:
        """The options as parameters of a command."""
        types = get_type_hints(self.record)
        defaults = {field.name: field.default for field in fields(self.record)}  # type: ignore[arg-type]
        return [
            _parameter(name, Annotated[declared.kind, declared.option], declared.default)
            if isinstance(declared, ParsedOption)
            else _parameter(name, Annotated[types[name], declared], defaults[name])
            for name, declared in self.options.items()
        ]

    def bound(self, values: Mapping[str, Any]) -> Callable[..., Any]:
        """A function that makes the record from the `values` of the options and the other fields."""

        def make(**others: Any) -> Any:
            parsed = {
                name: declared.parse(values[name]) if isinstance(declared, ParsedOption) else values[name]
                for name, declared in self.options.items()
            }
            return self.record(**parsed, **others)

        return make


SHARED = tuple(
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type(default), declared]
    )
    for name, default, declared in (
        ("json", False, option("--json", help="Print one JSON document.")),
        ("quiet", False, option("--quiet", "-q", help="Print the essential line only.")),
        (
            "color",
            "auto",
            option("--color", help="auto (default), always or never; also NO_COLOR.", show_default=False),
        ),
        ("debug", False, option("--debug", help="Show tracebacks of errors.")),
    )
)
"""Options of every command."""

CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
"""The parameter of a command that needs to know how it was called."""


def typed_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The options of the parameters `names` that were given on the command line, not by variables."""
    spellings = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    return [spellings[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def split_names(text: str, what: str) -> list[str]:
    """The names of a list such as ``h100,b200``, without blanks; UsageError for one that is empty.

    `what` is the option that takes them.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(
            f"{what} takes names separated by commas, and one of {text!r} is empty",
            hint="leave it out, or give the name",
        )
    return names


class PrintableGroup(TyperGroup):
    """The program: without arguments it prints its help; errors of its parser are `_usage_errors`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            Output("moectl").usage(ctx.get_help())
            ctx.exit(int(ExitCode.USAGE))
        with _usage_errors("moectl", args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _usage_errors("moectl", args):
            return super().resolve_command(ctx, args)


@contextmanager
def _usage_errors(command: str, args: Sequence[str]) -> Iterator[None]:
    """Makes the message of an error of the parser, which may quote any argument, `printable`.

    A value that a variable of the environment gave is named with the variable. If JSON is asked for, the
    error is also printed as a document to stdout.
    """
    args = tuple(args)  # the parser takes from the list
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable_line(_value_error(error, message, args))  # type: ignore[attr-defined]
            if _wants_json(command, args):
                said = printable_line(error.format_message())  # type: ignore[attr-defined]
                name = "moectl" if command == "moectl" else f"moectl {command}"
                failure = UsageError(said, hint=f"{name} --help")
                Output(command, as_json=True).text(Output(command).json({"error": failure.to_json()}))
        raise


_PYDANTIC = re.compile(r"(?:Value error, |Input (should be .*?)(?:, unable to .*)?$)")
"""What pydantic adds to a sentence on a value."""


def _value_error(error: Any, message: str, args: Sequence[str]) -> str:
    """`message` on a parameter's value, with the value and the variable that gave it where they are known."""
    param, ctx = getattr(error, "param", None), getattr(error, "ctx", None)
    if param is None or ctx is None:
        return message
    value, variable = None, _variable_of(ctx, param)
    if variable:
        value = os.environ[variable]
        error.param_hint = f"{param.get_error_hint(*_context_if_taken(param, ctx))} (from {variable})"
    else:
        for text, following in zip(args, [*args, None][1:], strict=True):
            name, equals, rest = text.partition("=")
            if name in param.opts:
                value = rest if equals else following
    sentence = _PYDANTIC.sub(r"\1", message, count=1)
    return f"{sentence}, got {value!r}" if value is not None and repr(value) not in sentence else sentence


def _context_if_taken(param: Any, ctx: Any) -> tuple[Any, ...]:
    """The context, as an argument of ``get_error_hint``: click's takes it, and later ones of typer do not."""
    return (ctx,) if inspect.signature(param.get_error_hint).parameters else ()


def _variable_of(ctx: Any, param: Any) -> str | None:
    """The variable of the environment that the value of `param` comes from; None if it is from elsewhere."""
    source = ctx.get_parameter_source(param.name)
    if not source or source.name != "ENVIRONMENT":
        return None
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    return next((name for name in names if os.environ.get(name)), None)


TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
"""Values of variables that set a flag."""


def _wants_json(command: str, args: Sequence[str]) -> bool:
    """True if ``--json`` is among the options in `args`, or set by a variable."""
    options = args[: args.index("--")] if "--" in args else args
    variables = (os.environ.get(name, "") for name in (f"MOECTL_{command.upper()}_JSON", "MOECTL_JSON"))
    return "--json" in options or next(filter(None, variables), "").lower() in (
        "1",
        "true",
        "t",
        "yes",
        "y",
        "on",
    )


class ArgumentKeepingCommand(TyperCommand):
    """A command that keeps its arguments as typed, before click turns an empty path into ``.``.

    A number after a flag ``--NAME`` is the value of ``--NAME-size``, if the command has that option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses `args` as usual, and keeps them under `TYPED`."""
        args = self._sized(args)
        ctx.meta[TYPED] = tuple(args)
        with _usage_errors(str(self.name), args):
            return super().parse_args(ctx, args)

    def _sized(self, args: list[str]) -> list[str]:
        """`args` with ``--ep 8`` and ``--ep=8`` spelled ``--ep-size 8``."""
        names = {name for param in self.params for name in param.opts}
        flags = [name for param in self.params if getattr(param, "is_flag", False) for name in param.opts]
        sized = {name: size for name in flags if (size := f"--{name.lstrip('-')}-size") in names}
        spelled: list[str] = []
        for text in args:
            flag, equals, value = text.partition("=")
            if spelled and spelled[-1] in sized and whole_number(text) is not None:
                spelled[-1:] = [sized[spelled[-1]], text]
            elif equals and flag in sized and whole_number(value) is not None:
                spelled += [sized[flag], value]
            else:
                spelled.append(text)
        return spelled


TYPED = "moectl.typed"
"""Key in ``ctx.meta`` of the arguments that `ArgumentKeepingCommand` keeps."""


def refuse_empty(context: typer.Context) -> None:
    """Raises UsageError for an empty argument or option value, and for text that no system can take.

    Empty ones usually come from unset shell variables, and would mean the default or the current directory.
    """
    options = [param for param in context.command.params if param.param_type_name == "option"]
    valued = {name for param in options if not getattr(param, "is_flag", False) for name in param.opts}
    previous = ""
    for text in context.meta[TYPED]:
        try:
            unusable = "\0" in os.fsdecode(os.fsencode(text))
        except UnicodeEncodeError:
            unusable = True
        if unusable:
            raise UsageError(
                f"the argument {shown(text)} has a lone surrogate or a null character",
                hint="spell it in characters that a file name can have",
            )
        name, _, value = text.partition("=")
        if not text or (not value and name != text and name in valued):
            what = next((candidate for candidate in (name, previous) if candidate in valued), "an argument")
            raise UsageError(f"{what} is empty", hint="give it a value, or leave it out")
        previous = text


def refuse_contradictions(context: typer.Context) -> None:
    """Raises UsageError for two spellings of one option with different values, of which the last would count.

    One spelling may be repeated, as scripts do with defaults of theirs.
    """
    options = [param for param in context.command.params if param.param_type_name == "option"]
    single = [
        it for it in options if not getattr(it, "is_flag", False) and not getattr(it, "multiple", False)
    ]
    owners = {name: param for param in single for name in param.opts}
    stated: dict[str, dict[str, str]] = {}
    typed = context.meta[TYPED]
    for text, following in zip(typed, [*typed, ""][1:], strict=True):
        if text == "--":
            return
        name, equals, value = text.partition("=")
        if name in owners:
            stated.setdefault(str(owners[name].name), {})[name] = value if equals else following
    for spellings in stated.values():
        if len(set(spellings.values())) > 1:
            words = " and ".join(f"{name} {shown(value)}" for name, value in spellings.items())
            raise UsageError(f"{words} are one option with different values", hint="give it once")


def refuse_two_forms(context: typer.Context) -> None:
    """Raises UsageError for markdown and JSON together: stdout has one form."""
    if context.params.get("json") and context.params.get("md"):
        raise UsageError("--json and --md are two forms of one output", hint="give one of them")


def pick(value: str, known: Iterable[str], what: str) -> str:
    """`value` as spelled in `known`, ignoring case and dashes.

    Raises UsageError with the nearest names if it is not one of them.

    Example:
        >>> pick("Triton-Kernels", ["marlin", "triton_kernels"], "backend")
        'triton_kernels'
    """
    spellings = {name.lower().replace("-", "_"): name for name in sorted(known)}
    key = value.lower().replace("-", "_")
    if key in spellings:
        return spellings[key]
    longer = [name for name in spellings if name.startswith(key)] if key else []
    near = [spellings[name] for name in longer or difflib.get_close_matches(key, spellings, n=3, cutoff=0.5)]
    raise UsageError(
        f"{what} {value!r} is not known",
        reason="" if near and len(spellings) > MOST_NAMED else f"Known are {', '.join(spellings.values())}.",
        hint=f"did you mean {' or '.join(near)}?" if near else "choose one of these",
    )


def framed(name: str) -> Callable[[Command], Command]:
    """Decorates a command: gives it an `Output`, and turns what it raises into a sentence and an exit code.

    The command is called with its own options, `out`, and `context` if it has such a parameter; it may
    return an ExitCode. Empty arguments are refused first, and the options of every command (`SHARED`) are
    added. A parameter whose type is a record of options (a dataclass whose fields are annotated as a
    command's parameters) stands for all of them: the command is called with the record. One with
    `RecordOptions` stands for those of a record of the library.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command).parameters
        declared = [p for p in signature.values() if p.name not in (CONTEXT.name, "out")]
        records = {p.name: options for p in declared if (options := _record_of(p.annotation))}

        @functools.wraps(command)
        def run(
            context: typer.Context, *, json: bool, quiet: bool, color: str, debug: bool, **kwargs: Any
        ) -> None:
            out = Output(name, as_json=json, quiet=quiet)
            try:
                refuse_empty(context)
                refuse_contradictions(context)
                refuse_two_forms(context)
                if color.lower() not in COLORS:
                    raise UsageError(
                        f"--color must be {', '.join(COLORS[:-1])} or {COLORS[-1]}, got {color!r}"
                    )
                out.color = color.lower()
                if CONTEXT.name in signature:
                    kwargs[CONTEXT.name] = context
                arguments = {
                    key: options.bound({field: kwargs.pop(field) for field in options.names})
                    for key, options in records.items()
                }
                arguments |= {
                    key: make() for key, make in arguments.items() if is_dataclass(signature[key].annotation)
                }
                with _warnings_as_notes(out):
                    code = command(**kwargs, **arguments, out=out)
            except BrokenPipeError:
                # The reader closed the pipe, as in `moectl ... | head`.
                drop_stdout()
                code = ExitCode.DONE
            except KeyboardInterrupt:
                out.note("interrupted")
                code = ExitCode.INTERRUPTED
            except Exception as error:
                if debug:
                    out.debug(error)
                failure = as_moectl_error(error)
                if isinstance(failure, UsageError):
                    failure.reason = " ".join(filter(None, (failure.reason, *_set_by(context, failure.what))))
                out.error(failure)
                code = failure.exit_code
            raise typer.Exit(int(code or ExitCode.DONE))

        own = [
            parameter
            for p in declared
            for parameter in (records[p.name].parameters() if p.name in records else [p])
        ]
        parameters = [CONTEXT, *(_of_command(p, name) for p in (*own, *SHARED))]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run  # type: ignore[return-value]

    return decorate


def _set_by(context: typer.Context, what: str) -> Iterator[str]:
    """A sentence for each variable of the environment that gave a value which `what`, an error, speaks of."""
    for param in context.command.params:
        if variable := _variable_of(context, param):
            value = os.environ[variable]
            quoted = [repr(part.strip()) for part in (value, *value.split(","))]
            if any(text in what for text in quoted) or re.search(
                rf"{re.escape(param.opts[0])}(?![\w-])", what
            ):
                yield printable_line(f"{variable} is set to {value!r}.")


@contextmanager
def _warnings_as_notes(out: Output) -> Iterator[None]:
    """Prints each distinct warning about the cache as a note; other warnings as usual, but printable."""
    noted: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", CacheWarning)
        original = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any) -> None:
            if not issubclass(category, CacheWarning):
                original(printable(str(message)), category, *where)
            elif str(message) not in noted:
                noted.add(str(message))
                out.note(str(message))

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _record_of(annotation: Any) -> RecordOptions | None:
    """The options that a command's parameter stands for; None if it is an option itself."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        options = {field.name: get_args(field.type)[1] for field in fields(annotation)}
        return RecordOptions(annotation, **options)
    metadata = getattr(annotation, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, RecordOptions)), None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _of_command(parameter: inspect.Parameter, command: str) -> inspect.Parameter:
    """`parameter` with the command's name in its environment variables."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, declared, *_ = get_args(parameter.annotation)
    if not getattr(declared, "envvar", None):
        return parameter
    bound = copy.copy(declared)
    bound.envvar = [variable.replace("{command}", command.upper()) for variable in declared.envvar]
    return parameter.replace(annotation=Annotated[kind, bound])


RUN_PACKAGES = ("torch", "numpy", "numba", "triton")
"""Packages of the extra `run`, without which the other commands work."""


def as_moectl_error(error: Exception) -> MoectlError:
    """Any error as a MoectlError: one of the system or a library, or an internal error."""
    if isinstance(error, MoectlError):
        return error
    text = str(error).strip().split("\n")[0]
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in text.lower()):
        return Unavailable(f"there is not enough memory for this: {text}", hint="use smaller sizes")
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return Unavailable(f"operating system error: {where}{error.strerror or text}")
    if isinstance(error, ModuleNotFoundError) and error.name in RUN_PACKAGES:
        return Unavailable(
            f"this needs {error.name}, which is not installed",
            hint=install_hint("run"),
        )
    return Unavailable(
        f"internal error: {type(error).__name__}: {text}",
        hint="run it again with --debug and report the traceback",
    )
