"""Arguments that commands share: CKPT, layers, backends, device. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache.backend_times import current_name
from ..errors import CheckpointError, UsageError
from ..layer.layer_source import CheckpointLayers, ConvertedLayers, LayerSource
from ..problem.layer_ranges import ranges
from ..run.run_plan import POLICY
from ..whole_numbers import whole_number
from .options import ParsedOption, option, pick, split_names

if TYPE_CHECKING:
    from ..oracle.policy import Policy

DEVICES = ("cpu", "cuda")
DEVICE = ParsedOption(
    option("--device", help="cpu or cuda; default: a GPU if there is one."),
    lambda text: pick(text, DEVICES, "device") if text else "",
)


def find_source(
    ref: str,
    layer: int | None,
    *,
    offline: bool,
    activation: str | None = None,
    routing: str | None = None,
) -> LayerSource:
    """The layers of the checkpoint or converted directory `ref`.

    `activation` and `routing` state what a config leaves open, in the syntax of `parse_assumptions`; they do
    not apply to a converted directory. Raises CheckpointError if there are no MoE layers,
    Unavailable if the weights are not on this machine, UsageError if `layer` is not one of them, or a
    converted directory comes with `activation` or `routing`.
    """
    from ..checkpoint import open_checkpoint
    from ..checkpoint.config.user_assumptions import parse_assumptions
    from ..checkpoint.source.catalogue import weights_missing
    from ..checkpoint.source.open_checkpoint import MANIFEST

    if (Path(ref) / MANIFEST).exists():
        stated = [name for name, text in (("--activation", activation), ("--routing", routing)) if text]
        if stated:
            raise UsageError(
                f"{ref} is a converted directory, whose manifest settles {' and '.join(stated)}",
                hint="leave it out; it applies when the checkpoint is converted",
            )
        return ConvertedLayers(Path(ref))
    checkpoint = open_checkpoint(ref, offline=offline, assumptions=parse_assumptions(activation, routing))
    if checkpoint.folder is None and checkpoint.origin.kind != "config":
        raise weights_missing(checkpoint.origin.name)
    source = CheckpointLayers(checkpoint)
    layers = source.layers()
    if not layers:
        raise CheckpointError(f"{ref} has no MoE layers", hint="`moectl explain` shows what it holds")
    if layer is not None and layer not in layers:
        raise UsageError(
            f"layer {layer} has no experts; MoE layers are {layers[0]} to {layers[-1]}",
            hint="choose one of them with --layer",
        )
    return source


def backend_names(text: str | None) -> list[str]:
    """Backends of a list such as ``moectl,torch``; empty for None or ``all``. UsageError for unknown ones."""
    from ..oracle.registry import policy_named

    if text is None or text == "all":
        return []
    policy = policy_named(POLICY)
    return [pick_backend(name, policy) for name in split_names(text, "--backend")]


def pick_backend(name: str, policy: "Policy") -> str:
    """`name` as `policy` spells a backend that can be requested.

    Raises UsageError for any other, which says whose name it is if another engine has it.
    """
    from ..oracle.registry import engine_named, newest_engines

    engine, key = engine_named(policy.name), name.lower().replace("-", "_")
    names = policy.request_names()
    if engine.family == POLICY and (own := current_name(key)) != key:
        raise UsageError(
            f"backend {name!r} is not known: moectl's own backend is called {own}",
            hint=f"give {own}",
        )
    theirs = [it for it in newest_engines() if it is not engine and key in it.policy.request_names()]
    if theirs and key not in names:
        raise UsageError(
            f"backend {name!r} is {theirs[0].title}'s, not {engine.title}'s",
            reason=f"Known are {', '.join(names)}.",
            hint=f"choose one of these, or --policy {theirs[0].family}",
        )
    return pick(name, names, "backend")


def pick_layers(text: str, available: Sequence[int]) -> list[int]:
    """The layers of ``all`` or of a list such as ``0,3,5-9``, ascending and without duplicates.

    Raises UsageError for anything else, and for layers that are not `available`.

    Example:
        >>> pick_layers("3-5,4", range(1, 8))
        [3, 4, 5]
    """
    if text.strip().lower() == "all":
        return list(available)
    picked: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        begin = whole_number(first)
        end = whole_number(last) if dash else begin
        if begin is not None and end is not None and end < begin:
            raise UsageError(
                f"layers {item.strip()!r} are not an ascending range; this model has MoE layers "
                f"{ranges(available)}"
            )
        if begin is None or end is None:
            raise UsageError(
                f"layers must look like all or 0,3,5-9, got {text!r}; this model has MoE layers "
                f"{ranges(available)}",
            )
        span = range(begin, end + 1)
        missing = (
            span if span[-1] > max(available, default=-1) else [n for n in span if n not in set(available)]
        )
        if missing:
            raise UsageError(
                f"{item.strip()} asks for layers without experts; MoE layers are {ranges(available)}",
                hint="choose among them with --layers",
            )
        picked.update(span)
    return sorted(picked)
