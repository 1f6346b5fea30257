"""The schema of `moectl explain --json`."""

from __future__ import annotations

from ...cache.backend_times import BackendTime, TimeRanking
from ...cache.launches_file import LaunchRow
from ...environment import Device
from ...environment.variables import VariableFinding
from ...explain.explanation_diff import ExplanationDiff
from ...explain.release_changes import DecisionChange
from ...files.record_schemas import record_schema
from ...kernels.choice.predicted_times import PredictedTimes
from ...oracle.selection_inputs import FORMAT
from ...problem.model_shape import ModelShape
from ...problem.moe_problem import MoEProblem, Parallel
from ...problem.other_weights import OtherWeights
from ...problem.roofline import DeviceRates
from .json_types import (
    BOOLEAN,
    BYTES,
    ERROR,
    INTEGER,
    LAYERS,
    NUMBER,
    OPTIONAL_BYTES,
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

FALLBACK = one_of(
    None, "none", "request", "emulation", "passed", "method", about="Kind of fallback; null if it is none."
)
VERSIONS = mapping(STRING, "Versions of packages; empty for one that is present in an unknown version.")
FITS = said(nullable(BOOLEAN), "The known weights leave room in the memory that the engine uses.")
SIZES = {"padded_hidden": nullable(INTEGER), "padded_intermediate": nullable(INTEGER)}


def explain() -> Schema:
    """Documents of `moectl explain`; some keys are those of one checkpoint, GPU and deployment."""
    always = {
        "checkpoints": array(_checkpoint(), "The checkpoints that were opened."),
        "policy": said(STRING, "The engine and its release, or moectl; all with --engine all."),
        "requested": said(OPTIONAL_STRING, "The backend that was requested by name."),
        "usable": said(BOOLEAN, "Every checkpoint has a GPU and deployment with a backend for all layers."),
        "errors": array(
            obj({"checkpoint": STRING, **ERROR["properties"]}),
            "Checkpoints that could not be opened, by the name given.",
        ),
        "rows": array(_row(), "Layer groups by checkpoint, layers, GPU and deployment, in this order."),
        "installed_engine": said(OPTIONAL_STRING, "Version of the engine; empty: unknown; null: absent."),
        "python": said(OPTIONAL_STRING, "The other environment that was looked into."),
        "warnings": said(STRINGS, "Why the answer may be wrong."),
        "assumptions": said(STRINGS, "What was assumed of the machines."),
    }
    single = {
        "device": record_schema(Device),
        "packages": obj({"versions": VERSIONS, "env": mapping(STRING)}),
        "parallel": record_schema(Parallel),
        "stages": array(array(INTEGER), "First and last layer of each pipeline stage."),
        "expert_bytes": said(BYTES, "Padded expert weights on one rank."),
        "loading_bytes": said(BYTES, "Peak of expert weights on one rank while they are repacked."),
        "fits": FITS,
        "memory": _memory(),
        "groups": array(_group()),
        "environment": _environment(),
    }
    asked = {"why": array(_why()), "diff": _diff()}
    asked["asked"] = _asked()
    others = {"releases": _releases(), "engines": array(_engine(), "With --engine all: one row each.")}
    document = obj({**always, **single, **asked, **others}, optional=(*single, *asked, *others))
    # All of these or none.
    document["dependentRequired"] = {name: [*single] for name in (*single, *asked)}
    return document


def _diff() -> Schema:
    """What --diff adds."""
    difference = record_schema(ExplanationDiff)
    difference["properties"]["chosen_otherwise"] = said(BOOLEAN, "Some layers get another backend, or none.")
    difference["required"].append("chosen_otherwise")
    return said(difference, "With --diff: what changed since the older document.")


def _releases() -> Schema:
    """What --from adds."""
    return said(
        obj(
            {
                "from": said(STRING, "The release that was asked first."),
                "to": STRING,
                "decisions": said(INTEGER, "How many were compared."),
                "uncovered": said(INTEGER, "How many were not: one of the releases has no rules for them."),
                "changes": array(record_schema(DecisionChange), "Those that differ; backends may be empty."),
            }
        ),
        "With --from: which decisions two releases make differently; rows are empty.",
    )


def _checkpoint() -> Schema:
    return obj(
        {
            "name": STRING,
            "source": one_of("folder", "config", "cache", "hub", "catalogue"),
            "revision": OPTIONAL_STRING,
            "path": OPTIONAL_STRING,
            "note": said(STRING, "What is incomplete, or why a place was skipped; may be empty."),
            "other_weights": said(
                nullable(record_schema(OtherWeights)),
                "Weights that are no routed experts; null if neither headers nor config tell them.",
            ),
        }
    )


def _asked() -> Schema:
    rejected = {"backend": STRING, "experts": OPTIONAL_STRING, "reason": OPTIONAL_STRING}
    group = {
        "layers": LAYERS,
        "selected": said(OPTIONAL_STRING, "The engine's name of its choice."),
        "experts": OPTIONAL_STRING,
        "error": OPTIONAL_STRING,
        "priority": nullable(STRINGS),
        "rejected": array(obj(rejected), "What it refused before its choice, in its words."),
        "differences": array(
            obj({"field": STRING, "engine": STRING, "moectl": STRING}), "Where moectl's decision differs."
        ),
    }
    answered = {
        "engine": said(STRING, "The engine with the release that answered."),
        "python": STRING,
        "own_device": said(BOOLEAN, "It found the device in this machine."),
        "bare": said(BOOLEAN, "Only its Python files are there; it was told the packages."),
        "same": BOOLEAN,
        "groups": array(obj(group)),
    }
    return obj(
        {**answered, "failure": nullable(obj(ERROR["properties"]))},
        optional=tuple(answered),
        about="With --ask-engine: the decision of the engine's own code, or why there is none.",
    )


def _engine() -> Schema:
    return obj(
        {
            "policy": said(STRING, "The engine and its release, or moectl."),
            "title": said(STRING, "Its official spelling, with the release."),
            "usable": said(BOOLEAN, "All layers have a backend that works."),
            "backends": said(STRINGS, "The choices, by the engine's names."),
            "because": said(STRING, "What decided, or why there is no backend."),
        }
    )


def _memory() -> Schema:
    return obj(
        {
            "device_bytes": OPTIONAL_BYTES,
            "usable_bytes": said(OPTIONAL_BYTES, "What the engine uses by default."),
            "expert_bytes": BYTES,
            "other_bytes": said(OPTIONAL_BYTES, "All other weights; null if they are not known."),
            "other_source": said(
                OPTIONAL_STRING, "How they are known: headers or config; null if they are not."
            ),
            "left_bytes": said(nullable(INTEGER), "What remains for the KV cache; negative if nothing does."),
            "smallest_tp": said(nullable(INTEGER), "Smallest tensor-parallel size at which the weights fit."),
        },
        about="One GPU with all layer groups; of the pipeline stage that has the most experts.",
    )


def _inputs() -> Schema:
    return obj(
        {
            "format": {"const": FORMAT},
            "inputs": obj(
                {
                    "problem": record_schema(MoEProblem),
                    "device": record_schema(Device),
                    "packages": obj({"versions": VERSIONS, "missing": STRINGS, "env": mapping(STRING)}),
                    "policy": STRING,
                    "requested": OPTIONAL_STRING,
                    "allow_fallback": BOOLEAN,
                    "measured": array(record_schema(BackendTime)),
                    "model": record_schema(ModelShape),
                },
                about="Everything that the decision depends on.",
            ),
        }
    )


def _row() -> Schema:
    return obj(
        {
            "checkpoint": said(STRING, "The name of one of the checkpoints."),
            "policy": said(STRING, "The engine and its release, or moectl."),
            "gpu": said(STRING, "As requested, such as h200; else the name that the driver reports."),
            "gpu_name": STRING,
            "arch": said(STRING, "Such as sm90 or gfx942."),
            **record_schema(Parallel)["properties"],
            "layers": LAYERS,
            "usable": said(BOOLEAN, "The layers have a backend that works."),
            "refusal": said(OPTIONAL_STRING, "Why the deployment or format is refused before any backend."),
            "backend": said(OPTIONAL_STRING, "The choice, by the engine's name."),
            "usual_name": said(OPTIONAL_STRING, "What the field calls its kernels."),
            "experts": said(OPTIONAL_STRING, "The engine's class of experts."),
            "monolithic": said(nullable(BOOLEAN), "Routing is fused in the kernel."),
            "because": said(STRING, "The one reason for the choice, or for none."),
            "remark": said(
                OPTIONAL_STRING, "The footnote in a table: a fallback, shards not aligned, a failure to come."
            ),
            **SIZES,
            "gates": said(STRINGS, "Refusals before any backend is checked."),
            "error": said(OPTIONAL_STRING, "Why nothing is chosen, or what fails after the choice."),
            "fallback": FALLBACK,
            "bytes": said(OPTIONAL_BYTES, "Padded expert weights of these layers on one rank."),
            "fits": said(
                nullable(BOOLEAN), "The known weights leave room in the memory that the engine uses."
            ),
            "memory": nullable(_memory()),
            "candidates": array(
                obj(
                    {
                        "backend": STRING,
                        "usual_name": STRING,
                        "experts": STRING,
                        "rank": _rank(),
                        "usable": BOOLEAN,
                        "reasons": said(STRINGS, "Every check that fails, as a sentence."),
                    }
                ),
                "In priority order.",
            ),
            "decision": _inputs(),
        }
    )


def _rank() -> Schema:
    return {"type": "integer", "minimum": 1, "description": "Place in the priority order, from 1."}


def _decision() -> Schema:
    inputs = _inputs()["properties"]
    return obj(
        {
            **inputs,
            "route": STRING,
            "method": STRING,
            "usable": BOOLEAN,
            "chosen": nullable(_candidate()),
            "candidates": array(_candidate(), "In priority order."),
            "gates": array(obj({"kind": STRING, "says": STRING})),
            "error": OPTIONAL_STRING,
            "error_kind": OPTIONAL_STRING,
            "ignored": said(BOOLEAN, "The request by name had no effect."),
            "order": said(STRINGS, "The engine's names of all backends in its automatic order."),
            "stand_in": OPTIONAL_STRING,
            "notes": STRINGS,
            "ranking": nullable(record_schema(TimeRanking)),
        }
    )


def _verdict(**more: Schema) -> Schema:
    return obj({"question": STRING, "wanted": STRING, "offered": STRING, **more})


def _candidate() -> Schema:
    return obj(
        {
            "backend": STRING,
            "engine_name": STRING,
            "experts": STRING,
            "monolithic": BOOLEAN,
            "layout": said(STRING, "Empty if any will do."),
            "runner": said(STRING, "moectl's backend that runs it; empty if none does."),
            "verified_on": said(
                STRINGS, "Where moectl's backend was run and checked with such weights and tokens."
            ),
            "rank": _rank(),
            "usable": BOOLEAN,
            "assigned": said(BOOLEAN, "The engine takes it without checks."),
            "padded_hidden": INTEGER,
            "padded_intermediate": INTEGER,
            "reasons": mapping(array(_verdict(code=STRING)), "Failing checks by group."),
        }
    )


def _group() -> Schema:
    return obj(
        {
            "layers": LAYERS,
            "facts": array(obj({"fact": STRING, "value": STRING, "source": STRING})),
            "sources": mapping(STRING),
            "details": mapping(STRING),
            "notes": STRINGS,
            "memory": obj(
                {
                    "stored_bytes_per_layer": BYTES,
                    "padded_bytes_per_layer": BYTES,
                    "stored_bytes": BYTES,
                    "padded_bytes": BYTES,
                    "repacking_bytes": BYTES,
                    "repacking": STRING,
                }
            ),
            "roofline": obj(
                {"rates": record_schema(DeviceRates), "decode": array(_step()), "prefill": _step()}
            ),
            "fallback": FALLBACK,
            "decision": _decision(),
            "others": array(
                obj({"policy": STRING, "decision": nullable(_decision()), "refusal": OPTIONAL_STRING}),
                "Answers of other policies.",
            ),
            "measured": obj(
                {
                    "rows": array(record_schema(BackendTime)),
                    "tuned": array(record_schema(LaunchRow)),
                    "notes": STRINGS,
                }
            ),
            "predicted": said(
                nullable(record_schema(PredictedTimes)),
                "Times of a layer by moectl's own kernels, by a model; null if they are no answer.",
            ),
        }
    )


def _step() -> Schema:
    return obj(
        {
            "tokens": INTEGER,
            "experts": NUMBER,
            "bytes": BYTES,
            "flops": INTEGER,
            "us": said(OPTIONAL_NUMBER, "Roofline time; null if a rate is unknown."),
            "bound": one_of(None, "memory", "compute"),
        }
    )


def _environment() -> Schema:
    return obj(
        {
            "variables": array(record_schema(VariableFinding)),
            "packages": STRINGS,
            "tuned": array(
                obj(
                    {
                        "layers": LAYERS,
                        "reads": BOOLEAN,
                        "why": STRING,
                        "wanted": OPTIONAL_STRING,
                        "found": OPTIONAL_STRING,
                        "folders": STRINGS,
                        "same_shape_on_other_gpus": STRINGS,
                        "other_shapes_on_this_gpu": STRINGS,
                        "remark": OPTIONAL_STRING,
                    }
                )
            ),
        }
    )


def _why() -> Schema:
    change = {"kind": STRING, "text": STRING}
    answer = {
        "changes": array(obj({**change, "options": array(array(STRING))})),
        "also": array(obj(change), "Alternatives to the largest change."),
        "experts": OPTIONAL_STRING,
        "device": STRING,
        "command": said(STRING, "The moectl command that shows it."),
    }
    return obj(
        {
            "layers": LAYERS,
            "backend": STRING,
            "chosen": said(BOOLEAN, "It is the choice already."),
            "answers": array(obj(answer), "Changes that make it the choice, the smallest first."),
            "remaining": array(_verdict(experts=STRING), "Checks that no change turns."),
            "reason": OPTIONAL_STRING,
            "instead": said(OPTIONAL_STRING, "The backend that is chosen."),
            "why_not": array(
                obj({"backend": STRING, "reason": STRING}),
                "Why it is not the choice; a name may mean several.",
            ),
            "complete": said(BOOLEAN, "False: the search was cut short."),
        },
        about="With --why: what would have to change for a backend to be chosen.",
    )
