"""The schema of `moectl serve-check`."""

from __future__ import annotations

from ...files.record_schemas import record_schema
from ...integrations.serve_report import FINE, REFUSED, WARNING, ServedLayers, ServeFinding
from .json_types import (
    BOOLEAN,
    INTEGER,
    LAYERS,
    OPTIONAL_STRING,
    STRING,
    Schema,
    array,
    nullable,
    obj,
    one_of,
    said,
)


def serve_check() -> Schema:
    """The report, and whether it works."""
    finding = record_schema(ServeFinding)
    finding["properties"]["level"] = one_of(FINE, WARNING, REFUSED)
    layers = record_schema(ServedLayers)
    layers["properties"]["layers"] = LAYERS
    layers["properties"]["backend"] = said(STRING, "moectl's; empty if the engine computes them itself.")
    return obj(
        {
            "checkpoint": STRING,
            "engine": STRING,
            "release": said(OPTIONAL_STRING, "The engine's version; null if it is not installed."),
            "gpu": STRING,
            "tp": INTEGER,
            "ep": INTEGER,
            "converted": said(nullable(BOOLEAN), "null if CKPT could not be opened."),
            "findings": array(finding),
            "layers": array(layers),
            "serve": said(STRING, "Starts the server, if it works."),
            "works": BOOLEAN,
        }
    )
