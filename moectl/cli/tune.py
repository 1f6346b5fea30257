"""`moectl tune`: the fastest launches of moectl's kernels for a layer on this device, kept for this user."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench import parse_counts
from ..errors import ExitCode, UsageError
from .options import Activation, Offline, framed, option, pick
from .output import Output, count, duration
from .tuned_launches import draw_list, draw_search, listed, search_document, tile_words

if TYPE_CHECKING:
    from ..problem import Parallel
    from ..tuning.layers import Layer
    from ..tuning.search import Progress

EXAMPLES = (
    "moectl tune --model qwen3-30b -m 16,1024 --budget 5m",
    "moectl tune ./gpt-oss-20b --tp 2 --budget 30m",
    "moectl tune --list --stale",
    "moectl tune --clear --model qwen3-30b",
)
MORE = (
    "Launches are kept in MOECTL_CACHE (by default moectl in the platform's cache folder), and are taken for",
    "the same device, layer and versions alone. A run that was stopped goes on where it was.",
)

UNITS = {"s": 1, "m": 60, "h": 3600}
DEFAULT_TOKENS = "1-8192*2"


@framed("tune")
def tune(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CKPT]",
            help="What explain takes: its layers' sizes are tuned, with random weights.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, option("--model", own=True, help="Instead: gpt-oss-120b, kimi-k2, ...; a list.")
    ] = None,
    tokens: Annotated[
        str, option("--tokens", "-m", own=True, help="Token counts; 64-1024*4 is 64,256,1024.")
    ] = DEFAULT_TOKENS,
    budget: Annotated[
        str, option("--budget", help="Time, as 90s, 10m or 1h30m; what is done is kept.")
    ] = "10m",
    families: Annotated[
        str | None, option("--families", help="Kernels to try, with commas; default: all that run here.")
    ] = None,
    tp: Annotated[int, option("--tp", own=True, help="Tensor-parallel ranks.", min=1)] = 1,
    ep: Annotated[bool, option("--ep", own=True, help="Spread whole experts over them.")] = False,
    repeats: Annotated[int, option("--repeats", help="Measurements of each finalist.", min=1)] = 11,
    again: Annotated[bool, option("--again", help="Measure anew what is there.")] = False,
    list: Annotated[bool, option("--list", own=True, help="Show what is kept.")] = False,
    clear: Annotated[bool, option("--clear", help="Drop what --list shows.")] = False,
    stale: Annotated[bool, option("--stale", help="With both: only what other software measured.")] = False,
    activation: Activation = None,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Find the fastest launches of moectl's kernels for these layers on this GPU.

    Every legal launch is held to the portable kernels' result first; what fails or is wrong gets no time.
    Then it is timed with cold caches. Runs of these layers here take what was found from then on.
    """
    from ..problem import Parallel

    counts, seconds = parse_counts(tokens), parse_budget(budget)
    if stale and not (list or clear):
        raise UsageError("--stale goes with --list or --clear", hint="moectl tune --list --stale")
    parallel = Parallel(tp, ep=ep)
    if list or clear:
        asked = checkpoint is not None or model is not None
        layers = _layers(checkpoint, model, parallel, activation, offline) if asked else None
        found = listed(layers, stale)
        dropped = found.clear() if clear else 0
        document = {**found.to_json(), "dropped": dropped}
        out.result(
            document, lambda console: draw_list(found, dropped if clear else None, console), found.brief()
        )
        return ExitCode.DONE
    layers = _layers(checkpoint, model, parallel, activation, offline)
    return _search(layers, counts, seconds, _families(families), repeats, again, out)


def parse_budget(text: str) -> float:
    """Seconds of ``90s``, ``10m``, ``1h30m`` or a plain number; UsageError for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if text and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * UNITS[unit] for number, unit in parts)
    if re.fullmatch(r"\d+(?:\.\d+)?", text):
        return float(text)
    raise UsageError(f"--budget takes a time as 90s, 10m or 1h30m, got {text!r}")


def _layers(
    checkpoint: str | None, model: str | None, parallel: "Parallel", activation: str | None, offline: bool
) -> "list[Layer]":
    """The layers that are asked for, one rank's share of each."""
    from ..checkpoint import open_checkpoint
    from ..checkpoint.stated import parse_stated
    from ..models import MODELS
    from ..tuning.layers import checkpoint_layers, named_layers

    if (checkpoint is None) == (model is None):
        raise UsageError("tune takes either CKPT or --model", hint="moectl tune --model qwen3-30b -m 16,1024")
    if model is not None:
        return named_layers([pick(name.strip(), MODELS, "model") for name in model.split(",")], parallel)
    found = open_checkpoint(str(checkpoint), offline=offline, stated=parse_stated(activation, None))
    return checkpoint_layers(found, parallel)


def _families(text: str | None) -> list[str]:
    """The families of kernels that are asked for."""
    from ..kernels.triton.runner import REGIMES

    return list(REGIMES) if text is None else [pick(n.strip(), REGIMES, "family") for n in text.split(",")]


def _search(
    layers: "Sequence[Layer]",
    counts: Sequence[int],
    seconds: float,
    families: list[str],
    repeats: int,
    again: bool,
    out: Output,
) -> ExitCode:
    """Tunes, and shows what came of it."""
    import time

    from ..tuning.here import tune_layers
    from ..tuning.search import Plan

    with out.progress("tuning", unit="launches") as progress:

        def report(at: "Progress") -> None:
            best = f"{at.best[0]:.1f} us {at.best[1].regime}" if at.best else "nothing right yet"
            progress(at.tried, at.launches, f"{at.cell} ({at.number + 1} of {at.cells}): {best}")
            if at.last and at.last.why:
                out.note(f"{at.cell}: {at.last.regime} {tile_words(at.last.tile)}: {at.last.why}")

        plan = Plan(seconds, time.monotonic, repeats, report)
        tuning = tune_layers(layers, counts, families, plan, again)
    for name, reason in tuning.refused.items():
        out.note(f"{name} is left out: {reason}")
    found = tuning.found
    if found.left:
        left = count(len(found.left), "cell")
        out.note(f"the budget of {duration(seconds)} is spent, {left} left; the same command goes on")
    lines = [f"{cell.name}\t{cell.tokens}\t{row.us:.1f}" for cell, row in (*found.rows, *found.kept)]
    out.result(search_document(tuning), lambda console: draw_search(tuning, console), lines)
    return ExitCode.DONE
