"""MoE layers as the names of a checkpoint's tensors show them, before any shape is looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError
from .model import ExpertNames, TensorInfo
from .storage import BESIDE, EXTRA_MODULES, MATRICES, Storage
from .strict_json import shown

RENAME = "Store the tensors under the names that the model's reference code has, or ask for these to be read."
"""What to do about a tensor of experts, router or shared experts whose name says nothing."""

_EXPERT = re.compile(
    r"(?P<block>(?P<root>(?:\w+\.)*)layers\.(?P<layer>0|[1-9]\d{0,4})\.(?:\w+\.)*?)"
    r"experts\.(?:(?P<expert>0|[1-9]\d{0,5})\.)?(?P<leaf>[A-Za-z_][\w.]*)",
    re.ASCII,
)
_LOOKS_LIKE_EXPERT = re.compile(r"(?:^|\.)layers\..*\bexperts\.")


@dataclass
class FoundLayer:
    """One layer's MoE tensors as found: by expert (None when fused) and leaf, and those beside them."""

    index: int
    block: str
    experts: dict[int | None, dict[str, TensorInfo]] = field(default_factory=dict)
    beside: dict[str, TensorInfo] = field(default_factory=dict)

    @property
    def leaves(self) -> frozenset[str]:
        return frozenset(leaf for tensors in self.experts.values() for leaf in tensors)

    def name(self, leaf: str, expert: int | None) -> str:
        return f"{self.block}experts.{'' if expert is None else f'{expert}.'}{leaf}"

    def tensor(self, template: str) -> TensorInfo:
        """The tensor beside the experts whose name's template this is."""
        return self.beside[template.format(layer=self.index)[len(self.block) :]]

    def template(self, rest: str) -> str:
        """The name of `rest`, inside this layer's block, with ``{layer}`` for the layer's index."""
        return self.block.replace(f"layers.{self.index}.", "layers.{layer}.", 1) + rest


def find_layers(tensors: Mapping[str, TensorInfo], count: int) -> tuple[list[FoundLayer], set[str]]:
    """Layers with experts, in order, and the blocks of experts that are not the main model's."""
    layers: dict[int, FoundLayer] = {}
    extra: set[str] = set()
    others: list[TensorInfo] = []
    for name, info in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others.append(info)
            continue
        index, block = int(match["layer"]), match["block"]
        if index >= count or not set(match["root"].split(".")).isdisjoint(EXTRA_MODULES):
            extra.add(block.rstrip("."))
            continue
        layer = layers.setdefault(index, FoundLayer(index, block))
        if layer.block != block:
            raise CheckpointError(
                f"layer {index} has experts under two names, {shown(layer.block)} and {shown(block)}.",
                hint="Remove those that do not belong to the model.",
            )
        expert = None if match["expert"] is None else int(match["expert"])
        layer.experts.setdefault(expert, {})[match["leaf"]] = info
    _find_beside(layers, others)
    return [layers[index] for index in sorted(layers)], extra


def _find_beside(layers: Mapping[int, FoundLayer], others: list[TensorInfo]) -> None:
    """Give each layer the tensors of its router and shared experts."""
    modules = {*BESIDE.router_modules, *BESIDE.shared_modules}
    blocks = {layer.block: layer for layer in layers.values()}
    for info in others:
        parts = info.name.split(".")
        for cut in range(1, len(parts)):
            layer = blocks.get(".".join(parts[:cut]) + ".")
            if layer is not None and parts[cut] in modules:
                layer.beside[".".join(parts[cut:])] = info
                break
        else:
            if _LOOKS_LIKE_EXPERT.search(info.name):
                raise CheckpointError(
                    f"{info.file}: tensor {shown(info.name)} looks like an expert's, "
                    "but its name is not understood.",
                    hint=RENAME,
                )


def _expert_names(layer: FoundLayer, storage: Storage) -> dict[str, str]:
    prefix = "experts." if storage.fused else "experts.{expert}."
    roles = {storage.tensors[leaf].role: layer.template(prefix + leaf) for leaf in layer.leaves}
    return dict(sorted(roles.items()))


def _router_names(layer: FoundLayer) -> dict[str, str]:
    known = {rest: role for role, names in BESIDE.router.items() for rest in names}
    roles = {}
    for rest, info in layer.beside.items():
        if rest.split(".")[0] not in BESIDE.router_modules:
            continue
        if rest not in known or known[rest] in roles:
            raise CheckpointError(
                f"{info.file}: router tensor {shown(info.name)} is not understood.", hint=RENAME
            )
        roles[known[rest]] = layer.template(rest)
    return dict(sorted(roles.items()))


def _shared_names(layer: FoundLayer) -> dict[str, str]:
    spelled = {name: role for names in MATRICES for role, name in names.items()}
    roles = {}
    for rest, info in layer.beside.items():
        module, _, inner = rest.partition(".")
        if module not in BESIDE.shared_modules:
            continue
        matrix, _, suffix = inner.partition(".")
        if matrix not in spelled or suffix not in BESIDE.shared_suffixes:
            raise CheckpointError(
                f"{info.file}: shared expert tensor {shown(info.name)} is not understood.", hint=RENAME
            )
        roles[spelled[matrix] + BESIDE.shared_suffixes[suffix]] = layer.template(rest)
    return dict(sorted(roles.items()))


def tensor_names(layer: FoundLayer, storage: Storage) -> ExpertNames:
    """Name templates of the layer's tensors by role, its experts stored as `storage`.

    Raises CheckpointError when a tensor of the router or the shared experts is not understood.
    """
    return ExpertNames(_expert_names(layer, storage), _router_names(layer), _shared_names(layer))
