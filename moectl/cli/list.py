"""`moectl list`: models, GPUs, environment variables, layouts and formats that moectl knows by name."""

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import framed
from .output import Output, count, gib, table

if TYPE_CHECKING:
    from ..oracle.backend import Backend

EXAMPLES = (
    "moectl list models deepseek",
    "moectl list gpus --json",
    "moectl list variables removed",
    "moectl list formats nvfp4",
    "moectl list backends cutlass",
    "moectl explain deepseek-v3 --gpu h200",
)


class ListTopic(str, Enum):
    """What can be listed."""

    models = "models"
    backends = "backends"
    gpus = "gpus"
    variables = "variables"
    layouts = "layouts"
    formats = "formats"


@framed("list")
def list_names(
    kind: Annotated[ListTopic, typer.Argument(help="What to list.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Only names that contain all of these words."),
    ] = None,
    *,
    out: Output,
) -> None:
    """List what moectl knows by name.

    Models, backends of engines, GPUs, environment variables of engines, kernel layouts, portable formats.

    A model's name, with or without its organization, can be given as CKPT; a backend to --backend and --why;
    a GPU to --gpu; an environment
    variable that an engine reads for its experts to --env; a layout or a format to convert --to.
    """
    lowered = [word.casefold() for word in words or []]
    rows = [row for row in LISTS[kind]() if all(word in _search_text(row) for word in lowered)]

    def draw(console: Any) -> None:
        if rows:
            headings = [HEADINGS.get(key, key.replace("_", " ")) for key in COLUMNS[kind]]
            dropped = tuple(HEADINGS.get(key, key.replace("_", " ")) for key in OPTIONAL[kind])
            listing = table(*headings, right=("experts", "params"), optional=dropped)
            listing.first = True
            for row in rows:
                listing.add_row(*(_cell_text(key, row) for key in COLUMNS[kind]))
            console.print(listing)
        console.print(f"{count(len(rows), kind.value.removesuffix('s'))}{NEXT[kind] if rows else ''}")

    out.result({"kind": kind.value, kind.value: rows}, draw, [row["name"] for row in rows])


COLUMNS = {
    ListTopic.models: ("name", "format", "params", "experts", "layers"),
    ListTopic.backends: ("name", "engine", "kernels", "formats", "archs"),
    ListTopic.gpus: ("name", "product", "arch", "memory", "bandwidth"),
    ListTopic.variables: ("name", "takes", "default", "does"),
    ListTopic.layouts: ("name", "to", "act", "archs", "kernels", "verified"),
    ListTopic.formats: ("name", "container", "weights", "activations", "readers"),
}
"""Keys of a row that tables show."""

OPTIONAL: dict[ListTopic, tuple[str, ...]] = {
    **dict.fromkeys(ListTopic, ()),
    ListTopic.models: ("layers", "experts"),
    ListTopic.backends: ("kernels", "archs"),
    ListTopic.variables: ("default", "takes"),
    ListTopic.layouts: ("archs", "act", "verified", "to"),
    ListTopic.formats: ("activations", "weights"),
}
"""Those that a narrow terminal leaves out, the first of them first."""

HEADINGS = {
    "to": "convert --to",
    "act": "activations",
    "readers": "loaded by",
    "does": "effect",
    "takes": "values",
    "archs": "devices",
}
"""Headings of columns, where they are not the key."""

NEXT = {
    ListTopic.models: "; params are those of routed experts. Every command takes these names, with or "
    "without the organization",
    ListTopic.backends: "; --backend and --why take these names",
    ListTopic.gpus: "; --gpu takes these names, the product's, and architectures such as sm90",
    ListTopic.variables: "; --env NAME=VALUE tries one",
    ListTopic.layouts: "; --json says who loads a directory in each as it is",
    ListTopic.formats: "; convert --to takes these names, --container chooses among containers",
}
"""What the names are for."""

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def _models() -> Iterable[dict[str, Any]]:
    from ..checkpoint.source.catalogue import SHORT_NAMES, model_names, read_entry, spell_layers
    from ..checkpoint.source.named_layers import declared_layer

    short = {model: name for name, model in SHORT_NAMES.items()}
    for name in model_names():
        entry = read_entry(name)
        problem = declared_layer(entry)
        config, tensors = entry.provenance.removeprefix("config: ").split("; tensors: ", 1)
        matrices = 3 if problem.activation.gated else 2
        elements = matrices * problem.dims.hidden * problem.dims.intermediate
        yield {
            "name": name,
            "short_name": short.get(name),
            "format": str(problem.scheme.weight),
            "activations": str(problem.scheme.act),
            "params": elements * problem.experts * len(entry.layers),
            "experts": entry.experts,
            "top_k": problem.top_k,
            "hidden": problem.dims.hidden,
            "intermediate": problem.dims.intermediate,
            "layers": spell_layers(entry.layers),
            "config": config,
            "tensors": tensors,
            "revision": entry.revision,
            "note": entry.note,
        }


def _backends() -> Iterable[dict[str, Any]]:
    """Backends of every engine by the name that requests them, merged over formats."""
    from ..oracle.registry import newest_engines

    for engine in newest_engines():
        by_name: dict[str, list[Backend]] = {}
        for backend in engine.policy.backends():
            by_name.setdefault(backend.name, []).append(backend)
        for name, backends in by_name.items():
            classes = [variant for backend in backends for variant in backend.variants]
            kernels = (engine.kernel_name(variant.experts) or variant.experts for variant in classes)
            archs = [str(arch) for variant in classes for arch in variant.capability.arch or ("any",)]
            formats = {
                weight.split(" ")[0].rstrip("*")
                for variant in classes
                for support in variant.capability.formats or ()
                for weight in support.weights
            }
            yield {
                "name": name,
                "engine": engine.name,
                "kernels": "; ".join(dict.fromkeys(kernels)),
                "formats": ", ".join(sorted(formats)) or "any",
                "archs": ", ".join(_broadest(archs)),
                "experts": list(dict.fromkeys(variant.experts for variant in classes)),
            }


def _broadest(archs: Iterable[str]) -> list[str]:
    """Each architecture once, without those of a platform that is there as a whole."""
    names = dict.fromkeys(name for arch in archs for name in arch.split("/"))
    covered = tuple(start for whole, start in (("cuda", "sm"), ("rocm", "gfx")) if whole in names)
    return [name for name in names if not (covered and name.startswith(covered))]


def _gpus() -> Iterable[dict[str, Any]]:
    from ..environment.named_devices import device_of, gpu_names, spellings

    for name in gpu_names():
        device = device_of(name)
        yield {
            "name": name,
            "product": device.name,
            "arch": device.arch,
            "platform": device.platform,
            "memory": device.memory_bytes,
            "bandwidth": device.bandwidth or None,
            "sms": device.sms or None,
            "spellings": spellings(name),
        }


def _variables() -> Iterable[dict[str, Any]]:
    from ..oracle.registry import newest_engines

    for variable in (row for engine in newest_engines() for row in engine.policy.variables.values()):
        yield {
            "name": variable.name,
            "takes": variable.values(),
            "default": variable.default,
            "status": variable.status,
            "does": variable.does,
            "instead": variable.instead,
        }


def _layouts() -> Iterable[dict[str, Any]]:
    from ..problem.layouts import LAYOUTS, folder_readers

    for name, facts in LAYOUTS.items():
        yield {
            "name": name,
            "to": facts.target,
            "act": ", ".join(facts.acts),
            "archs": ", ".join(facts.archs),
            "loaded_by": "; ".join(map(str, folder_readers(name))),
            "kernels": "; ".join(map(str, facts.readers)),
            "verified": "yes" if facts.verified else "unverified",
        }


def _formats() -> Iterable[dict[str, Any]]:
    from ..problem.portable_formats import GPT_OSS_FORMATS, PORTABLE

    for name, portable in PORTABLE.items():
        for container, (storage, readers) in portable.containers.items():
            yield {
                "name": name,
                "container": container,
                "storage": storage,
                "weights": str(portable.weight),
                "activations": str(portable.act),
                "readers": "; ".join(map(str, readers)),
                "not_for": "" if (name, container) in GPT_OSS_FORMATS else "gpt-oss",
            }


LISTS = {
    ListTopic.models: _models,
    ListTopic.backends: _backends,
    ListTopic.gpus: _gpus,
    ListTopic.variables: _variables,
    ListTopic.layouts: _layouts,
    ListTopic.formats: _formats,
}


SEARCHED = (
    "name",
    "short_name",
    "format",
    "product",
    "arch",
    "status",
    "does",
    "container",
    "to",
    "kernels",
    "formats",
)
"""Keys of a row in which words are searched."""


def _search_text(row: dict[str, Any]) -> str:
    return " ".join(
        [
            *(str(row.get(key, "")) for key in SEARCHED),
            *row.get("spellings", ()),
        ]
    ).casefold()


def _cell_text(key: str, row: dict[str, Any]) -> str:
    from ..environment.variables import REMOVED

    value = row[key]
    if value is None:
        return "unknown"
    if key == "memory":
        return gib(value)
    if key == "bandwidth":
        return f"{value / 1e12:.3g} TB/s"
    if key == "params":
        return next(f"{value / unit:.3g}{letter}" for unit, letter in UNITS if value >= unit)
    if key == "format":
        # The group size of these formats is part of them.
        return str(value).removesuffix(" group 32" if value.startswith("mx") else " group 16")
    if key == "name" and row.get("short_name"):
        return f"{value} ({row['short_name']})"
    if row.get("status") == REMOVED and key in ("takes", "default"):
        return ""
    if row.get("status") == REMOVED and key == "does":
        return f"removed ({value}){f': use {instead}' if (instead := row['instead']) else ''}"
    if key == "readers" and row["not_for"]:
        return f"{value}; not for {row['not_for']}"
    return str(value)
