"""`moectl bench`: backends on layers' real shapes, correctness first."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench import Settings, parse_counts
from ..errors import ExitCode, UsageError
from ..models import FORMATS as WEIGHTS
from ..models import MODELS
from .options import Activation, Device, Offline, Seed, framed, option, pick, typed
from .output import Output, table
from .outputs import check_writable
from .source import DEVICES, backend_names, find_source

if TYPE_CHECKING:
    from ..bench.measure import Bench
    from ..bench.rows import Row
    from ..checkpoint import Checkpoint

EXAMPLES = (
    "moectl bench ./gpt-oss-20b -m 1,8,64-1024*4",
    "moectl bench ./prepared --backend triton,torch --routing uniform,zipf:1.2 -o rows.jsonl",
    "moectl bench --model gpt-oss-20b,kimi-k2 -m 1-8192*4 -o rows.jsonl --resume --plot out.svg",
    "moectl bench --rows rows.jsonl --format md",
)
MORE = (
    "Every result is held to the reference first; a wrong one has no time.",
    "Calls run in CUDA graphs on several routings and copies of small layers, so that weights come from",
    "memory; backends take turns; ± is half the distance between the quartiles of the rounds.",
)
FORMATS = ("md", "csv", "json", "jsonl")

MEASURING = (
    *("tokens", "backend", "layer", "tp", "ep", "device", "routing", "input", "warm", "repeats", "seed"),
    *("resume", "save", "compile_only", "jobs", "activation", "offline"),
)
"""Options that say what is measured; rows of an earlier bench have been."""

IGNORED = {
    "rows": (MEASURING, "--rows shows rows that are there"),
    "compile_only": (("resume", "save", "output", "plot", "format"), "--compile-only measures nothing"),
    "model": (("layer", "activation"), "--model times one layer of each model, as it is known"),
}
"""Options that have no meaning beside another, and why."""


@framed("bench")
def bench(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT", help="The folder of a checkpoint, or a converted one.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            own=True,
            help=f"Instead of CKPT, random weights: of {', '.join(MODELS)}; also NAME:FORMAT.",
        ),
    ] = None,
    rows: Annotated[
        list[Path] | None, option("--rows", own=True, help="Instead of CKPT: show rows of an earlier bench.")
    ] = None,
    tokens: Annotated[
        str, option("--tokens", "-m", own=True, help="Token counts; 64-1024*4 is 64,256,1024.")
    ] = "1,8,64",
    backend: Annotated[
        str, option("--backend", own=True, help="Names with commas; all: every usable one.")
    ] = "all",
    layer: Annotated[
        int | None, option("--layer", help="Layer number; default: the first of each group.", min=0)
    ] = None,
    tp: Annotated[int, option("--tp", "--tp-size", help="Slices of each expert.", min=1)] = 1,
    ep: Annotated[int, option("--ep", "--ep-size", help="Ranks that share the experts.", min=1)] = 1,
    device: Device = None,
    routing: Annotated[
        str,
        option(
            "--routing",
            own=True,
            help="uniform, balanced, zipf:A, hot:N:F, experts:N, trace:FILE or router; with commas.",
        ),
    ] = "uniform",
    input: Annotated[
        Path | None, option("--input", help="safetensors file with x, for --routing router.")
    ] = None,
    warm: Annotated[bool, option("--warm", help="Leave weights in the cache.")] = False,
    repeats: Annotated[int, option("--repeats", help="Rounds per row.", min=1)] = 11,
    seed: Seed = 0,
    format: Annotated[
        str | None, option("--format", help="md, csv, json or jsonl on stdout.", show_default=False)
    ] = None,
    output: Annotated[
        list[Path] | None,
        option("--output", "-o", own=True, help="A file by suffix, also several; .jsonl row by row."),
    ] = None,
    resume: Annotated[bool, option("--resume", help="Go on with the rows of -o FILE.jsonl.")] = False,
    plot: Annotated[Path | None, option("--plot", help="Draw latency and roofline: .svg or .png.")] = None,
    save: Annotated[
        bool, option("--save", help="Keep times for choices by measurement (`moectl explain --measured`).")
    ] = False,
    compile_only: Annotated[
        bool, option("--compile-only", help="Compile what would be timed, and stop.")
    ] = False,
    jobs: Annotated[int, option("--jobs", help="Processes of --compile-only.", min=1, max=64)] = 1,
    activation: Activation = None,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Time backends on layers' real shapes.

    Against the floor that the device's bandwidth and matrix rate set. Each is compared with the
    reference first; a result that is wrong gets no time. Exit code 1 when one was wrong, or failed.
    """
    shown = Shown(stdout_format(format, output, out.as_json), tuple(output or ()), plot)
    _check_together(context, {"rows": rows, "compile_only": compile_only, "model": model})
    if rows:
        return _from_rows(rows, (checkpoint, model), shown, out)
    settings = Settings(
        checkpoint=checkpoint or "",
        models=_models(model),
        tokens=parse_counts(tokens),
        routings=_names(routing),
        backends=tuple(backend_names(backend)),
        layer=layer,
        tp=tp,
        ep=ep,
        input=str(input or ""),
        device=pick(device, DEVICES, "device") if device else "",
        rounds=repeats,
        warm=warm,
        seed=seed,
    )
    source = find_source(checkpoint, layer, offline=offline, activation=activation) if checkpoint else None
    shown.check([*settings.files, *([checkpoint] if checkpoint else [])])
    if compile_only:
        return _compile(settings, source, jobs, out)
    if resume and shown.journal is None:
        raise UsageError("--resume goes on with rows in a file", hint="give -o FILE.jsonl")
    about, measured = _measure(settings, source, shown, resume, save, out)
    shown.show(about, measured, out)
    return ExitCode.FOUND if any(row.failed for row in measured) else ExitCode.DONE


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _models(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_named, _names(text))))


def _named(text: str) -> str:
    name, colon, format = text.partition(":")
    known = pick(name, MODELS, "model")
    return f"{known}:{pick(format, WEIGHTS, 'format')}" if colon else known


def _check_together(context: typer.Context, given: Mapping[str, Any]) -> None:
    """Refuses options on the command line that would have no effect beside the others."""
    for name, (ignored, why) in IGNORED.items():
        if given[name] and (found := typed(context, ignored)):
            raise UsageError(f"{why}, and {', '.join(found)} would be ignored", hint="leave one out")
    if not given["compile_only"] and typed(context, ("jobs",)):
        raise UsageError("--jobs is of --compile-only, which is not asked for", hint="add --compile-only")


def _from_rows(
    paths: Sequence[Path], others: tuple[str | None, ...], shown: "Shown", out: Output
) -> ExitCode:
    from ..bench.rows import read_rows

    if any(others):
        raise UsageError("--rows shows rows that are there, and CKPT and --model measure new ones")
    if len(paths) > 1:
        raise UsageError(
            f"--rows shows one file, got {len(paths)}", hint="hold two against each other by `moectl compare`"
        )
    path = paths[0]
    if shown.journal is not None:
        raise UsageError(f"{shown.journal} would be a copy of rows", hint="give -o FILE.md, .csv or .json")
    shown.check([path])
    found = read_rows(path)
    for note in found.notes:
        out.note(note)
    shown.show(found.about, found.rows, out)
    return ExitCode.DONE


def _compile(settings: Settings, source: "Checkpoint | Path | None", jobs: int, out: Output) -> ExitCode:
    from ..bench.compiling import compile_parts

    lines: list[str] = []
    failed = False
    with out.progress("compiling", unit="cells") as progress:
        for line in compile_parts(settings, source, jobs):
            lines.append(line.text)
            failed |= line.failed
            progress(len(lines), 0, line.text)
    document = {"settings": settings.to_json(), "lines": lines}
    out.result(document, lambda console: console.print("\n".join(lines), markup=False), f"{len(lines)}")
    return ExitCode.FOUND if failed else ExitCode.DONE


def _measure(
    settings: Settings,
    source: "Checkpoint | Path | None",
    shown: "Shown",
    resume: bool,
    save: bool,
    out: Output,
) -> "tuple[Mapping[str, Any], Sequence[Row]]":
    """What rows were taken on, as plain data, and all rows; they go into the journal as they come."""
    from ..bench.about import about, rates_of
    from ..bench.keeping import keep
    from ..bench.opening import open_bench
    from ..bench.rows import Journal, Run, earlier, read_rows

    journal = shown.journal
    going_on = resume and journal is not None and journal.exists() and journal.stat().st_size > 0
    before = read_rows(journal) if going_on and journal else None
    rates = rates_of(before.about) if before else None
    opened = open_bench(settings, source, rates=rates, say=out.note)
    run = Run(settings.to_json(), about(opened.machine, settings, opened.rates))
    rows: list[Row] = []
    with ExitStack() as stack:
        kept: Journal | None = None
        if before is not None and journal is not None:
            rows += earlier(journal, settings, run.machine).rows
            out.note(f"{len(rows)} rows of {journal} are there already")
            kept = stack.enter_context(Journal.resume(journal))
        elif journal is not None:
            kept = stack.enter_context(Journal.begin(journal, run))
        for row in _with_progress(opened, frozenset(row.key for row in rows), len(rows), out):
            rows.append(row)
            if kept is not None:
                kept.add(row)
    for file in keep(opened, rows) if save else ():
        out.note(f"kept in {file}")
    return (before.about if before else run.to_json()), rows


def _with_progress(opened: "Bench", done: frozenset[Any], there: int, out: Output) -> "Iterator[Row]":
    with out.progress("measuring", unit="rows") as progress:
        progress(there, opened.total, "")
        for number, row in enumerate(opened.measured(done), there + 1):
            progress(number, opened.total, f"{row.model} {row.backend} M={row.tokens}")
            yield row


def stdout_format(format: str | None, output: Sequence[Path] | None, as_json: bool) -> str | None:
    """The format of stdout: by name or ``--json``; ``table``, or None where files take everything.

    Raises UsageError for an unknown or a contradicted format.
    """
    if format is not None:
        format = pick(format, FORMATS, "format")
    if as_json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} ask for two formats", hint="leave one of them out")
    if as_json:
        return "json"
    return format or (None if output else "table")


@dataclass(frozen=True)
class Shown:
    """Where rows go: the format of stdout, files by their suffixes, and a plot."""

    stdout: str | None
    files: tuple[Path, ...]
    plot: Path | None

    @property
    def journal(self) -> Path | None:
        """The file that rows are written to as they come."""
        return next((path for path in self.files if path.suffix.lower() == ".jsonl"), None)

    def check(self, reads: Sequence[str | Path]) -> None:
        """Refuses what cannot be written, or would write over what the command `reads`, before the work."""
        for path in self.files:
            if path.suffix.lstrip(".").lower() not in FORMATS:
                raise UsageError(
                    f"the suffix of {path} names no format, expected one of {', '.join(FORMATS)}",
                    hint="give -o rows.jsonl",
                )
            check_writable(path, reads, journal=path == self.journal)
        if sum(path.suffix.lower() == ".jsonl" for path in self.files) > 1:
            raise UsageError("rows go into one .jsonl file as they come, and several are asked for")
        if self.plot is not None:
            from ..bench.plot import check_plot

            check_writable(self.plot, reads)
            check_plot(self.plot)

    def show(self, about: Mapping[str, Any], rows: "Sequence[Row]", out: Output) -> None:
        """Writes files other than the journal, the plot, and stdout."""
        from ..bench.render import brief, document
        from ..convert.disk import write_file

        for path in self.files:
            if path != self.journal:
                text = render(path.suffix.lstrip(".").lower(), about, rows, out)
                write_file(path, text.encode())
            out.note(f"wrote {path}")
        if self.plot is not None:
            from ..bench.plot import draw

            draw(self.plot, about, rows)
            out.note(f"wrote {self.plot}")
        if self.stdout in ("md", "csv", "jsonl"):
            out.text(render(self.stdout, about, rows, out))
        elif self.stdout is not None:
            out.as_json = self.stdout == "json"
            lines = [brief(row) for row in rows]
            out.result(document(about, rows), lambda console: draw_table(about, rows, console), lines)


def render(format: str, about: Mapping[str, Any], rows: "Sequence[Row]", out: Output) -> str:
    """The whole result in one of `FORMATS`."""
    from ..bench.render import as_csv, document, markdown

    if format == "json":
        return out.json(document(about, rows)) + "\n"
    if format == "jsonl":
        lines = [{"kind": "run", **about}, *({"kind": "row", **row.to_json()} for row in rows)]
        return "".join(out.json(line, indent=None) + "\n" for line in lines)
    return markdown(about, rows) if format == "md" else as_csv(about, rows)


def draw_table(about: Mapping[str, Any], rows: "Sequence[Row]", console: Any) -> None:
    """Tables of times and costs, what they rest on, and latency as characters."""
    from ..bench.plot import text_plots
    from ..bench.render import COLUMNS, COSTS, cost_rows, footer, served, shown

    for columns, some in ((COLUMNS, served(rows)), (COSTS, cost_rows(rows))):
        if not some:
            continue
        used = shown(columns, some)
        made = table(*(c.title for c in used), right=[c.title for c in used if c.number])
        for row in some:
            made.add_row(*(column.text(row) for column in used))
        console.print(made)
    for line in footer(about, rows):
        console.print(line, markup=False)
    plots = text_plots(rows)
    if plots:
        console.print("\n" + plots, markup=False)
