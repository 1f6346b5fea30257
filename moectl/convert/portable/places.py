"""Where an output keeps a layer's experts: one set of tensors for each, or gpt-oss' fused ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...checkpoint.model import LayerGroup
from ...checkpoint.tensors.storage import format_sizes, parse_shape
from ...checkpoint.tensors.stored_formats import GPT_OSS
from ...problem import MoEProblem
from ...schemes import Scheme
from ..canonical import halves
from ..sources import output_prefix
from ..sources.forms import TRANSPOSED
from ..values import Shapes
from .slots import Sizes, Slot, format_row, slots

PROJECTIONS: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
UNGATED: Mapping[str, str] = {"w1": "up_proj", "w2": "down_proj"}
FUSED: Mapping[str, str] = {"w13": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Place:
    """Names of the tensors of a group's experts.

    Attributes:
        storage: as `MoEProblem.storage` of the output.
        templates: by matrix, module names with ``{layer}`` and ``{expert}``; fused: what they begin with.
        fused: all experts in one tensor, as gpt-oss has them.
    """

    storage: str
    templates: Mapping[str, str]
    fused: bool = False

    @property
    def apart(self) -> bool:
        """True when gate and up rows do not alternate."""
        return not self.fused

    @property
    def modules(self) -> tuple[str, ...]:
        """Module names that a quantization config may speak of."""
        return () if self.fused else tuple(self.templates.values())

    def slots(self, layer: int, problem: MoEProblem, shapes: Shapes) -> tuple[Slot, ...]:
        """The stored tensors of one layer; `problem` and `shapes` are the output's."""
        templates = {role: t.replace("{layer}", str(layer)) for role, t in self.templates.items()}
        make = _fused_slots if self.fused else _expert_slots
        return tuple(make(self.storage, templates, problem, shapes))


def place_of(group: LayerGroup, storage: str, scheme: Scheme, native: bool) -> Place:
    """Where the output keeps the experts of `group`: as its model's own readers look for them.

    `native`: gpt-oss' fused tensors, of a gpt-oss model; otherwise every expert has its own, named as
    the source names them, or as most models do where the source fuses them.
    """
    first = next(iter(group.names.experts.values()))
    if native and group.problem.model_type == "gpt_oss" and scheme.weight.name in ("mxfp4", "bf16"):
        kind = "gpt_oss" if scheme.weight.name == "mxfp4" else storage
        return Place(kind, dict.fromkeys(FUSED, output_prefix(first)), fused=True)
    names = PROJECTIONS if group.problem.activation.gated else UNGATED
    if "{expert}" not in first:
        return Place(
            storage, {role: f"{output_prefix(first)}{{expert}}.{name}" for role, name in names.items()}
        )
    experts = group.names.experts
    if "w13" in experts:
        head = experts["w13"].split("{expert}.")[0]
        return Place(storage, {role: f"{head}{{expert}}.{name}" for role, name in names.items()})
    return Place(storage, {role: experts[role].rsplit(".", 1)[0] for role in names})


def _expert_slots(
    storage: str, templates: Mapping[str, str], problem: MoEProblem, shapes: Shapes
) -> Iterator[Slot]:
    form = format_row(storage, problem.scheme.weight)
    hidden, inter = problem.dims.hidden, problem.dims.intermediate
    stacked = halves(problem, "w13")
    sizes = {
        "w1": Sizes("w13", inter, hidden, 0, stacked),
        "w3": Sizes("w13", inter, hidden, 1, stacked),
        "w2": Sizes("w2", hidden, inter),
    }
    for role, module in templates.items():
        yield from slots(form, problem.scheme, module, sizes[role], shapes)


def _fused_slots(
    storage: str, templates: Mapping[str, str], problem: MoEProblem, shapes: Shapes
) -> Iterator[Slot]:
    if storage == "gpt_oss":
        numbers = {"hidden": problem.dims.hidden, "intermediate": problem.dims.intermediate}
        numbers |= {"experts": problem.experts, **format_sizes(problem.scheme)}
        for leaf, (role, _, text) in GPT_OSS.tensors.items():
            if role in shapes:
                (_, total, *_), dtype = shapes[role]
                _, *shape = (axis.value(numbers) for axis in parse_shape(text))
                name = templates[role.split("_")[0]] + leaf
                yield Slot(name, role.partition("_")[2], role, (0, total), dtype, tuple(shape), fused=True)
        return
    for role, name in FUSED.items():
        (_, n, k), dtype = shapes[role]
        yield Slot(templates[role] + name, "", role, (0, n), dtype, (k, n), TRANSPOSED, dtype, fused=True)
        if f"{role}_bias" in shapes:
            (_, n), dtype = shapes[f"{role}_bias"]
            yield Slot(
                f"{templates[role]}{name}_bias", "_bias", f"{role}_bias", (0, n), dtype, (n,), fused=True
            )
