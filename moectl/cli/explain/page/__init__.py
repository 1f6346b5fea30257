"""One HTML file of answers for many checkpoints, GPUs and deployments, made from JSON documents of `explain`.

The file has everything inside it and loads nothing: a table whose cells name the chosen backends, and the
reasons of every cell as data that its script turns into text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ....checkpoint.checkpoint import Origin
from ....oracle.registry import engine_named
from ....oracle.selection_inputs import SelectionInputs, replay_inputs
from ....printable import printable_data
from ....problem.layer_ranges import ranges
from ....problem.moe_problem import MoEProblem, Parallel
from ..command_line import parallel_options, words_of
from ..matrix_text import parallel_name
from ..summary import local_name, serve_command

AnswersJson = Mapping[str, Any]

FORMAT = 2
"""Version of the data inside a page."""


MEMORY = ("device_bytes", "usable_bytes", "expert_bytes", "other_bytes", "left_bytes", "smallest_tp")
"""What a row says of the memory of one GPU, in the order of the page's data."""


def html_page(documents: Sequence[AnswersJson], command: str, stated: str = "") -> bytes:
    """The page for `documents` of ``moectl explain --json``, one for each policy.

    `command` is what made it, `stated` what its cells' commands have besides the GPU and the deployment.
    Names and sentences in `documents` may come from anyone: they become JSON without ``<``, ``>`` and ``&``,
    which the page's script inserts as text alone, and its content policy allows no other script, no style
    and no request.
    """
    data = printable_data(page_data(documents, command, stated))
    assets = files(__package__)
    style, script, template = (
        assets.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html")
    )
    engines = [engine_named(policy["name"]) for policy in data["policies"]]
    titles = [engines[0].versioned] if len(engines) == 1 else [engine.title for engine in engines]
    *others, last = dict.fromkeys(titles)
    about = f"MoE backends in {' and '.join([', '.join(others), last]) if others else last}"
    models = data["models"]
    parts = {
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'",
        "moectl": html.escape(data["moectl"]),
        "title": html.escape(f"{models[0]['name']}: {about}" if len(models) == 1 else about),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    # One pass, so that nothing inserted is read as a placeholder.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    # A folder's name may have bytes that are no UTF-8.
    return page.encode(errors="replace")


def embedded(data: Any) -> str:
    r"""`data` as JSON that can stand in a script element.

    Example:
        >>> embedded({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return "".join(f"\\u{ord(c):04x}" if c in "<>&" else c for c in text)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


class _Pool:
    """Values, each once, in order of first use."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any, key: Hashable = None) -> int:
        """The index of `value`, which is told from others by `key`, by default itself."""
        key = value if key is None else key
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]

    def record(self, value: Mapping[str, Any] | list[Any]) -> int:
        """The index of plain data."""
        return self.number(value, json.dumps(value, sort_keys=True))


def page_data(documents: Sequence[AnswersJson], command: str, stated: str = "") -> dict[str, Any]:
    """What a page shows, with every repeated string, candidate, list of candidates, answer and row once.

    A policy's `cells` are rows of `shared`, one for each model. A cell is an index of `entries`: the answers
    for its groups of layers, whether the weights fit, and the memory of one GPU. The first column of cells is
    the first of `columns`, a GPU with a deployment. A candidate is a list: its backend, the usual name, the
    class, whether it is usable, and its reasons; texts are indices of `strings`.
    """
    models, gpus, columns = _Pool(), _Pool(), _Pool()
    for document in documents:
        for row in document["rows"]:
            models.number(row["checkpoint"])
            gpus.number(row["gpu"])
    by_gpu: dict[tuple[int, Parallel], Mapping[str, Any]] = {}
    for document in documents:
        for row in document["rows"]:
            by_gpu.setdefault((gpus.number(row["gpu"]), _parallel(row)), row)
    for key in sorted(by_gpu, key=lambda key: key[0]):
        columns.number(key)
    names = ("strings", "candidates", "lists", "answers", "memories", "entries", "shared")
    pools = {name: _Pool() for name in names}
    policies, abouts = [], dict[str, dict[str, str]]()
    by_use = dict[str, None]()
    for document in documents:
        backends = Counter[str]()
        cells: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
        for row in document["rows"]:
            column = columns.number((gpus.number(row["gpu"]), _parallel(row)))
            cells.setdefault((models.number(row["checkpoint"]), column), []).append(row)
        table: list[list[int | None]] = [[None] * len(columns.values) for _ in models.values]
        for (model, column), rows in cells.items():
            table[model][column] = _entry(rows, pools)
            name = models.values[model]
            if name not in abouts:
                abouts[name] = _about(rows)
            # In the rows' order, which the page keeps among equally frequent ones.
            backends.update([*dict.fromkeys(row["backend"] for row in rows if _state(row) == "chosen")])
        by_use.update(dict.fromkeys(name for name, _ in backends.most_common()))
        parallels = [key for _, key in columns.values]
        policies.append(_policy(document, models.values, parallels, table, pools["shared"]))
    for other in policies[1:]:
        other["explain"] = f" --engine {other['name']}"
    origins = {each["name"]: _origin(each) for document in documents for each in checkpoints_of(document)}
    return {
        "format": FORMAT,
        "schema_version": documents[0]["schema_version"],
        "moectl": documents[0]["moectl"],
        "command": command,
        "assumptions": _all(documents, "assumptions"),
        "warnings": _all(documents, "warnings"),
        "policies": policies,
        "gpus": [_gpu(number, by_gpu) for number in range(len(gpus.values))],
        "columns": [
            {
                "gpu": gpu,
                "label": parallel_name(parallel),
                "explain": _explain_options(by_gpu[gpu, parallel], parallel, stated),
            }
            for gpu, parallel in columns.values
        ],
        "models": [
            {
                "name": name,
                **abouts[name],
                "note": origins[name].note if name in origins else "",
                "explain": shlex.join(["moectl", "explain", _argument(origins, name)]),
            }
            for name in models.values
        ],
        "backends": list(by_use),
        **{name: pool.values for name, pool in pools.items()},
    }


def checkpoints_of(document: AnswersJson) -> list[Mapping[str, Any]]:
    """Where the checkpoints of a document were found: one, or one of a list."""
    return document["checkpoints"] if "checkpoints" in document else [document["checkpoint"]]


def _all(documents: Iterable[AnswersJson], name: str) -> list[str]:
    return list(dict.fromkeys(text for document in documents for text in document.get(name, ())))


USUAL = ""
"""The exchange of a column whose deployments use the engine's own default."""


def _parallel(row: Mapping[str, Any]) -> Parallel:
    """The deployment of a row, the same for every engine."""
    names = ("tp", "dp", "ep", "all2all", "eplb", "pp")
    parallel = Parallel(**{name: row[name] for name in names})
    policy = engine_named(row["decision"]["inputs"]["policy"]).policy
    return parallel if parallel.states_exchange(policy.default_exchange) else replace(parallel, all2all=USUAL)


def _origin(checkpoint: Mapping[str, Any]) -> Origin:
    path = checkpoint["path"]
    return Origin(
        checkpoint["source"],
        checkpoint["name"],
        checkpoint["revision"],
        Path(path) if path else None,
        checkpoint["note"] or "",
    )


def _argument(origins: Mapping[str, Origin], name: str) -> str:
    """What commands call a checkpoint."""
    return local_name(origins[name]) if name in origins else name


def _inputs(row: Mapping[str, Any]) -> SelectionInputs:
    return replay_inputs(row["decision"])


def _policy(
    document: AnswersJson,
    models: Sequence[str],
    parallels: Sequence[Parallel],
    cells: list[list[int | None]],
    shared: _Pool,
) -> dict[str, Any]:
    """A policy's part: its cells by model and column and the commands that serve them, indices of `shared`.

    `explain` is what its cells' commands of moectl have besides.
    """
    engine = engine_named(document["policy"])
    usual = engine.policy.default_exchange
    deployed = [replace(it, all2all=usual) if it.all2all == USUAL else it for it in parallels]
    origins = {each["name"]: _origin(each) for each in checkpoints_of(document)}
    plain = [serve_command(engine.policy, _argument(origins, name), Parallel()) for name in models]
    bare = serve_command(engine.policy, "M", Parallel())
    options = [
        serve_command(engine.policy, "M", parallel, document["requested"]).removeprefix(bare)
        for parallel in deployed
    ]
    return {
        "name": engine.name,
        "title": engine.versioned,
        "memory_option": engine.memory_option,
        "commands": shared.number(plain, tuple(plain)),
        "options": shared.number(options, tuple(options)),
        "cells": [shared.number(row, tuple(row)) for row in cells],
        "explain": "",
    }


def _gpu(number: int, by_gpu: Mapping[tuple[int, Parallel], Mapping[str, Any]]) -> dict[str, Any]:
    row = next(row for (gpu, _), row in by_gpu.items() if gpu == number)
    device = _inputs(row).device
    # Drivers of AMD put underscores where their products have blanks.
    name = device.name.replace("_", " ")
    return {"key": row["gpu"], "name": name, "arch": device.arch, "memory": device.memory_bytes or None}


def _explain_options(row: Mapping[str, Any], parallel: Parallel, stated: str) -> str:
    """The options of `moectl explain` for a column, after a blank."""
    named = ["--gpu", row["gpu"]] if row["gpu"] != row["gpu_name"] else []
    options = parallel_options(parallel, USUAL)
    return f" {shlex.join([*named, *words_of(options), '-v'])} {stated}".rstrip()


def _about(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Formats and sizes of a model's layers: ``mxfp4 group 32``, ``36 MoE layers of 128 experts, top-4``."""
    formats = dict[str, None]()
    sizes = Counter[str]()
    for row in rows:
        problem = _inputs(row).problem
        formats[_format(problem)] = None
        sizes[f"{problem.experts} experts, top-{problem.top_k}"] += len(row["layers"])
    layers = (f"{number} MoE layers of {size}" for size, number in sizes.items())
    return {"format": "; ".join(formats), "sizes": "; ".join(layers)}


def _format(problem: MoEProblem) -> str:
    scheme = problem.scheme
    return str(scheme.weight) if scheme.act.bits >= 16 else f"{scheme.weight}, {scheme.act} activations"


def _state(row: Mapping[str, Any]) -> str:
    """``chosen``, ``refused`` by the engine or for its shapes, or ``none`` of the candidates."""
    if row["usable"]:
        return "chosen"
    return "refused" if row["refusal"] or row["gates"] else "none"


def _entry(rows: Sequence[Mapping[str, Any]], pools: Mapping[str, _Pool]) -> int:
    """The cell of `rows`, the groups of layers of one model on one GPU in one deployment."""
    memory = rows[0]["memory"]
    numbers = tuple(memory[name] for name in MEMORY) if memory else None
    layers: dict[int, list[int]] = {}
    for row in rows:
        layers.setdefault(pools["answers"].record(_answer(row, pools)), []).extend(row["layers"])
    parts = [[pools["strings"].number(ranges(same)), answer] for answer, same in layers.items()]
    entry = [parts, rows[0]["fits"], pools["memories"].number(numbers) if numbers else None]
    return pools["entries"].record(entry)


def _answer(row: Mapping[str, Any], pools: Mapping[str, _Pool]) -> dict[str, Any]:
    """A group's answer: what was chosen, why, and every candidate, as indices of `pools`."""
    strings, state = pools["strings"], _state(row)
    because, remark = list(dict.fromkeys(filter(None, [row["because"], *row["gates"]]))), row["remark"]
    if remark and state != "chosen" and (row["because"] or "") in remark:
        because, remark = [remark], None
    numbers = [
        pools["candidates"].record(
            [
                *(strings.number(each[name] or "") for name in ("backend", "usual_name", "experts")),
                each["usable"],
                *map(strings.number, each["reasons"]),
            ]
        )
        for each in sorted(row["candidates"], key=lambda each: each["rank"])
    ]
    return {
        "state": state,
        "backend": row["backend"],
        "usual": row["usual_name"],
        "experts": row["experts"],
        "because": [strings.number(text) for text in because],
        "remark": strings.number(remark) if remark else None,
        "fallback": row["fallback"],
        "facts": [[name, strings.number(text)] for name, text in _facts(row).items()],
        "candidates": pools["lists"].number(numbers, tuple(numbers)),
    }


def _facts(row: Mapping[str, Any]) -> dict[str, str]:
    """Further facts on a choice, by name."""
    if _state(row) != "chosen":
        return {}
    dims = row["decision"]["inputs"]["problem"]["dims"]
    padded = [
        f"{name} {dims[name]} to {row[f'padded_{name}']}"
        for name in ("hidden", "intermediate")
        if row[f"padded_{name}"] not in (None, dims[name])
    ]
    routing = "fused in the kernel" if row["monolithic"] else ""
    facts = {"kernel class": row["experts"] or "", "routing": routing, "padding": ", ".join(padded)}
    return {name: text for name, text in facts.items() if text}
