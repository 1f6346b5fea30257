"""Schemas of `moectl run`, `bench`, `tune`, `warm` and `compare`."""

from __future__ import annotations

from ...bench.bench_rows import KEY_FIELDS, BenchRow
from ...bench.compare_runs import VERDICTS
from ...bench.settings import BenchSettings
from ...cache.launches_file import LaunchAttempt, LaunchRow
from ...files.record_schemas import cells_schema, record_schema
from ...problem.moe_problem import MoEProblem
from ...problem.roofline import DeviceRates, MeasuredRates
from .json_types import (
    BOOLEAN,
    BYTES,
    ERROR,
    INTEGER,
    NUMBER,
    OPTIONAL_NUMBER,
    OPTIONAL_STRING,
    STRING,
    STRINGS,
    Schema,
    array,
    mapping,
    nullable,
    obj,
    one_of,
    said,
)

KEYS = {name: INTEGER if name == "tokens" else STRING for name in KEY_FIELDS}


def run() -> Schema:
    """One layer with one backend, one layer with several, or several layers."""
    head = {"checkpoint": STRING, "device": STRING, "platform": STRING}
    compared = {
        "backends": array(_backend({})),
        "pairs": array(obj({"backends": STRINGS, **_difference()}), "How far results are from each other."),
        "left_out": mapping(STRING, "Why a backend does not support the layer."),
    }
    # A layer that could not be run at all.
    failed = {"layer": INTEGER, "ok": BOOLEAN, "error": ERROR, "backends": {"type": "array", "maxItems": 0}}
    layers = array({"anyOf": [obj({**_layer(), **compared}), obj(failed)]})
    worst = obj({"layer": INTEGER, "backend": STRING, "rms": OPTIONAL_NUMBER})
    return {
        "anyOf": [
            _backend({**head, **_layer()}),
            obj({**head, **_layer(), **compared}),
            obj({**head, **failed}),
            obj({**head, "ok": BOOLEAN, "worst": nullable(worst), "layers": layers}),
        ]
    }


def _layer() -> dict[str, Schema]:
    return {
        "layer": INTEGER,
        "ok": said(BOOLEAN, "Every check passed."),
        "error": nullable(ERROR),
        "problem": record_schema(MoEProblem),
        "scheme": STRING,
        "partial": said(STRING, "What part of the layer a directory of one rank has; empty: all."),
        "computed": STRING,
        "dtype": STRING,
        "model_dtype": STRING,
        "tokens": INTEGER,
        "routed_by": STRING,
        "tried": array(obj({"backend": STRING, "error": nullable(ERROR)})),
    }


def _difference() -> dict[str, Schema]:
    token = obj({"token": INTEGER, "l2": OPTIONAL_NUMBER, "cosine": OPTIONAL_NUMBER})
    return {
        "cosine": OPTIONAL_NUMBER,
        "rel_l2": OPTIONAL_NUMBER,
        "max_abs": OPTIONAL_NUMBER,
        "worst_tokens": array(token),
    }


def _backend(before: dict[str, Schema]) -> Schema:
    """One backend, after other keys; without a result those of a result are absent.

    Errors that are not finite are null.
    """
    tolerance = obj({"max": NUMBER, "rms": NUMBER, "reason": STRING})
    check = {
        "max": OPTIONAL_NUMBER,
        "rms": OPTIONAL_NUMBER,
        "worst_token": INTEGER,
        "worst_rms": OPTIONAL_NUMBER,
        "tolerance": tolerance,
        "ok": BOOLEAN,
    }
    case = {
        "case": STRING,
        "about": STRING,
        "tokens": INTEGER,
        "ok": said(nullable(BOOLEAN), "Null if the case does not apply."),
        "note": STRING,
        "check": nullable(obj({"max": OPTIONAL_NUMBER, "rms": OPTIONAL_NUMBER, "token": INTEGER})),
    }
    named = {"backend": STRING, "ok": BOOLEAN, "error": nullable(ERROR)}
    result = {
        "layout": STRING,
        "relaid": said(STRING, "From which layout the weights were converted; empty: none."),
        "check": said(obj(check), "The result compared with the fp32 reference."),
        **_difference(),
        "prepare_seconds": NUMBER,
        "first_seconds": NUMBER,
        "median_us": NUMBER,
        "fastest_us": NUMBER,
        "weight_bytes": BYTES,
        "peak_bytes": BYTES,
        "beyond_static_scales": said(OPTIONAL_STRING, "Which inputs static activation scales cannot hold."),
    }
    asked = {
        "refused": said({"const": True}, "The backend does not support the layer."),
        "stress": array(obj(case), "With --stress."),
    }
    schema = obj({**before, **named, **result, **asked}, optional=(*result, *asked))
    return {**schema, "dependentRequired": {name: [*result] for name in result}}


NEWER_SETTINGS = ("also", "dispatched")
"""Settings of a bench that older files lack."""


def bench() -> Schema:
    """Rows with the conditions of the run, or what --compile-only did."""
    settings = record_schema(BenchSettings)
    settings["properties"]["files"] = mapping(STRING, "SHA-256 of input files.")
    settings["required"].append("files")
    settings["required"] = [name for name in settings["required"] if name not in NEWER_SETTINGS]
    recorded = {
        "settings": settings,
        "device": STRING,
        "driver": STRING,
        "versions": {"anyOf": [mapping(STRING), said(STRING, "From a CSV file.")]},
        "rates": {
            "anyOf": [
                *(record_schema(MeasuredRates), record_schema(DeviceRates)),
                said(STRING, "From a CSV file."),
            ]
        },
        "cache_bytes": said(BYTES, "Last-level cache."),
        "caches": one_of("cold", "warm"),
        "clocks": STRING,
        "begun": said(STRING, "Time of the start, ISO 8601."),
        "engine_picks": array(
            obj(
                dict.fromkeys(("model", "layers", "scheme", "parallel", "backend", "title"), STRING),
                optional=("title",),  # of older files
            ),
            "What the engine would choose for layers of checkpoints.",
        ),
    }
    noisy = obj({**KEYS, "spread": NUMBER})
    rows = {
        "unsteady": obj({"threshold": NUMBER, "cells": array(noisy)}, about="Cases with noisy times."),
        "rows": array(cells_schema(BenchRow)),
    }
    return {
        "anyOf": [
            # Rows of files say of the run what the file does: a CSV file little.
            obj({**recorded, **rows}, optional=recorded),
            obj({"settings": settings, "lines": STRINGS}, about="With --compile-only."),
        ]
    }


def compare() -> Schema:
    """The verdict on every case of two runs."""
    cell = {
        **KEYS,
        "verdict": {"enum": [*VERDICTS]},
        "ratio": said(OPTIONAL_NUMBER, "The later time over the earlier one."),
        "before_us": OPTIONAL_NUMBER,
        "after_us": OPTIONAL_NUMBER,
        "before_tactic": OPTIONAL_STRING,
        "after_tactic": OPTIONAL_STRING,
        "reason": said(STRING, "Why there is no time; may be empty."),
    }
    return obj(
        {
            "before": STRING,
            "after": STRING,
            "threshold": NUMBER,
            "counts": mapping(INTEGER, "Cases by verdict."),
            "regressed": BOOLEAN,
            "ratio": said(OPTIONAL_NUMBER, "Geometric mean of the cells' ratios."),
            "notes": STRINGS,
            "cells": array(obj(cell)),
        }
    )


def tune() -> Schema:
    """A search, with --to also what was written; or what --list and --clear show."""
    launch = record_schema(LaunchRow)["properties"]
    search = {
        "device": mapping({}, "Name, arch and sms of the device."),
        "cache": said(STRING, "The file of the results."),
        "refused": mapping(STRING, "Why a layer is skipped."),
        "done": BOOLEAN,
        "rows": array(obj({"layer": STRING, "state": one_of("new", "kept"), **launch})),
        "left": array(obj({"layer": STRING, "tokens": INTEGER}), "What the budget left undone."),
        "written": said(STRINGS, "With --to: files that were written."),
    }
    attempts = {"type": "array", "items": record_schema(LaunchAttempt)}
    entry = {
        "file": STRING,
        "of": STRING,
        "device": mapping({}),
        "stale": said(OPTIONAL_STRING, "Why the entry is not used."),
        "built": mapping(STRING, "Versions that it was measured with."),
        "layer": mapping({}),
        "rows": array(record_schema(LaunchRow)),
        "unfinished": mapping(attempts, "Attempts by number of tokens."),
    }
    kept = {
        "entries": array(obj(entry)),
        "ignored": array(obj({"file": STRING, "why": STRING})),
        "dropped": INTEGER,
    }
    return {"anyOf": [obj(search, optional=("written",)), obj(kept)]}


def warm() -> Schema:
    """The kernels that were compiled for each of the different layers."""
    return obj({"checkpoint": STRING, "written": OPTIONAL_STRING, **warmed()})


def warmed() -> dict[str, Schema]:
    """What was compiled for one GPU."""
    layer = obj(
        {
            "layers": STRING,
            "layer": STRING,
            "backend": OPTIONAL_STRING,
            "why": said(STRING, "Why no kernels of moectl's run the layer."),
            "kernels": said(INTEGER, "Binaries that 1 to `tokens` tokens need."),
            "cached": INTEGER,
            "compiled": INTEGER,
            "seconds": NUMBER,
            "processes": INTEGER,
            "failed": STRINGS,
            "taken": said(INTEGER, "Kernels that came from --from."),
            "written": said(INTEGER, "Kernels that went to --to."),
        }
    )
    return {
        "gpu": STRING,
        "arch": STRING,
        "tokens": INTEGER,
        "cache": said(STRING, "Triton's cache directory."),
        "layers": array(layer),
    }
