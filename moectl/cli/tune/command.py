"""`moectl tune`: finds the fastest launches of moectl's kernels for a layer on this GPU, and caches them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench import parse_counts
from ...errors import ExitCode, Unavailable, UsageError
from ..options import ActivationOption, Offline, framed, option, pick, split_names
from ..output import Output, count
from ..output_paths import check_not_read
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
    "moectl tune --list --stale",
    "moectl tune --clear --model qwen3-30b",
)
MORE = (
    "Launches are cached in MOECTL_CACHE (default: moectl in the platform's cache directory), for the same",
    "device, layer and versions only. An interrupted run continues where it stopped.",
)

UNITS = {"s": 1, "m": 60, "h": 3600}
DEFAULT_TOKENS = "1-8192*2"


@dataclass(frozen=True)
class TunedLayerOptions:
    """Options for the layers, and one rank's share of them."""

    model: Annotated[
        str | None, option("--model", own=True, help="Instead of CKPT: gpt-oss-120b, kimi-k2, ...; a list.")
    ] = None
    tp: Annotated[int, option("--tp", own=True, help="Tensor-parallel ranks.", min=1)] = 1
    ep: Annotated[bool, option("--ep", own=True, help="Distribute whole experts over the ranks.")] = False
    activation: ActivationOption = None
    offline: Offline = False

    def layers(self, checkpoint: str | None) -> "list[TunedLayer]":
        """The requested layers, one rank's share of each."""
        from ...checkpoint import open_checkpoint
        from ...checkpoint.config.user_assumptions import parse_assumptions
        from ...problem.moe_problem import Parallel
        from ...tuning.tuned_layers import checkpoint_layers, named_layers

        parallel = Parallel(self.tp, ep=self.ep)
        if (checkpoint is None) == (self.model is None):
            raise UsageError(
                "tune takes either CKPT or --model", hint="moectl tune --model qwen3-30b -m 16,1024"
            )
        if self.model is not None:
            return named_layers(split_names(self.model, "--model"), parallel)
        assumptions = parse_assumptions(self.activation, None)
        return checkpoint_layers(
            open_checkpoint(str(checkpoint), offline=self.offline, assumptions=assumptions), parallel
        )


@dataclass(frozen=True)
class SearchOptions:
    """Options for the search and its time."""

    tokens: Annotated[
        str, option("--tokens", "-m", own=True, help="Token counts; 64-1024*4 is 64,256,1024.")
    ] = DEFAULT_TOKENS
    budget: Annotated[
        str, option("--budget", help="Time, such as 90s, 10m or 1h30m; results are cached.")
    ] = "10m"
    families: Annotated[
        str | None, option("--families", help="Kernel families to try, a list; default: all that run here.")
    ] = None
    repeats: Annotated[int, option("--repeats", help="Measurements of each finalist.", min=1)] = 11
    again: Annotated[bool, option("--again", help="Measure cached launches again.")] = False
    to: Annotated[
        tuple[str, Path] | None,
        option(
            "--to",
            own=True,
            metavar="ENGINE FILE|DIR",
            help="Tune an engine's Triton experts instead, and write their tuned file.",
        ),
    ] = None

    def plan(self, out: Output, progress: Any) -> "SearchPlan":
        """The search plan, which reports to a progress bar and notes failed launches with their reasons."""
        import time

        from ...tuning.launch_search import SearchPlan

        def report(at: "SearchProgress") -> None:
            best = f"{at.best[0]:.1f} us {at.best[1].family}" if at.best else "nothing right yet"
            progress(at.tried, at.launches, f"{at.cell} ({at.number + 1} of {at.cells}): {best}")
            if at.last and at.last.why:
                out.note(f"{at.cell}: {at.last.family} {tile_words(at.last.tile)}: {at.last.why}")

        return SearchPlan(parse_budget(self.budget), time.monotonic, self.repeats, report)

    def engine_target(self, checkpoint: str | None) -> "tuple[Engine, Path] | None":
        """The engine of --to and the target path; None without the option."""
        if self.to is None:
            return None
        from ...tuning.engine_tuned_files import tunable_engines

        engines = tunable_engines()
        engine = engines[pick(self.to[0], engines, "engine")]
        if checkpoint is None:
            raise UsageError("--to takes CKPT: what the engine chooses follows from its format")
        if self.to[1].suffix == ".json":
            check_not_read(self.to[1], [checkpoint])
        return engine, self.to[1]


@dataclass(frozen=True)
class KeptOptions:
    """Options for the results of earlier searches."""

    list: Annotated[bool, option("--list", own=True, help="Show cached launches.")] = False
    clear: Annotated[bool, option("--clear", help="Drop what --list shows.")] = False
    stale: Annotated[
        bool, option("--stale", help="With --list or --clear: only launches measured with other software.")
    ] = False


@framed("tune")
def tune(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT",
            help="As for explain; launches are tuned for its layers' sizes, on random weights.",
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

    Each legal launch of these layers is first checked against the portable kernels' result; launches that
    fail or are wrong are not timed. The others are timed with cold caches. Runs of these layers on this
    machine then use the fastest.
    """
    counts = parse_counts(search.tokens)
    parse_budget(search.budget)  # an error before the work
    if kept.stale and not (kept.list or kept.clear):
        raise UsageError("--stale needs --list or --clear", hint="moectl tune --list --stale")
    if kept.list or kept.clear:
        named_layers = checkpoint is not None or tuned.model is not None
        return _listed(tuned.layers(checkpoint) if named_layers else None, kept, out)
    engine_target = search.engine_target(checkpoint)
    from ...tuning.tune import tune_layers

    layers = tuned.layers(checkpoint)
    if engine_target is not None:
        return _write_for_engine(layers, counts, search, *engine_target, out)
    chosen = _families(search.families)
    with out.progress("tuning", unit="launches") as progress:
        tuning = tune_layers(layers, counts, chosen, search.plan(out, progress), search.again)
    for name, reason in tuning.refused.items():
        out.note(f"{name} is skipped: {reason}")
    return _shown(tuning, search_document(tuning), out)


def _listed(layers: "Sequence[TunedLayer] | None", kept: KeptOptions, out: Output) -> ExitCode:
    """Shows the cached launches of `layers`, or of all layers, and drops them with --clear."""
    cached = listed(layers, kept.stale)
    dropped = cached.clear() if kept.clear else 0
    out.result(
        {**cached.to_json(), "dropped": dropped},
        lambda console: draw_list(cached, dropped if kept.clear else None, console),
        cached.brief(),
    )
    return ExitCode.DONE


def parse_budget(text: str) -> float:
    """Seconds of ``90s``, ``10m``, ``1h30m`` or a plain number; UsageError for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if text and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * UNITS[unit] for number, unit in parts)
    if re.fullmatch(r"\d+(?:\.\d+)?", text):
        return float(text)
    raise UsageError(f"--budget takes a time such as 90s, 10m or 1h30m, got {text!r}")


def _families(text: str | None) -> list[str]:
    """The kernel families of --families."""
    from ...kernels.triton.triton_runner import FAMILIES

    names = list(FAMILIES) if text is None else split_names(text, "--families")
    return [pick(name, FAMILIES, "family") for name in names]


def _write_for_engine(
    layers: "Sequence[TunedLayer]",
    counts: Sequence[int],
    search: SearchOptions,
    engine: "Engine",
    target: Path,
    out: Output,
) -> ExitCode:
    """Tunes the engine's choices, and writes each layer's file from all of its cached rows."""
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
    installed = packages.has(engine.package)
    packages = packages if installed else packages_from(default_profile("cuda", engine), engine=engine)
    try:
        this_gpu()
    except Unavailable:
        for layer in layers:  # an error that no GPU would change comes before that of the missing GPU
            check_some_gpu(layer.problem, packages, engine)
        raise
    if not installed:
        out.note(
            f"{engine.title} is not installed here: what it would choose is decided for its default packages"
        )
    device = detect_device()
    targets = {layer.name: target_of(layer.problem, device, packages, engine) for layer in layers}
    paths = {name: tuned_file_path(target, tuned_file.name) for name, tuned_file in targets.items()}
    if len(set(paths.values())) < len(paths):
        raise UsageError(
            f"{len(paths)} layers need a file each, {target} is one file", hint="give a directory"
        )
    for path in paths.values():
        check_choices(path, built()["triton"], engine)
    with out.progress("tuning", unit="launches") as progress:
        tuning = tune_for_engine(targets, counts, search.plan(out, progress), search.again)
    written = []
    for name, rows in cached_choices(targets).items():
        if rows:
            write_choices(paths[name], {row.tokens: row.tile for row in rows}, built()["triton"], engine)
            written.append(str(paths[name]))
            variable = files_of(engine).variable
            out.note(f"wrote {paths[name]}; {engine.title} finds it with {variable} set to its directory")
            if note := wrong_name_note(paths[name], targets[name].name, engine):
                out.note(note)
    return _shown(tuning, {**search_document(tuning), "written": written}, out)


def _shown(tuning: "Tuning", document: dict[str, Any], out: Output) -> ExitCode:
    result = tuning.found
    if result.left:
        left = count(len(result.left), "case")
        out.note(f"the budget is spent, {left} left; run the same command to continue")
    lines = [f"{case.name}\t{case.tokens}\t{row.us:.1f}" for case, row in (*result.rows, *result.kept)]
    out.result(document, lambda console: draw_search(tuning, console), lines)
    return ExitCode.DONE
