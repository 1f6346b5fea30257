"""`moectl tune`: the fastest launches of moectl's kernels for a layer on this device, kept for this user."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench import parse_counts
from ...errors import ExitCode, Unavailable, UsageError
from ..options import Activation, Offline, framed, named, option, pick
from ..output import Output, count
from ..output_paths import check_spared
from .text import draw_list, draw_search, listed, search_document, tile_words

if TYPE_CHECKING:
    from ...oracle.engine import Engine
    from ...tuning.launch_search import SearchPlan, SearchProgress
    from ...tuning.tune import Tuning
    from ...tuning.tuned_layers import TunedLayer

EXAMPLES = (
    "moectl tune --model qwen3-30b -m 16,1024 --budget 5m",
    "moectl tune ./gpt-oss-20b --tp 2 --budget 30m",
    "moectl tune Qwen/Qwen3-30B-A3B --to vllm ./tuned",
    "moectl tune --list --stale    moectl tune --clear --model qwen3-30b",
)
MORE = (
    "Launches are kept in MOECTL_CACHE (by default moectl in the platform's cache folder), and are taken for",
    "the same device, layer and versions alone. A run that was stopped goes on where it was.",
)

UNITS = {"s": 1, "m": 60, "h": 3600}
DEFAULT_TOKENS = "1-8192*2"


@dataclass(frozen=True)
class TunedLayerOptions:
    """Options that say whose share of which layers is meant."""

    model: Annotated[
        str | None, option("--model", own=True, help="Instead: gpt-oss-120b, kimi-k2, ...; a list.")
    ] = None
    tp: Annotated[int, option("--tp", own=True, help="Tensor-parallel ranks.", min=1)] = 1
    ep: Annotated[bool, option("--ep", own=True, help="Spread whole experts over them.")] = False
    activation: Activation = None
    offline: Offline = False

    def layers(self, checkpoint: str | None) -> "list[TunedLayer]":
        """The layers that are asked for, one rank's share of each."""
        from ...checkpoint import open_checkpoint
        from ...checkpoint.config.user_assumptions import parse_assumptions
        from ...problem.moe_problem import Parallel
        from ...problem.published_layers import MODELS
        from ...tuning.tuned_layers import checkpoint_layers, named_layers

        parallel = Parallel(self.tp, ep=self.ep)
        if (checkpoint is None) == (self.model is None):
            raise UsageError(
                "tune takes either CKPT or --model", hint="moectl tune --model qwen3-30b -m 16,1024"
            )
        if self.model is not None:
            names = [pick(name, MODELS, "model") for name in named(self.model, "--model")]
            return named_layers(names, parallel)
        assumptions = parse_assumptions(self.activation, None)
        return checkpoint_layers(
            open_checkpoint(str(checkpoint), offline=self.offline, assumptions=assumptions), parallel
        )


@dataclass(frozen=True)
class SearchOptions:
    """Options that say what is searched, and for how long."""

    tokens: Annotated[
        str, option("--tokens", "-m", own=True, help="Token counts; 64-1024*4 is 64,256,1024.")
    ] = DEFAULT_TOKENS
    budget: Annotated[str, option("--budget", help="Time, as 90s, 10m or 1h30m; what is done is kept.")] = (
        "10m"
    )
    families: Annotated[
        str | None, option("--families", help="Kernels to try, with commas; default: all that run here.")
    ] = None
    repeats: Annotated[int, option("--repeats", help="Measurements of each finalist.", min=1)] = 11
    again: Annotated[bool, option("--again", help="Measure anew what is there.")] = False
    to: Annotated[
        tuple[str, Path] | None,
        option(
            "--to",
            own=True,
            metavar="ENGINE FILE|DIR",
            help="Tune an engine's Triton experts instead, and write the file that they read.",
        ),
    ] = None

    def plan(self, out: Output, progress: Any) -> "SearchPlan":
        """How the search is run, reported to a bar; what is left out is noted with its reason."""
        import time

        from ...tuning.launch_search import SearchPlan

        def report(at: "SearchProgress") -> None:
            best = f"{at.best[0]:.1f} us {at.best[1].family}" if at.best else "nothing right yet"
            progress(at.tried, at.launches, f"{at.cell} ({at.number + 1} of {at.cells}): {best}")
            if at.last and at.last.why:
                out.note(f"{at.cell}: {at.last.family} {tile_words(at.last.tile)}: {at.last.why}")

        return SearchPlan(parse_budget(self.budget), time.monotonic, self.repeats, report)

    def engine_place(self, checkpoint: str | None) -> "tuple[Engine, Path] | None":
        """The engine whose files are asked for, and where they go; None where they are not."""
        if self.to is None:
            return None
        from ...tuning.engine_tuned_files import tunable_engines

        engines = tunable_engines()
        engine = engines[pick(self.to[0], engines, "engine")]
        if checkpoint is None:
            raise UsageError("--to takes CKPT: what the engine chooses follows from its format")
        if self.to[1].suffix == ".json":
            check_spared(self.to[1], [checkpoint])
        return engine, self.to[1]


@dataclass(frozen=True)
class KeptOptions:
    """Options that say what is done with what earlier searches have found."""

    list: Annotated[bool, option("--list", own=True, help="Show what is kept.")] = False
    clear: Annotated[bool, option("--clear", help="Drop what --list shows.")] = False
    stale: Annotated[bool, option("--stale", help="With both: only what other software measured.")] = False


@framed("tune")
def tune(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT",
            help="What explain takes: its layers' sizes are tuned, with random weights.",
            show_default=False,
        ),
    ] = None,
    *,
    tuned: TunedLayerOptions,
    search: SearchOptions,
    kept: KeptOptions,
    out: Output,
) -> ExitCode:
    """Find the fastest launches of moectl's kernels on this GPU.

    Of these layers every legal launch is held to the portable kernels' result first; what fails or is wrong
    gets no time. Then it is timed with cold caches. Runs of these layers here take what was found.
    """
    counts = parse_counts(search.tokens)
    parse_budget(search.budget)  # refused before the work
    if kept.stale and not (kept.list or kept.clear):
        raise UsageError("--stale goes with --list or --clear", hint="moectl tune --list --stale")
    if kept.list or kept.clear:
        asked = checkpoint is not None or tuned.model is not None
        return _listed(tuned.layers(checkpoint) if asked else None, kept, out)
    place = search.engine_place(checkpoint)
    from ...tuning.tune import tune_layers

    layers = tuned.layers(checkpoint)
    if place is not None:
        return _write_for_engine(layers, counts, search, *place, out)
    chosen = _families(search.families)
    with out.progress("tuning", unit="launches") as progress:
        tuning = tune_layers(layers, counts, chosen, search.plan(out, progress), search.again)
    for name, reason in tuning.refused.items():
        out.note(f"{name} is left out: {reason}")
    return _shown(tuning, search_document(tuning), out)


def _listed(layers: "Sequence[TunedLayer] | None", kept: KeptOptions, out: Output) -> ExitCode:
    """Shows what is kept of `layers`, or of all, and drops it where that is asked for."""
    found = listed(layers, kept.stale)
    dropped = found.clear() if kept.clear else 0
    out.result(
        {**found.to_json(), "dropped": dropped},
        lambda console: draw_list(found, dropped if kept.clear else None, console),
        found.brief(),
    )
    return ExitCode.DONE


def parse_budget(text: str) -> float:
    """Seconds of ``90s``, ``10m``, ``1h30m`` or a plain number; UsageError for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if text and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * UNITS[unit] for number, unit in parts)
    if re.fullmatch(r"\d+(?:\.\d+)?", text):
        return float(text)
    raise UsageError(f"--budget takes a time as 90s, 10m or 1h30m, got {text!r}")


def _families(text: str | None) -> list[str]:
    """The families of kernels that are asked for."""
    from ...kernels.triton.triton_runner import FAMILIES

    names = list(FAMILIES) if text is None else named(text, "--families")
    return [pick(name, FAMILIES, "family") for name in names]


def _write_for_engine(
    layers: "Sequence[TunedLayer]",
    counts: Sequence[int],
    search: SearchOptions,
    engine: "Engine",
    target: Path,
    out: Output,
) -> ExitCode:
    """Tunes the engine's choices, and writes the file of each layer from all that is known of it."""
    from ...cache.measurement_keys import built
    from ...environment import detect_device
    from ...oracle.machine_packages import default_profile, packages_from
    from ...tuning.engine_tuned_files import (
        check_choices,
        check_some_gpu,
        files_of,
        target_of,
        tuned_file_path,
        write_choices,
        wrong_name_note,
    )
    from ...tuning.tune import cached_choices, this_gpu, tune_for_engine

    packages = packages_from(None)
    known = packages.has(engine.package)
    packages = packages if known else packages_from(default_profile("cuda", engine), engine=engine)
    try:
        this_gpu()
    except Unavailable:
        for layer in layers:  # what no GPU would change is said before that there is none
            check_some_gpu(layer.problem, packages, engine)
        raise
    if not known:
        out.note(
            f"{engine.title} is not installed here: what it would choose is decided for its default packages"
        )
    device = detect_device()
    targets = {layer.name: target_of(layer.problem, device, packages, engine) for layer in layers}
    places = {name: tuned_file_path(target, it.name) for name, it in targets.items()}
    if len(set(places.values())) < len(places):
        raise UsageError(
            f"{len(places)} layers have files of their own, {target} is one", hint="name a folder"
        )
    for place in places.values():
        check_choices(place, built()["triton"], engine)
    with out.progress("tuning", unit="launches") as progress:
        tuning = tune_for_engine(targets, counts, search.plan(out, progress), search.again)
    written = []
    for name, rows in cached_choices(targets).items():
        if rows:
            write_choices(places[name], {row.tokens: row.tile for row in rows}, built()["triton"], engine)
            written.append(str(places[name]))
            variable = files_of(engine).variable
            out.note(f"wrote {places[name]}; {engine.title} finds it with {variable} set to its folder")
            if said := wrong_name_note(places[name], targets[name].name, engine):
                out.note(said)
    return _shown(tuning, {**search_document(tuning), "written": written}, out)


def _shown(tuning: "Tuning", document: dict[str, Any], out: Output) -> ExitCode:
    found = tuning.found
    if found.left:
        out.note(f"the budget is spent, {count(len(found.left), 'cell')} left; the same command goes on")
    lines = [f"{cell.name}\t{cell.tokens}\t{row.us:.1f}" for cell, row in (*found.rows, *found.kept)]
    out.result(document, lambda console: draw_search(tuning, console), lines)
    return ExitCode.DONE
