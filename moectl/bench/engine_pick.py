"""The backend that an engine would choose for a benched layer, by the name that it has in a bench."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoint import open_checkpoint
from ..environment import Device, find_device
from ..errors import MoectlError
from ..kernels.registry import RUNNERS
from ..oracle import engine_named, packages_from, select
from ..problem.layouts import LAYOUTS
from ..problem.moe_problem import MoEProblem
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


def engine_picks(rows: Iterable[BenchRow], about: Mapping[str, Any]) -> tuple[str, dict[TableKey, str]]:
    """The default engine, and the backend that it would choose for each table of `rows`.

    A run's own record (`recorded_picks`) comes first, then the built-in checkpoint of the model. Tables are
    left out that have neither, and those for which the engine takes a backend that no bench has.
    """
    engine = engine_named()
    recorded = _recorded(about)
    try:
        device = find_device(str(about.get("device", "")))
    except MoectlError:
        device = None
    picks: dict[TableKey, str] = {}
    for key in dict.fromkeys(map(table_key, rows)):
        model, _, scheme, parallel, _ = key
        if key[:4] in recorded:
            picks[key] = recorded[key[:4]]
            continue
        checkpoint = CHECKPOINTS.get(model.partition(":")[0])
        if device is None or checkpoint is None or parallel != "1":
            continue
        problem = open_checkpoint(checkpoint, offline=True).groups[0].problem
        if str(problem.scheme) == scheme and (backend := picked(problem, device)):
            picks[key] = backend
    return engine.policy.name, picks


def picked(problem: MoEProblem, device: Device) -> str:
    """The bench's name of the backend that the default engine would choose; empty if a bench has none."""
    try:
        chosen = select(problem, device, packages_from("full"), engine_named().policy).chosen
    except MoectlError:
        return ""
    if chosen is None:
        return ""
    if chosen.backend.name in RUNNERS:
        return chosen.backend.name
    facts = LAYOUTS.get(chosen.layout or "")
    own = [reader for reader in facts.readers if reader.engine == "moectl"] if facts else []
    readers = [name for reader in own for name in reader.backends]
    return next((name for name in readers if not name.startswith("moectl")), "")


RECORD = "engine_picks"
"""Key of a run's conditions with `recorded_picks`."""

_PARTS = ("model", "layers", "scheme", "parallel")


def recorded_picks(targets: Iterable[BenchTarget], device: Device) -> list[dict[str, str]]:
    """The default engine's choices for the layers of checkpoints that are benched, as plain data."""
    picks = []
    for target in targets:
        if target.model not in CHECKPOINTS and (name := picked(target.problem, device)):
            layer = (target.model, target.layers, str(target.problem.scheme), target.parallel)
            picks.append({**dict(zip(_PARTS, layer, strict=True)), "backend": name})
    return picks


def _recorded(about: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    rows = about.get(RECORD)
    return {
        tuple(str(row.get(part)) for part in _PARTS): str(row.get("backend"))
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping)
    }
