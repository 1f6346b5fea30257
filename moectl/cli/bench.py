"""`moectl bench`: every usable backend on the layer's real shapes, correctness first."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import __version__
from ..errors import ExitCode, UsageError
from .options import (
    MAX_TOKENS,
    Activation,
    Device,
    Layer,
    Offline,
    Seed,
    WeightsArg,
    check_writable,
    framed,
    option,
    pick,
)
from .output import Output, table
from .source import DEVICES, backend_names, find_source

if TYPE_CHECKING:
    from ..bench import Row

EXAMPLES = (
    "moectl bench ./gpt-oss-20b -m 1,8,64-1024*4",
    "moectl bench ./prepared --backend triton,torch -o result.csv",
    "moectl bench ./kimi -m 64 --format jsonl",
)
FORMATS = ("md", "csv", "json", "jsonl")


@framed("bench")
def bench(
    checkpoint: WeightsArg,
    tokens: Annotated[
        str, option("--tokens", "-m", own=True, help="Token counts; 64-1024*4 is 64,256,1024.")
    ] = "1,8,64",
    backend: Annotated[
        str,
        option(
            "--backend",
            own=True,
            help="Of triton, triton_marlin and torch, with commas; all: every usable one.",
        ),
    ] = "all",
    layer: Layer = None,
    device: Device = None,
    routing: Annotated[
        str, option("--routing", own=True, help="uniform, balanced, zipf:A or hot:N:F.")
    ] = "uniform",
    warm: Annotated[bool, option("--warm", help="Do not flush caches.")] = False,
    repeats: Annotated[int, option("--repeats", help="Measurements per row.", min=1)] = 11,
    seed: Seed = 0,
    format: Annotated[
        str | None, option("--format", help="md, csv, json or jsonl; default: a table.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        option("--output", "-o", own=True, help="Write this file; its suffix picks the format."),
    ] = None,
    activation: Activation = None,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Time every usable backend on one layer's real shapes.

    Against the floor that the device's bandwidth and matrix rate set. Each is compared with the
    reference first; a result that is wrong gets no time, and exit code 1.
    """
    from ..kernels.distributions import check_distribution

    counts = parse_counts(tokens)
    check_distribution(routing)
    wanted = pick_format(format, output, out.as_json)
    asked = backend_names(backend)
    device = pick(device, DEVICES, "device") if device else None
    source = find_source(checkpoint, layer, offline=offline, activation=activation)
    if output is not None:
        check_writable(output)

    from ..bench import BenchOptions
    from ..bench import bench as library
    from ..kernels.timing import measured_rates
    from ..run import choose_backends, open_layer, this_machine

    machine = this_machine(device)
    opened = open_layer(source, layer)
    if opened.partial:
        out.note(opened.partial)
    names = choose_backends(opened.problem, machine, asked, opened.layout)
    prepared = {name: opened.prepared(name, machine.torch) for name in names}
    rates = measured_rates(machine.torch)
    options = BenchOptions(seed, routing, repeats, not warm, rates)
    rows: list[Row] = []
    with out.progress("measuring", unit="rows") as progress:
        for row in library(prepared, counts, opened.reference, options):
            rows.append(row)
            progress(len(rows), len(counts) * len(names), f"{row.backend} M={row.tokens}")
    head = {
        "checkpoint": checkpoint,
        "layer": opened.layer,
        "problem": asdict(opened.problem),
        "partial": opened.partial,
        "device": machine.device.name,
        "versions": versions(),
        "routing": routing,
        "caches": "warm" if warm else "cold",
        "rates": asdict(rates),
    }
    if output is not None and wanted is not None:
        from ..convert.disk import write_file

        write_file(output, render(wanted, head, rows, out).encode())
        out.note(f"wrote {output}")
    elif wanted not in (None, "json"):
        out.text(render(wanted, head, rows, out))
    if output is None and wanted == "json":
        out.as_json = True
    if out.as_json or wanted is None:
        lines = [brief(row) for row in rows]
        out.result(document(head, rows), lambda console: draw(head, rows, console), lines)
    return ExitCode.DONE if all(row.check.ok for row in rows) else ExitCode.FOUND


def parse_counts(text: str) -> list[int]:
    """Token counts of ``1,8,64-1024*4`` in order, each once; UsageError for anything else."""
    counts: list[int] = []
    for item in text.split(","):
        try:
            first, dash, rest = item.strip().partition("-")
            if not dash:
                counts.append(int(first))
                continue
            last, star, factor = rest.partition("*")
            value, end, times = int(first), int(last), int(factor) if star else 2
            if times < 2 or value < 1:
                raise ValueError(item)
            while value <= end:
                counts.append(value)
                value *= times
        except ValueError as error:
            raise UsageError(
                f"token counts must look like 1,8,64-1024*4, got {item.strip()!r} in {text!r}",
                hint="A-B*F counts from A to B by factors of F (2 by default)",
            ) from error
    if not counts or min(counts) < 1 or max(counts) > MAX_TOKENS:
        raise UsageError(f"token counts must be from 1 to {MAX_TOKENS}, got {text!r}")
    return list(dict.fromkeys(counts))


def pick_format(format: str | None, output: Path | None, as_json: bool) -> str | None:
    """The format of the file or of stdout: by name, by a file's suffix, or ``--json`` for stdout.

    None is a table on stdout. Raises UsageError for an unknown or a contradicted format.
    """
    if format is not None:
        format = pick(format, FORMATS, "format")
    if output is None:
        if as_json and format not in (None, "json"):
            raise UsageError(
                f"--json and --format {format} ask for two formats", hint="leave one of them out"
            )
        return "json" if as_json else format
    suffix = output.suffix.lstrip(".").lower()
    if suffix in FORMATS and format not in (None, suffix):
        raise UsageError(
            f"--format {format} and {output.name} ask for two formats", hint="leave --format out"
        )
    if format is None and suffix not in FORMATS:
        raise UsageError(
            f"the suffix of {output} names no format, expected one of {', '.join(FORMATS)}",
            hint="give --format too",
        )
    return format or suffix


def versions() -> dict[str, str]:
    """Versions of what times depend on."""
    import platform

    import torch

    from ..environment import packages_from

    found = {"moectl": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    triton = packages_from(None).versions.get("triton")
    return found | ({"triton": triton} if triton else {})


COLUMNS = (
    "backend",
    "M",
    "experts",
    "check",
    "us",
    "+-",
    "GB/s",
    "TFLOP/s",
    "floor us",
    "bound",
    "of floor",
)


def cells(row: "Row") -> list[str]:
    """One row in words, in the order of `COLUMNS`."""
    verdict = f"ok {row.check.rms:.1e}" if row.check.ok else f"FAILED {row.check.rms:.1e}"
    timed: Sequence[str] = ("-",) * 4
    percent = "-"
    if row.timing is not None:
        timing = row.timing
        timed = (
            f"{timing.median_us:.1f}",
            f"{timing.spread_us:.1f}",
            f"{row.gb_per_s:.1f}",
            f"{row.tflop_per_s:.3g}",
        )
        percent = f"{row.floor_percent:.0f}%"
    floor = (f"{row.floor.seconds * 1e6:.1f}", row.floor.bound)
    return [row.backend, str(row.tokens), str(row.work.experts), verdict, *timed, *floor, percent]


def brief(row: "Row") -> str:
    """Backend, tokens and microseconds."""
    return f"{row.backend}\t{row.tokens}\t{row.timing.median_us if row.timing else 'failed'}"


def draw(head: dict[str, Any], rows: "Sequence[Row]", console: Any) -> None:
    """The table with what its numbers rest on."""
    rates = head["rates"]
    console.print(f"layer {head['layer']} of {head['checkpoint']} on {head['device']}", markup=False)
    console.print(
        f"floor: {rates['bandwidth'] / 1e9:.4g} GB/s and {rates['flops'] / 1e12:.3g} TFLOP/s "
        f"({rates['source']}); {head['caches']} caches, {head['routing']} routing",
        markup=False,
    )
    made = table(*COLUMNS, right=COLUMNS[4:9] + COLUMNS[10:])
    for row in rows:
        made.add_row(*cells(row))
    console.print(made)


def record(row: "Row") -> dict[str, Any]:
    """One row as plain data."""
    found = asdict(row)
    found["check"]["tolerance"].pop("reason")
    return found


def flat(row: "Row") -> dict[str, Any]:
    """One row as a flat mapping, for CSV."""
    timing = row.timing
    return {
        "backend": row.backend,
        "layout": row.layout,
        "tokens": row.tokens,
        "experts": row.work.experts,
        "ok": row.check.ok,
        "error_max": row.check.max,
        "error_rms": row.check.rms,
        "median_us": timing.median_us if timing else "",
        "spread_us": timing.spread_us if timing else "",
        "gb_per_s": row.gb_per_s if timing else "",
        "tflop_per_s": row.tflop_per_s if timing else "",
        "floor_us": row.floor.seconds * 1e6,
        "bound": row.floor.bound,
        "floor_percent": row.floor_percent if timing else "",
    }


def document(head: dict[str, Any], rows: "Sequence[Row]") -> dict[str, Any]:
    """The whole result as plain data."""
    return {**head, "rows": [record(row) for row in rows]}


def render(format: str, head: dict[str, Any], rows: "Sequence[Row]", out: Output) -> str:
    """The whole result in one of `FORMATS`."""
    if format == "json":
        return out.json(document(head, rows)) + "\n"
    if format == "jsonl":
        return "".join(out.json({**head, **record(row)}, indent=None) + "\n" for row in rows)
    constant = {"checkpoint": head["checkpoint"], "layer": head["layer"], "device": head["device"]}
    constant |= {"routing": head["routing"], "caches": head["caches"], **head["versions"]}
    if format == "csv":
        text = io.StringIO()
        records = [{**constant, **flat(row)} for row in rows]
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in rows)]
    facts = ", ".join(f"{key} {value}" for key, value in constant.items())
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", facts]) + "\n"
