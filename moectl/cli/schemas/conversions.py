"""Schemas of `moectl convert`, `verify`, `unconvert` and `synth`."""

from __future__ import annotations

from .json_types import (
    BOOLEAN,
    BYTES,
    INTEGER,
    LAYERS,
    NUMBER,
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
from .measurements import warmed


def convert() -> Schema:
    """A conversion or, with --dry-run, its plan; of several ranks, a list of them."""
    done = {
        "folder": STRING,
        "converted_layers": LAYERS,
        "resumed_layers": LAYERS,
        "skipped_files": STRINGS,
        "seconds": NUMBER,
    }
    estimated = {
        "seconds_estimate": NUMBER,
        "rate_measured": said(BOOLEAN, "The rate was measured on this CPU, and is not assumed."),
    }
    compiled = {"warmed": said(array(obj(warmed())), "Kernels that --warm compiled, by GPU.")}
    one, planned = obj({**_plan(), **done}), obj({**_plan(), **estimated})
    whole = obj({**_plan(), **done, **compiled}, optional=tuple(compiled))
    shared = said(BYTES, "Tensors that are linked or copied once, for all ranks.")
    ranks = {"ranks": array({"anyOf": [one, planned]}), "other_bytes": shared, **compiled}
    return {"anyOf": [whole, planned, obj(ranks, optional=tuple(compiled))]}


def _plan() -> dict[str, Schema]:
    tensor = obj({"stored_dtype": STRING, "stored_shape": array(INTEGER), "logical_dtype": STRING})
    return {
        "rank": INTEGER,
        "tp_size": INTEGER,
        "ep_size": INTEGER,
        "shares": array(
            obj(
                {
                    "layers": LAYERS,
                    "experts": array(INTEGER, "First expert of this rank, and the one after its last."),
                    "intermediate": array(INTEGER, "First channel, and the one after the last."),
                    "padded_intermediate": INTEGER,
                }
            )
        ),
        "layout": STRING,
        "layout_version": INTEGER,
        "readers": said(STRINGS, "Who loads the directory."),
        "kernels": said(STRINGS, "Kernels that have the layout in memory; empty for a portable format."),
        "layer_kinds": mapping(LAYERS, "Layers by what becomes of them, of a portable format."),
        "tensors_in": INTEGER,
        "tensors_out": INTEGER,
        "bytes_in": BYTES,
        "bytes_out": BYTES,
        "other_bytes": said(BYTES, "Tensors that are linked or copied."),
        "disk_bytes": BYTES,
        "peak_memory_bytes": BYTES,
        "layers": array(
            obj(
                {
                    "layer": INTEGER,
                    "file": STRING,
                    "bytes_in": BYTES,
                    "bytes_out": BYTES,
                    "tensors": mapping(tensor),
                }
            )
        ),
    }


def verify() -> Schema:
    """What was checked, and every finding."""
    return obj(
        {
            "folder": STRING,
            "ok": BOOLEAN,
            "layers": INTEGER,
            "files": INTEGER,
            "tensors": said(INTEGER, "Source tensors that were restored and checked."),
            "slices": said(INTEGER, "Slices that were checked, of one rank of several."),
            "bytes_read": BYTES,
            "compared": said(BOOLEAN, "Also compared with the bytes of a source."),
            "findings": said(STRINGS, "A phrase for each defect."),
        }
    )


def unconvert() -> Schema:
    """What was restored."""
    return obj(
        {
            "folder": STRING,
            "files": INTEGER,
            "tensors": INTEGER,
            "bytes": BYTES,
            "experts_only": said(BOOLEAN, "Tensors that are not experts' were not in the directory."),
        }
    )


def refit() -> Schema:
    """What changed, or with --dry-run would change."""
    row = {
        "folder": STRING,
        "layers": said(array(INTEGER), "Layers whose files are written."),
        "unchanged_layers": LAYERS,
        "files": said(STRINGS, "Files of other tensors that are written."),
        "bytes_out": said(BYTES, "Of the layers' files."),
    }
    return obj(
        {
            "checkpoint": STRING,
            "dry_run": BOOLEAN,
            "changed": said(BOOLEAN, "Anything at all differed."),
            "folders": array(obj(row), "One for each rank, and the one above them."),
        }
    )


def parity() -> Schema:
    """Every parameter of both sides."""
    row = {
        "rank": said(INTEGER, "The rank of which both are; 0 of one."),
        "a": said(STRING, "Its name in A; empty if it has none there."),
        "b": STRING,
        "status": one_of("equal", "differs", "only a", "only b"),
        "expert": said(BOOLEAN, "By its name, it is an expert's."),
        "differences": STRINGS,
        "first": nullable(array(INTEGER, "Index of the first element that differs.")),
        "count": said(INTEGER, "Elements that differ."),
        "sha256": said(array(STRING), "Of both, in row-major order."),
    }
    return obj(
        {
            "a": STRING,
            "b": STRING,
            "ok": said(BOOLEAN, "Every expert's parameter has an equal counterpart."),
            "parameters": array(obj(row)),
        }
    )


def synth() -> Schema:
    """The checkpoint that was written."""
    return obj({"model": STRING, "folder": STRING, "bytes": BYTES, "seed": INTEGER})
