"""`moectl bench`: checks and times backends on layers of real shapes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench import BenchSettings, parse_counts
from ...capabilities.unpacked_libraries import LIBRARIES
from ...checkpoint.source.catalogue import built_in, short_name
from ...errors import ExitCode, UsageError
from ...problem.published_layers import SCHEMES
from ..checkpoint_argument import DEVICE, backend_names, find_source
from ..options import (
    SEED,
    ActivationOption,
    Offline,
    ParsedOption,
    RecordOptions,
    framed,
    option,
    pick,
    split_names,
    typed_options,
)
from ..output import Output, count
from ..peers import FLASHINFER, fetch_missing, peer_backends
from .output import RowFilter, RowOutput, RowOutputOptions, print_row

if TYPE_CHECKING:
    from ...bench.bench_rows import BenchRow, RowKey
    from ...bench.journal import RowJournal
    from ...bench.run_bench import Bench
    from ...layer.layer_source import LayerSource

EXAMPLES = (
    "moectl bench ./gpt-oss-20b --with marlin,humming -m 1,8,64-1024*4",
    "moectl bench ./prepared --backend moectl,torch --routing uniform,zipf:1.2",
    "moectl bench --model kimi-k2 -m 1-8192*4 -o rows.jsonl --resume",
    "moectl bench --rows rows.jsonl --format md",
)
MORE = ("Weights come from memory, not caches; ± is half the interquartile range.",)


SETTINGS = RecordOptions(
    BenchSettings,
    tokens=ParsedOption(
        option("--tokens", "-m", own=True, help="Token counts; 64-1024*4 is 64,256,1024."),
        parse_counts,
        kind=str,
        default="1,8,64",
    ),
    backends=ParsedOption(
        option("--backend", own=True, help="Comma-separated names; all: every usable one."),
        lambda text: tuple(backend_names(text)),
        kind=str,
        default="all",
    ),
    layer=option("--layer", help="Layer number; default: first of a group.", min=0),
    tp=option("--tp", "--tp-size", help="Slices of each expert.", min=1),
    ep=option("--ep", "--ep-size", help="Expert-parallel ranks.", min=1),
    dispatched=option("--dispatched", help="With --ep: M counts tokens that reach the rank."),
    device=DEVICE,
    routings=ParsedOption(
        option(
            "--routing",
            own=True,
            help="uniform, balanced, zipf:A, hot:N:F, experts:N, trace:FILE, router; comma-separated.",
        ),
        lambda text: tuple(dict.fromkeys(split_names(text, "--routing"))),
        kind=str,
        default="uniform",
    ),
    input=ParsedOption(
        option("--input", help="safetensors file with x, for --routing router."),
        lambda path: str(path or ""),
        kind=Path | None,
    ),
    warm=option("--warm", help="Keep weights in L2 between calls."),
    rounds=option("--repeats", help="Rounds per row.", min=1),
    seed=SEED,
)
"""Options for what is measured."""


@dataclass(frozen=True)
class ActionOptions:
    """Options for what is done with the measurement, or instead of it."""

    resume: Annotated[bool, option("--resume", help="Measure what -o FILE.jsonl does not have yet.")] = False
    save: Annotated[
        bool,
        option("--save", help="Save times for `moectl explain --measured`."),
    ] = False
    compile_only: Annotated[bool, option("--compile-only", help="Compile what would be timed, and stop.")] = (
        False
    )
    verbose: Annotated[bool, option("--verbose", "-v", help="Every row with its details.")] = False
    jobs: Annotated[int, option("--jobs", help="Processes to compile in.", min=1, max=64)] = 1


IGNORED = {
    "rows": (
        (
            *(name for name in SETTINGS.names if name not in ("tokens", "backends")),
            *("activation", "offline", "with_"),
            *(field.name for field in fields(ActionOptions) if field.name != "verbose"),
        ),
        "--rows shows existing rows",
    ),
    "compile_only": (("resume", "save", "output", "plot", "format"), "--compile-only measures nothing"),
    "model": (("layer", "activation"), "--model times one built-in layer per model"),
}
"""Options that have no effect with another one, and why."""


@framed("bench")
def bench(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT", help="A checkpoint's directory, or a converted one.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            own=True,
            help="Instead of CKPT: random weights of a model; also NAME:FORMAT.",
        ),
    ] = None,
    rows: Annotated[
        list[Path] | None, option("--rows", own=True, help="Instead of CKPT: rows of an earlier bench.")
    ] = None,
    with_: Annotated[
        str,
        option(
            "--with",
            own=True,
            help=f"Also {', '.join(LIBRARIES)} (from PyPI), {FLASHINFER}.",
        ),
    ] = "",
    *,
    measured: Annotated[Callable[..., BenchSettings], SETTINGS],
    activation: ActivationOption = None,
    offline: Offline = False,
    rows_to: RowOutputOptions,
    actions: ActionOptions,
    out: Output,
) -> ExitCode:
    """Time backends on layers' real shapes.

    Times are compared with the device's roofline. Each result is checked against the reference first; a wrong
    one gets no time. Exit code 1 if a result is wrong or a backend fails.
    """
    shown = rows_to.output_of(out.as_json)
    _refuse_ineffective(context, {"rows": rows, "compile_only": actions.compile_only, "model": model})
    if rows:
        typed = {name: context.params[name] for name in ("tokens", "backends")}
        given = {name: typed[name] if typed_options(context, (name,)) else None for name in typed}
        wanted = RowFilter.of(model, given["backends"], given["tokens"])
        return _from_rows(rows, checkpoint, wanted, shown, actions.verbose, out)
    also = peer_backends(with_)
    settings = measured(checkpoint=checkpoint or "", models=_models(model), also=also)
    source = None
    if checkpoint:
        source = find_source(checkpoint, settings.layer, offline=offline, activation=activation)
    shown.check([*settings.files, *([checkpoint] if checkpoint else [])])
    if also:
        # Nothing is downloaded for a run that cannot be.
        import_module("torch")
    fetch_missing(also, offline=offline, out=out)
    if actions.compile_only:
        return _compile(settings, source, actions.jobs, out)
    if actions.resume and shown.journal is None:
        raise UsageError("--resume continues the rows of a file", hint="give -o FILE.jsonl")
    for note in source.notes if source else ():
        out.note(note)
    measurement = _measure(settings, source, shown, actions, out)
    measured_rows = measurement.rows
    shown.show(measurement.about, measured_rows, out, verbose=actions.verbose, printed=measurement.printed)
    if measurement.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FOUND if any(row.failed for row in measured_rows) else ExitCode.DONE


def _models(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_model, split_names(text, "--model") if text is not None else ())))


def _model(text: str) -> str:
    name, colon, format = text.partition(":")
    model = short_name(built_in(name).name)
    return f"{model}:{pick(format, SCHEMES, 'format')}" if colon else model


def _refuse_ineffective(context: typer.Context, values: Mapping[str, Any]) -> None:
    """Raises UsageError for options on the command line that would have no effect."""
    for name, (ignored, why) in IGNORED.items():
        if values[name] and (ineffective := typed_options(context, ignored)):
            raise UsageError(f"{why}, and {', '.join(ineffective)} would be ignored", hint="leave one out")
    if not values["compile_only"] and typed_options(context, ("jobs",)):
        raise UsageError("--jobs needs --compile-only", hint="add --compile-only")


def _from_rows(
    paths: Sequence[Path],
    checkpoint: str | None,
    wanted: RowFilter,
    shown: RowOutput,
    verbose: bool,
    out: Output,
) -> ExitCode:
    from ...bench.read_rows import read_rows

    if checkpoint:
        raise UsageError("--rows shows existing rows, and CKPT measures new ones", hint="leave one out")
    if len(paths) > 1:
        raise UsageError(f"--rows shows one file, got {len(paths)}", hint="compare two with `moectl compare`")
    path = paths[0]
    if shown.journal is not None:
        raise UsageError(
            f"{shown.journal} would be a copy of the rows", hint="give -o FILE.md, .csv or .json"
        )
    shown.check([path])
    stored = read_rows(path)
    for note in stored.notes:
        out.note(note)
    shown.show(stored.about, wanted.pick(stored.rows, str(path)), out, verbose=verbose)
    return ExitCode.DONE


def _compile(settings: BenchSettings, source: "LayerSource | None", jobs: int, out: Output) -> ExitCode:
    from ...bench.precompile import BenchToCompile, compile_parts

    lines: list[str] = []
    failed = False
    with out.progress("compiling", unit="cases") as progress:
        for line in compile_parts([BenchToCompile(settings, source)], jobs):
            lines.append(line.text)
            failed |= line.failed
            progress(len(lines), 0, line.text)
    document = {"settings": settings.to_json(), "lines": lines}
    out.result(document, lambda console: console.print("\n".join(lines)), f"{len(lines)}")
    return ExitCode.FOUND if failed else ExitCode.DONE


@dataclass(frozen=True)
class Measurement:
    """What a bench measured.

    Attributes:
        about: the conditions as plain data.
        rows: all rows; they are also in the journal, if there is one.
        printed: those that were printed as they came.
        interrupted: Ctrl-C ended it early.
    """

    about: Mapping[str, Any]
    rows: "Sequence[BenchRow]"
    printed: "Sequence[BenchRow]"
    interrupted: bool


def _measure(
    settings: BenchSettings,
    source: "LayerSource | None",
    shown: RowOutput,
    actions: ActionOptions,
    out: Output,
) -> Measurement:
    from ...bench.engine_pick import RECORD, recorded_picks
    from ...bench.journal import RowJournal, RunHeader
    from ...bench.open_bench import open_bench
    from ...bench.run_metadata import machine_metadata, rates_of
    from ...bench.save_times import save_times

    path, interrupted = shown.journal, False
    new: list[BenchRow] = []
    with ExitStack() as stack:
        journal = stack.enter_context(RowJournal.open(path, resume=actions.resume)) if path else None
        before = journal.before if journal else None
        rates = rates_of(before.about) if before else None
        opened = open_bench(settings, source, rates=rates, note=out.note)
        machine = machine_metadata(opened.machine, settings, opened.rates)
        machine[RECORD] = recorded_picks(opened.targets, opened.machine.device)
        run = RunHeader(settings.to_json(), machine)
        conditions = journal.begin(run) if journal else run.to_json()
        stored = before.rows if before else ()
        if before:
            out.note(f"{count(len(stored), 'row')} of {path} {'is' if len(stored) == 1 else 'are'} kept")
        try:
            for row in _measured(opened, frozenset(row.key for row in stored), journal, out):
                new.append(row)
                if shown.stdout == "table":
                    print_row(row, new[:-1], out)
        except KeyboardInterrupt:
            interrupted = True
            out.warn(f"interrupted: {count(len(new), 'row')} measured")
    if actions.save and not interrupted:
        paths = (*save_times(opened, stored, str(conditions.get("begun", ""))), *save_times(opened, new))
        for file in dict.fromkeys(paths):
            out.note(f"saved in {file}")
    return Measurement(conditions, (*stored, *new), new if shown.stdout == "table" else (), interrupted)


def _measured(
    opened: "Bench", done: "frozenset[RowKey]", journal: "RowJournal | None", out: Output
) -> "Iterator[BenchRow]":
    """Yields the rows that are not `done`, after adding each to the journal."""
    pending = opened.pending(done)
    with out.progress("measuring", unit="rows") as progress:
        progress(len(done), len(done) + pending, "")
        for number, row in enumerate(opened.measured(done), len(done) + 1):
            if journal is not None:
                journal.add(row)
            progress(number, len(done) + pending, f"{row.model} {row.backend} M={row.tokens}")
            yield row
