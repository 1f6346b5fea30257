"""Recorded decisions of an engine, and the problems behind the names in them."""

from __future__ import annotations

import gzip
import json
import runpy
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from moectl.checkpoint.config.quantization import parse_quantization
from moectl.environment import Device, Packages
from moectl.errors import UsageError
from moectl.oracle.decision import Decision
from moectl.oracle.engine import Engine
from moectl.oracle.policy import Policy
from moectl.oracle.recorded_fields import Record
from moectl.oracle.registry import engine_named
from moectl.oracle.select import select
from moectl.problem.moe_problem import Activation, Dims, MoEProblem, Parallel, Routing
from moectl.problem.schemes import Scheme, int_format

LINE_LIMIT = 1 << 20
"""Longest line that is read, in bytes."""
CELL = ("scheme", "model", "device", "profile", "parallel", "forced")
"""The names that identify a case of the grid."""
NEEDED = (
    *CELL,
    "gates",
    "selected",
    "experts_cls",
    "monolithic",
    "padded",
    "priority",
    "rejected",
    "error",
)
"""Fields that every recorded decision has."""


@dataclass(frozen=True)
class RecordedGrid:
    """Inputs behind the names in recorded decisions; each maps a name to plain data."""

    models: Record
    schemes: Record
    devices: Record
    parallel: Record
    profiles: Record
    direct: Record

    def row(self, table: str, name: object) -> Any:
        """One entry; UsageError when the grid has no such name."""
        rows: Record = getattr(self, table)
        if not isinstance(name, str) or name not in rows:
            raise UsageError(
                f"the grid has no {table} {name!r}", hint="Give the grid of these decisions with --grid FILE."
            )
        return rows[name]


def read_grid(path: Path | None = None, engine: Engine | None = None) -> RecordedGrid:
    """The grid in `path` (``.json``, or ``.py``, which is run); without a path the one that `engine` has.

    `engine` is the default one for None. UsageError when there is no grid, or a table is missing.
    """
    engine = engine or engine_named()
    builtin: Record = {}
    if engine.recordings is not None:
        builtin = json.loads(engine.recordings.grid.read_text(encoding="utf-8"))
    if path is None:
        if not builtin:
            raise UsageError(
                f"{engine.name} has no grid of recorded decisions", hint="Give one with --grid FILE."
            )
        tables = builtin
    elif path.suffix == ".py":
        tables = runpy.run_path(str(path))
    else:
        try:
            tables = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
    wanted = ("MODELS", "SCHEMES", "DEVICES", "PARALLEL", "PROFILES")
    missing = [name for name in wanted if not isinstance(tables.get(name), Mapping)]
    if missing:
        raise UsageError(f"{path} has no table {', '.join(missing)}; a grid has {', '.join(wanted)}")
    return RecordedGrid(
        models=tables["MODELS"],
        schemes=tables["SCHEMES"],
        devices=tables["DEVICES"],
        parallel={**tables["PARALLEL"], **tables.get("PARALLEL_EXTRA", {})},
        profiles=tables["PROFILES"],
        direct=tables.get("DIRECT") or builtin.get("DIRECT", {}),
    )


def opened(path: Path) -> IO[bytes]:
    """`path` for reading, unpacked where its name ends in ``.gz``."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def read_decisions(path: Path, part: int = 0, parts: int = 1) -> Iterator[tuple[int, Record]]:
    """Line numbers and records of a ``.jsonl`` or ``.jsonl.gz`` file, or every `parts`-th from `part` on.

    UsageError names a line that is bad, or that is no recorded decision.
    """
    number = 0
    try:
        with opened(path) as lines:
            while line := lines.readline(LINE_LIMIT):
                number += 1
                if number % parts != part:
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise UsageError(f"{path} line {number} must be an object, got {type(record).__name__}")
                if missing := [name for name in NEEDED if name not in record]:
                    raise UsageError(
                        f"{path} line {number} has no {', '.join(missing)}; it is not a recorded decision"
                    )
                yield number, record
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read after line {number}: {error}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} line {number} is not JSON of at most {LINE_LIMIT} bytes: {error}"
        ) from error


def recorded_device(row: Record) -> Device:
    """The device of a grid row."""
    kind = str(row["kind"])
    major, minor = row.get("cc", (0, 0))
    arch = {"cuda": f"sm{major}{minor}", "rocm": str(row.get("gfx")), "cpu": "x86"}
    return Device(
        platform=kind,
        arch=arch.get(kind, kind),
        name=row["name"],
        memory_bytes=row.get("mem", 0) << 30,
        features=frozenset({"amx"}) if row.get("amx") else frozenset(),
    )


def recorded_problem(grid: RecordedGrid, record: Record) -> MoEProblem:
    """One rank's problem of a recorded decision."""
    model, config = grid.row("models", record["model"]), grid.row("schemes", record["scheme"])[0]
    parallel, routing = grid.row("parallel", record["parallel"]), model["routing"]
    if isinstance(config, str):
        asked = grid.row("direct", config)
        weight = int_format(asked["bits"], asked["group"], zero_point=asked["zero_point"])
        storage, scheme, act_order = asked["storage"], Scheme(weight), asked["act_order"]
    else:
        found = parse_quantization(config, model_type=model["model_type"])
        storage, scheme, act_order = found.storage, found.scheme, found.act_order
    name = str(model["activation"])
    activation = Activation(
        name.removesuffix("_no_mul").removesuffix("_uninterleave"),
        limit=routing.get("swiglu_limit"),
        gated=not name.endswith("_no_mul"),
    )
    whole = MoEProblem(
        dims=Dims(model["hidden"], model["inter"]),
        experts=model["E"],
        top_k=model["topk"],
        scheme=scheme,
        activation=activation,
        routing=Routing(
            scoring=routing["scoring_func"],
            renormalize=routing["renormalize"],
            correction_bias=routing.get("e_bias", False),
            groups=routing.get("num_expert_group"),
            topk_groups=routing.get("topk_group"),
            scale=routing.get("routed_scaling_factor", 1.0),
        ),
        storage=storage,
        rows="interleaved" if name == "swigluoai" else "concatenated",
        act_order=act_order,
        bias=model["has_bias"],
        router_dtype=routing.get("router_dtype", "bf16"),
        model_type=model["model_type"],
    )
    deployed = Parallel(
        tp=parallel["tp"],
        dp=parallel["dp"],
        ep=parallel["ep"],
        all2all=parallel["a2a"],
        eplb=parallel.get("eplb", False),
    )
    if deployed.ep_size > whole.experts:
        # The engine selects for ranks without experts, too; moectl rejects such deployments.
        return replace(whole, parallel=deployed, local_experts=1)
    return whole.on(deployed)


def decide(grid: RecordedGrid, record: Record, policy: Policy) -> Decision:
    """The decision of `policy` for a recorded case; OutOfScope if it has no row for it."""
    config = grid.row("schemes", record["scheme"])[0]
    profile = grid.row("profiles", record["profile"])
    asked = policy
    if isinstance(config, str):
        asked = policy.only_route(grid.row("direct", config)["route"])
    return select(
        recorded_problem(grid, record),
        recorded_device(grid.row("devices", record["device"])),
        Packages(dict.fromkeys(profile["packages"], ""), env=profile["env"]),
        asked,
        only=record["forced"],
    )


def has_meaning(grid: RecordedGrid, record: Record, engine: Engine) -> bool:
    """False for cases that were never run, and for those that are not meaningful for `engine`."""
    if record.get("not_run"):
        return False
    if engine.recordings is None:
        return True
    platform = grid.row("devices", record["device"])["kind"]
    exchange = str(grid.row("parallel", record["parallel"])["a2a"])
    return not engine.recordings.without_meaning(platform, exchange)


def is_direct(grid: RecordedGrid, record: Record) -> bool:
    """True if the engine's select function was called directly, without a layer."""
    return isinstance(grid.row("schemes", record["scheme"])[0], str)
