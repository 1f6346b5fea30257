"""MoE layers as the names of a checkpoint's tensors show them, before any shape is looked at."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

from ...errors import CheckpointError
from ...files.strict_json import shown
from ...files.tensor_table import TensorInfo, TensorTable
from .storage import AUXILIARY, EXTRA_MODULES

RENAME = "Store the tensors under the names that the model's reference code has, or ask for these to be read."
"""What to do about a tensor of experts, router or shared experts whose name says nothing."""

EXPERTS = "experts."
"""The module of a layer's experts, as nearly all models call it."""

_EXPERTS_MARK = f".{EXPERTS}"
"""What separates the module that holds the experts from an expert's number."""

BARE: Mapping[str, tuple[str, ...]] = {
    "moe.": ("gate_proj.", "up_proj.", "down_proj."),
    "block_sparse_moe.": ("input_linear.", "output_linear."),
}
"""Modules that hold all experts' matrices themselves, and how the names of these begin there."""

_ROUTER_AMONG_EXPERTS = frozenset(
    name for names in AUXILIARY.router.values() for name in names if name.startswith(EXPERTS)
)
"""Names of the router's tensors that stand in the module of the experts."""

_LAYER = re.compile(r"(?P<root>(?:\w+\.)*?)(?:layers|blocks)\.(?P<layer>0|[1-9]\d{0,4})\.", re.ASCII)
_BLOCK = re.compile(r"(?:\w+\.)*?", re.ASCII)
_NUMBER = re.compile(r"\.experts\.(\d{1,6})\.", re.ASCII)
_LEAF = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


@dataclass
class LayerTensors:
    """One layer's MoE tensors: the experts' by expert (None when fused) and leaf, and the auxiliary ones.

    Attributes:
        index: the layer's number.
        root: what all names of the layer begin with, ending in its number and a dot.
        block: the same with the module that holds router and experts.
        stem: the same with the module that holds the experts.
        uniform: the number of experts when all of them are known to have the same leaves, dtypes and
            shapes as expert 0, the only one that `experts` then lists; None when it lists each.
        auxiliary: tensors of the router, shared experts and latent projections by their name after
            `block`, or after `root` outside of it.
    """

    index: int
    root: str
    block: str
    stem: str
    experts: dict[int | None, dict[str, TensorInfo]] = field(default_factory=dict)
    auxiliary: dict[str, TensorInfo] = field(default_factory=dict)
    uniform: int | None = None

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


class _Indexer:
    """Sorts names into layers; what all names with one prefix have in common is worked out once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.layers: dict[int, LayerTensors] = {}
        self.extra: set[str] = set()
        self._by_stem: dict[str, LayerTensors | None] = {}

    def layer_at(self, stem: str, info: TensorInfo) -> LayerTensors | None:
        """The layer whose experts' names begin with `stem`; None for another model's."""
        if stem not in self._by_stem:
            self._by_stem[stem] = self._place(stem, info)
        return self._by_stem[stem]

    def take_uniform(self, tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
        """Takes uniform experts, of which only the first is looked at; the names of all other tensors."""
        if not isinstance(tensors, TensorTable) or not tensors:
            return tensors
        uniform, others = uniform_experts(tensors)
        for stem, experts in uniform.items():
            first = {leaf: tensors[f"{stem}0.{leaf}"] for leaf in experts.leaves}
            layer = self.layer_at(stem, next(iter(first.values())))
            if layer is not None:
                layer.experts[0], layer.uniform = first, experts.count
        return others

    def _place(self, stem: str, info: TensorInfo) -> LayerTensors | None:
        block = stem.removesuffix(EXPERTS)
        match = _LAYER.match(stem)
        words = set(block.split("."))
        if not words.isdisjoint(EXTRA_MODULES) or (match and int(match["layer"]) >= self.count):
            self.extra.add(block.rstrip("."))
            return None
        if match is None or not _BLOCK.fullmatch(block[match.end() :]):
            raise _not_understood(info)
        index = int(match["layer"])
        layer = self.layers.setdefault(index, LayerTensors(index, match[0], block, stem))
        if layer.stem != stem:
            raise CheckpointError(
                f"layer {index} has experts under two names, {shown(layer.stem)} and {shown(stem)}.",
                hint="Remove those that do not belong to the model.",
            )
        return layer


def _not_understood(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {shown(info.name)} looks like an expert's, but its name is not understood.",
        hint=RENAME,
    )


def index_layers(tensors: Mapping[str, TensorInfo], count: int) -> tuple[list[LayerTensors], set[str]]:
    """Layers with experts, in order, and the blocks of experts that are not the main model's.

    Raises CheckpointError for an expert's tensor whose name is not understood, or two places of experts
    in one layer.
    """
    finder = _Indexer(count)
    numbers: dict[str, int] = {}
    others: list[TensorInfo] = []
    for name in finder.take_uniform(tensors):
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
    _add_auxiliary(finder.layers, others)
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


def _add_auxiliary(layers: Mapping[int, LayerTensors], others: list[TensorInfo]) -> None:
    """Give each layer the tensors of its router, shared experts and latent projections."""
    roots = {layer.root: layer for layer in layers.values()}
    outside: dict[str, list[tuple[str, TensorInfo]]] = defaultdict(list)
    modules = AUXILIARY.modules
    for info in others:
        match = _LAYER.match(info.name)
        layer = roots.get(match[0]) if match else None
        if layer is None:
            continue
        inside = info.name.startswith(layer.block)
        rest = info.name[len(layer.block if inside else layer.root) :]
        module = rest.partition(".")[0]
        if module in modules and not inside and module in AUXILIARY.router_modules:
            outside[layer.root].append((rest, info))
        elif module in modules:
            layer.auxiliary[rest] = info
    # A router next to the module of experts is theirs where that module has none of its own.
    for root, routers in outside.items():
        own = {rest.partition(".")[0] for rest in roots[root].auxiliary}
        if own.isdisjoint(AUXILIARY.router_modules):
            roots[root].auxiliary.update(routers)


@dataclass
class UniformExperts:
    """Experts 0 to `count` - 1 of one layer: each has the same `leaves`, each leaf one dtype and shape."""

    count: int
    leaves: list[str] = field(default_factory=list)


def uniform_experts(tensors: TensorTable) -> tuple[Mapping[str, UniformExperts], list[str]]:
    """Uniform experts by the prefix of their names, and the names of all other tensors.

    Worked out from columns of names, without looking at the tensors one by one. A prefix is such as
    ``model.layers.3.mlp.experts.``. Where anything is odd (an expert or tensor missing, another dtype or
    shape, a number with a leading zero, a tensor of no expert), the experts are among the others.
    """
    of_experts = [_EXPERTS_MARK in name for name in tensors]
    columns = _columns(list(compress(tensors, of_experts)))
    if columns is None:
        # Some layers have experts in one tensor, whose names hold no number.
        of_experts = [_NUMBER.search(name) is not None for name in tensors]
        columns = _columns(list(compress(tensors, of_experts)))
    if columns is None:
        return {}, list(tensors)
    heads, numbers, leaves = columns
    kinds = compress(tensors.kinds, of_experts)
    experts: dict[str, dict[str, int]] = defaultdict(dict)
    for (head, number), held in Counter(zip(heads, numbers, strict=True)).items():
        experts[head][number] = held
    uniform = {
        head: UniformExperts(len(found))
        for head, found in experts.items()
        if all(str(expert) in found for expert in range(len(found)))
    }
    for (head, leaf, _), held in Counter(zip(heads, leaves, kinds, strict=True)).items():
        if head in uniform and held == uniform[head].count:
            uniform[head].leaves.append(leaf)
        else:
            uniform.pop(head, None)
    for head, found in experts.items():
        if head in uniform and set(found.values()) != {len(uniform[head].leaves)}:
            del uniform[head]
    taken = set(uniform)
    others = [name for name, known in zip(tensors, of_experts, strict=True) if not known]
    if len(taken) < len(experts):
        named = compress(tensors, of_experts)
        others += [name for name, head in zip(named, heads, strict=True) if head not in taken]
    return {head + _EXPERTS_MARK: layer for head, layer in uniform.items()}, others


def _columns(names: list[str]) -> tuple[list[str], list[str], list[str]] | None:
    """For each name what stands before the mark, the expert's number and the rest; None where one has none.

    The names are cut all at once: a piece between two numbers ends one name and begins the next, and there
    are few different ones.
    """
    pieces = _NUMBER.split("\n".join(names))
    if not names or len(pieces) != 2 * len(names) + 1:
        return None
    cut = {piece: piece.split("\n") for piece in pieces[2:-1:2]}
    if any(len(halves) != 2 for halves in cut.values()):
        return None
    between = list(map(cut.__getitem__, pieces[2:-1:2]))
    heads = [pieces[0], *(head for _, head in between)]
    leaves = [*(leaf for leaf, _ in between), pieces[-1]]
    return heads, pieces[1::2], leaves
