"""What an engine would choose for a benched layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint import open_checkpoint
from ..environment import Device, find_device
from ..errors import MoectlError
from ..kernels.registry import RUNNERS
from ..oracle import engine_named, packages_from, policy_named, select
from ..problem.layouts import LAYOUTS
from ..problem.moe_problem import MoEProblem
from ..run import POLICY
from .bench_rows import BenchRow
from .pivot import TableKey, table_key

if TYPE_CHECKING:
    from .bench_targets import BenchTarget

CHECKPOINTS = {
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "kimi-k2": "moonshotai/Kimi-K2-Thinking",
    "qwen3-30b": "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
}
"""Built-in checkpoints of models that are benched by name: an engine's choice depends on the container."""


@dataclass(frozen=True)
class EnginePick:
    """What the default engine would choose for a layer.

    Attributes:
        backend: its name in a bench; empty if no bench has it.
        title: the engine's name for it, and the field's where it says more; empty if an old file lacks it.
    """

    backend: str
    title: str = ""


def engine_words() -> str:
    """The default engine and its version: ``vLLM 0.33.0``."""
    return engine_named().versioned


def engine_picks(rows: Iterable[BenchRow], about: Mapping[str, Any]) -> dict[TableKey, EnginePick]:
    """What the default engine would choose for each table of `rows`, with its default packages.

    A run's own record (`recorded_picks`) comes first, then the built-in checkpoint of the model. Tables that
    have neither are left out.
    """
    recorded = _recorded(about)
    try:
        device = find_device(str(about.get("device", "")))
    except MoectlError:
        device = None
    picks: dict[TableKey, EnginePick] = {}
    for key in dict.fromkeys(map(table_key, rows)):
        model, _, scheme, parallel, _ = key
        if key[:4] in recorded:
            picks[key] = recorded[key[:4]]
            continue
        checkpoint = CHECKPOINTS.get(model.partition(":")[0])
        if device is None or checkpoint is None or parallel != "1":
            continue
        problem = open_checkpoint(checkpoint, offline=True).groups[0].problem
        if str(problem.scheme) == scheme and (pick := picked(problem, device)):
            picks[key] = pick
    return picks


def picked(problem: MoEProblem, device: Device) -> EnginePick | None:
    """What the default engine would choose for a layer on `device`; None if it supports none there."""
    try:
        decision = select(problem, device, packages_from("full"), engine_named().policy)
    except MoectlError:
        return None
    chosen = decision.chosen
    if chosen is None:
        return None
    name = chosen.backend.name
    kernel = engine_named().kernel_name(chosen.variant.experts)
    title = f"{name} ({kernel})" if kernel and kernel.lower() != name else name
    if name in RUNNERS and _reads(name, chosen.layout or ""):
        return EnginePick(name, title)
    facts = LAYOUTS.get(chosen.layout or "")
    own = [reader for reader in facts.readers if reader.engine == "moectl"] if facts else []
    readers = [name for reader in own for name in reader.backends]
    return EnginePick(next((name for name in readers if not name.startswith("moectl")), ""), title)


def _reads(runner: str, layout: str) -> bool:
    """Whether the backend that runs here has kernels for `layout`: engines give one name to several."""
    own = [backend for backend in policy_named(POLICY).backends() if backend.runner == runner]
    layouts = {form.layout for backend in own for form in backend.forms}
    return not layouts or layout in layouts


RECORD = "engine_picks"
"""Key of a run's conditions with `recorded_picks`."""

_PARTS = ("model", "layers", "scheme", "parallel")
_FIELDS = ("backend", "title")


def recorded_picks(targets: Iterable[BenchTarget], device: Device) -> list[dict[str, str]]:
    """The default engine's choices for the layers of checkpoints that are benched, as plain data."""
    picks = []
    for target in targets:
        if target.model not in CHECKPOINTS and (pick := picked(target.problem, device)):
            layer = (target.model, target.layers, str(target.problem.scheme), target.parallel)
            picks.append({**dict(zip(_PARTS, layer, strict=True)), **asdict(pick)})
    return picks


def _recorded(about: Mapping[str, Any]) -> dict[tuple[str, ...], EnginePick]:
    rows = about.get(RECORD)
    return {
        tuple(str(row.get(part)) for part in _PARTS): EnginePick(*(str(row.get(n, "")) for n in _FIELDS))
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping)
    }
