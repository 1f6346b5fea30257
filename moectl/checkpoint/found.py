"""MoE layers as the names of a checkpoint's tensors show them, before any shape is looked at."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError
from ..files.strict_json import shown
from ..files.tensor_table import TensorInfo, TensorTable
from .alike import alike_experts
from .storage import BESIDE, EXTRA_MODULES

RENAME = "Store the tensors under the names that the model's reference code has, or ask for these to be read."
"""What to do about a tensor of experts, router or shared experts whose name says nothing."""

EXPERTS = "experts."
"""The module of a layer's experts, as nearly all models call it."""

BARE: Mapping[str, tuple[str, ...]] = {
    "moe.": ("gate_proj.", "up_proj.", "down_proj."),
    "block_sparse_moe.": ("input_linear.", "output_linear."),
}
"""Modules that hold all experts' matrices themselves, and how the names of these begin there."""

_ROUTER_AMONG_EXPERTS = frozenset(
    name for names in BESIDE.router.values() for name in names if name.startswith(EXPERTS)
)
"""Names of the router's tensors that stand in the module of the experts."""

_LAYER = re.compile(r"(?P<root>(?:\w+\.)*?)(?:layers|blocks)\.(?P<layer>0|[1-9]\d{0,4})\.", re.ASCII)
_BLOCK = re.compile(r"(?:\w+\.)*?", re.ASCII)
_LEAF = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


@dataclass
class FoundLayer:
    """One layer's MoE tensors as found: by expert (None when fused) and leaf, and those beside them.

    Attributes:
        index: the layer's number.
        root: what all names of the layer begin with, ending in its number and a dot.
        block: the same with the module that holds router and experts.
        stem: the same with the module that holds the experts.
        alike: so many experts, from 0 on, are known to have the tensors of expert 0, which stands for them
            all in `experts`; None when each stands for itself.
        beside: other MoE tensors by their name after `block`, or after `root` outside of it.
    """

    index: int
    root: str
    block: str
    stem: str
    experts: dict[int | None, dict[str, TensorInfo]] = field(default_factory=dict)
    beside: dict[str, TensorInfo] = field(default_factory=dict)
    alike: int | None = None

    @property
    def leaves(self) -> frozenset[str]:
        return frozenset().union(*self.experts.values())

    def name(self, leaf: str, expert: int | None) -> str:
        """The full name of one expert's tensor."""
        return f"{self.stem}{'' if expert is None else f'{expert}.'}{leaf}"

    def template(self, name: str) -> str:
        """A tensor's full name with ``{layer}`` for the layer's number."""
        word = self.root.split(".")[-3]
        head = f"{self.root.removesuffix(f'{word}.{self.index}.')}{word}.{{layer}}."
        return head + name[len(self.root) :]

    def modules(self) -> tuple[str, ...]:
        """The names of one expert's matrices, as quantization configs spell modules."""
        expert = next(iter(self.experts))
        names = {self.name(leaf, expert) for leaf in self.experts[expert]}
        return tuple(sorted({name.rpartition(".")[0] for name in names} | {self.stem.rstrip(".")}))


@dataclass(frozen=True)
class _Place:
    """Where the names that begin alike belong: a layer, None for what is not the main model's."""

    layer: FoundLayer | None


class _Finder:
    """Sorts names into layers, and does what can be done once for all names that begin alike."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.layers: dict[int, FoundLayer] = {}
        self.extra: set[str] = set()
        self._places: dict[str, _Place] = {}

    def layer_at(self, stem: str, info: TensorInfo) -> FoundLayer | None:
        """The layer whose experts' names begin with `stem`; None for another model's."""
        place = self._places.get(stem)
        if place is None:
            place = self._places[stem] = self._place(stem, info)
        return place.layer

    def take_alike(self, tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
        """Files the experts that are all alike by their first one; the names of all other tensors."""
        if not isinstance(tensors, TensorTable) or not tensors:
            return tensors
        places, others = alike_experts(tensors)
        for stem, place in places.items():
            first = {leaf: tensors[f"{stem}0.{leaf}"] for leaf in place.leaves}
            layer = self.layer_at(stem, next(iter(first.values())))
            if layer is not None:
                layer.experts[0], layer.alike = first, place.count
        return others

    def _place(self, stem: str, info: TensorInfo) -> _Place:
        block = stem.removesuffix(EXPERTS)
        match = _LAYER.match(stem)
        words = set(block.split("."))
        if not words.isdisjoint(EXTRA_MODULES) or (match and int(match["layer"]) >= self.count):
            self.extra.add(block.rstrip("."))
            return _Place(None)
        if match is None or not _BLOCK.fullmatch(block[match.end() :]):
            raise _not_understood(info)
        index = int(match["layer"])
        layer = self.layers.setdefault(index, FoundLayer(index, match[0], block, stem))
        if layer.stem != stem:
            raise CheckpointError(
                f"layer {index} has experts under two names, {shown(layer.stem)} and {shown(stem)}.",
                hint="Remove those that do not belong to the model.",
            )
        return _Place(layer)


def _not_understood(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {shown(info.name)} looks like an expert's, but its name is not understood.",
        hint=RENAME,
    )


def find_layers(tensors: Mapping[str, TensorInfo], count: int) -> tuple[list[FoundLayer], set[str]]:
    """Layers with experts, in order, and the blocks of experts that are not the main model's.

    Raises CheckpointError for an expert's tensor whose name is not understood, or two places of experts
    in one layer.
    """
    finder = _Finder(count)
    numbers: dict[str, int] = {}
    others: list[TensorInfo] = []
    for name in finder.take_alike(tensors):
        info = tensors[name]
        head, found, rest = name.partition(".experts.")
        if EXPERTS + rest in _ROUTER_AMONG_EXPERTS:
            others.append(info)
            continue
        if not found:
            stem, rest = _bare_stem(name)
            if not stem:
                others.append(info)
                continue
        else:
            stem = head + ".experts."
        layer = finder.layer_at(stem, info)
        if layer is None:
            continue
        number, _, leaf = rest.partition(".")
        expert = numbers.get(number)
        if expert is None and number[:1].isdigit():
            expert = numbers[number] = _expert_number(number, info)
        own = layer.experts.setdefault(expert, {})
        own[rest if expert is None else leaf] = info
    for layer in finder.layers.values():
        for leaf in layer.leaves:
            if not _LEAF.fullmatch(leaf):
                raise _not_understood(next(own[leaf] for own in layer.experts.values() if leaf in own))
    _find_beside(finder.layers, others)
    return [finder.layers[index] for index in sorted(finder.layers)], finder.extra


def _bare_stem(name: str) -> tuple[str, str]:
    """What a name of `BARE` begins with and the rest; nothing for another name."""
    for module, matrices in BARE.items():
        at = name.find(module)
        if at > 0 and name[at - 1] == ".":
            end = at + len(module)
            if name.startswith(matrices, end):
                return name[:end], name[end:]
    return "", ""


def _expert_number(text: str, info: TensorInfo) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 6 or (text[0] == "0" and text != "0"):
        raise _not_understood(info)
    return int(text)


def _find_beside(layers: Mapping[int, FoundLayer], others: list[TensorInfo]) -> None:
    """Give each layer the tensors of its router, shared experts and latent projections."""
    roots = {layer.root: layer for layer in layers.values()}
    outside: dict[str, list[tuple[str, TensorInfo]]] = defaultdict(list)
    modules = BESIDE.modules
    for info in others:
        match = _LAYER.match(info.name)
        layer = roots.get(match[0]) if match else None
        if layer is None:
            continue
        inside = info.name.startswith(layer.block)
        rest = info.name[len(layer.block if inside else layer.root) :]
        module = rest.partition(".")[0]
        if module in modules and not inside and module in BESIDE.router_modules:
            outside[layer.root].append((rest, info))
        elif module in modules:
            layer.beside[rest] = info
    # A router beside the module of experts is theirs where that module has none of its own.
    for root, routers in outside.items():
        own = {rest.partition(".")[0] for rest in roots[root].beside}
        if own.isdisjoint(BESIDE.router_modules):
            roots[root].beside.update(routers)
