"""How far a policy agrees with recorded decisions of the engine that it mirrors."""

from __future__ import annotations

import gzip
import json
import runpy
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint.quantization import parse_quantization
from .environment import PROFILES_FILE, Device, Packages
from .errors import UsageError
from .oracle.decision import Candidate, Decision
from .oracle.policy import Policy
from .oracle.select import OutOfScope, select
from .problem import Activation, Dims, MoEProblem, Parallel, Routing
from .schemes import Scheme, int_format

Record = Mapping[str, Any]

FIELDS = ("selected", "experts", "monolithic", "padded", "usable")
"""What is compared of every recorded decision."""
LINE_LIMIT = 1 << 20
"""Longest line that is read, in bytes."""


@dataclass(frozen=True)
class Grid:
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


def read_grid(path: Path | None = None) -> Grid:
    """The grid in `path` (``.json``, or ``.py``, which is run); the built-in one without a path.

    UsageError when a table is missing.
    """
    builtin = json.loads(PROFILES_FILE.read_text(encoding="utf-8"))
    if path is None:
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
    return Grid(
        models=tables["MODELS"],
        schemes=tables["SCHEMES"],
        devices=tables["DEVICES"],
        parallel={**tables["PARALLEL"], **tables.get("PARALLEL_EXTRA", {})},
        profiles=tables["PROFILES"],
        direct=tables.get("DIRECT") or builtin["DIRECT"],
    )


def read_decisions(path: Path) -> Iterator[tuple[int, Record]]:
    """Line numbers and records of a ``.jsonl`` or ``.jsonl.gz`` file; UsageError names a bad line."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as lines:
            while line := lines.readline(LINE_LIMIT):
                number += 1
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise UsageError(f"{path} line {number} must be an object, got {type(record).__name__}")
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


def recorded_problem(grid: Grid, record: Record) -> MoEProblem:
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
    activation = Activation(model["activation"])
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
        rows="interleaved" if activation.name == "swigluoai" else "concatenated",
        act_order=act_order,
        bias=model["has_bias"],
    )
    return whole.on(
        Parallel(
            tp=parallel["tp"],
            dp=parallel["dp"],
            ep=parallel["ep"],
            all2all=parallel["a2a"],
            eplb=parallel.get("eplb", False),
        )
    )


def decide(grid: Grid, record: Record, policy: Policy) -> Decision:
    """What `policy` decides for a recorded cell; OutOfScope when it has no row for it."""
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


def recorded_answer(record: Record) -> dict[str, Any]:
    """The compared fields, as recorded."""
    stopped = any(record.get(name) for name in ("error", "gates", "create_weights_error"))
    padded = record["padded"]
    return {
        "selected": record["selected"],
        "experts": record["experts_cls"],
        "monolithic": record["monolithic"],
        "padded": None if padded is None else (padded["hidden"], padded["intermediate_per_partition"]),
        "usable": record["selected"] not in (None, "NONE") and not stopped,
    }


def our_answer(decision: Decision, direct: bool) -> dict[str, Any]:
    """The compared fields, as decided. A `direct` question never reaches a layer, so it has no sizes."""
    chosen, dims = decision.chosen, decision.problem.dims
    sized = chosen is not None and decision.sized and not direct
    return {
        "selected": chosen.engine_name if chosen else None,
        "experts": chosen.variant.experts if chosen else None,
        "monolithic": chosen.variant.monolithic if chosen else None,
        "padded": (dims.padded_hidden, dims.padded_intermediate) if sized else None,
        "usable": decision.usable,
    }


def reasons_missed(record: Record, decision: Decision) -> list[str]:
    """Recorded refusals that are not among ours, and an order of asking that differs."""
    missed = []
    for refusal in record["rejected"]:
        same: list[Candidate] = [
            c
            for c in decision.candidates
            if c.engine_name == refusal["backend"] and refusal["experts_cls"] in (None, c.variant.experts)
        ]
        codes = [{verdict.vllm_code for verdict in c.failed} for c in same]
        if not codes or not all(refusal["code"] in found for found in codes):
            missed.append(f"{refusal['backend']}: recorded {refusal['code']}, ours {codes}")
    asked = list(dict.fromkeys(refusal["backend"] for refusal in record["rejected"]))
    ours = list(dict.fromkeys(c.engine_name for c in decision.candidates))
    if asked != ours[: len(asked)]:
        missed.append(f"order: recorded {asked}, ours {ours[: len(asked)]}")
    return missed


@dataclass(frozen=True)
class Disagreement:
    """One field of one recorded decision that differs."""

    line: int
    cell: str
    field: str
    recorded: object
    ours: object

    def __str__(self) -> str:
        return f"line {self.line}: {self.cell}: {self.field}: recorded {self.recorded}, ours {self.ours}"


@dataclass
class Report:
    """Counts by scheme, and every disagreement."""

    asked: Counter[str] = field(default_factory=Counter)
    agreed: Counter[str] = field(default_factory=Counter)
    out_of_scope: Counter[tuple[str, str]] = field(default_factory=Counter)
    without_meaning: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)

    @property
    def disagreed(self) -> int:
        """Decisions that differ in at least one field."""
        return sum(self.asked.values()) - sum(self.agreed.values())

    def lines(self) -> Iterator[str]:
        """The report as text, the total last."""
        for scheme, count in self.asked.items():
            yield f"{scheme}: {self.agreed[scheme]} of {count} agree"
        for platform in sorted({where for _, where in self.out_of_scope}):
            schemes = {scheme: n for (scheme, where), n in self.out_of_scope.items() if where == platform}
            yield f"out of scope on {platform}: {sum(schemes.values())} ({', '.join(schemes)})"
        yield from (str(found) for found in self.disagreements)
        asked, agreed = sum(self.asked.values()), sum(self.agreed.values())
        share = f"{agreed / asked:.2%}" if asked else "nothing asked"
        yield (
            f"total: {agreed} of {asked} agree ({share}), {sum(self.out_of_scope.values())} out of scope, "
            f"{self.without_meaning} not counted"
        )


def has_meaning(grid: Grid, record: Record) -> bool:
    """False for cells that were never run, and for DeepEP exchange on platforms that have none."""
    if record.get("not_run"):
        return False
    kind = grid.row("devices", record["device"])["kind"]
    deep_ep = str(grid.row("parallel", record["parallel"])["a2a"]).startswith("deepep")
    return not (deep_ep and kind in ("cpu", "xpu"))


CELL = ("scheme", "model", "device", "profile", "parallel", "forced")


def compare(
    records: Iterable[tuple[int, Record]], grid: Grid, policy: Policy, *, reasons: bool = False
) -> Report:
    """Agreement of `policy` with `records`; `reasons` also compares refusals and the order of asking.

    UsageError when a record lacks a field or uses a name that the grid does not have.
    """
    report = Report()
    for line, record in records:
        needed = (*CELL, "selected", "experts_cls", "monolithic", "padded", "rejected")
        if missing := [name for name in needed if name not in record]:
            raise UsageError(f"line {line} has no {', '.join(missing)}; it is not a recorded decision")
        if not has_meaning(grid, record):
            report.without_meaning += 1
            continue
        scheme = record["scheme"]
        try:
            decision = decide(grid, record, policy)
        except OutOfScope:
            report.out_of_scope[scheme, grid.row("devices", record["device"])["kind"]] += 1
            continue
        recorded = recorded_answer(record)
        ours = our_answer(decision, isinstance(grid.row("schemes", scheme)[0], str))
        cell = " ".join(str(record[name]) for name in CELL[:-1])
        cell += f" asked for {record['forced']}" if record["forced"] else ""
        found = [
            Disagreement(line, cell, name, recorded[name], ours[name])
            for name in FIELDS
            if recorded[name] != ours[name]
        ]
        if reasons:
            found += [
                Disagreement(line, cell, "reasons", missed, "") for missed in reasons_missed(record, decision)
            ]
        report.asked[scheme] += 1
        report.agreed[scheme] += not found
        report.disagreements += found
    return report
