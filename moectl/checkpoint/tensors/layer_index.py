"""The tensors of each MoE layer, indexed by name alone; shapes are checked elsewhere."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

from ...errors import CheckpointError
from ...files.strict_json import shown
from ...files.tensor_runs import TensorRuns
from ...files.tensor_table import TensorInfo, TensorTable, table_of
from .storage import AUXILIARY, EXTRA_MODULES

RENAME = "Store the tensors under the names that the model's reference code has, or ask for these to be read."
"""Hint for tensors of experts, router or shared experts with an unknown name."""

EXPERTS = "experts."
"""The module of a layer's experts in nearly all models."""

_EXPERTS_MARK = f".{EXPERTS}"
"""Separates the prefix of a layer from an expert's number."""

BARE: Mapping[str, tuple[str, ...]] = {
    "moe.": ("gate_proj.", "up_proj.", "down_proj."),
    "block_sparse_moe.": ("input_linear.", "output_linear."),
}
"""Modules that hold the experts' matrices directly, with the prefixes of these matrices' names."""

_ROUTER_AMONG_EXPERTS = frozenset(
    name for names in AUXILIARY.router.values() for name in names if name.startswith(EXPERTS)
)
"""Names of the router's tensors inside the module of the experts."""

_LAYER = re.compile(r"(?P<root>(?:\w+\.)*?)(?:layers|blocks)\.(?P<layer>0|[1-9]\d{0,4})\.", re.ASCII)
_BLOCK = re.compile(r"(?:\w+\.)*?", re.ASCII)
_NUMBER = re.compile(r"\.experts\.(\d{1,6})\.", re.ASCII)
_LEAF = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


@dataclass
class LayerTensors:
    """One layer's MoE tensors: the experts' by expert (None when fused) and leaf, and the auxiliary ones.

    Attributes:
        index: the layer's number.
        root: prefix of all names of the layer, up to its number and a dot.
        block: prefix up to the module that holds router and experts.
        stem: prefix up to the module that holds the experts.
        uniform: the number of experts if all have the same leaves, dtypes and shapes; `experts` then
            holds expert 0 only. None when `experts` holds each one.
        auxiliary: tensors of the router, shared experts and latent projections, by their name after
            `block`, or after `root` if they are outside of that module.
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
    """Assigns tensor names to layers; each name prefix is parsed once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.layers: dict[int, LayerTensors] = {}
        self.extra: set[str] = set()
        self._by_stem: dict[str, LayerTensors | None] = {}

    def layer_at(self, stem: str, info: TensorInfo) -> LayerTensors | None:
        """The layer whose experts' names begin with `stem`; None for experts outside the main model."""
        if stem not in self._by_stem:
            self._by_stem[stem] = self._find_layer(stem, info)
        return self._by_stem[stem]

    def take_uniform(self, tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
        """Adds the layers with uniform experts and returns the names of all other tensors."""
        if not isinstance(tensors, TensorTable | TensorRuns) or not tensors:
            return tensors
        uniform, others = uniform_experts(tensors)
        for stem, experts in uniform.items():
            first = {leaf: tensors[f"{stem}0.{leaf}"] for leaf in experts.leaves}
            layer = self.layer_at(stem, next(iter(first.values())))
            if layer is not None:
                layer.experts[0], layer.uniform = first, experts.count
        return others

    def _find_layer(self, stem: str, info: TensorInfo) -> LayerTensors | None:
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
    """The layers with experts, in order, and the modules of experts outside the main model.

    Layers from number `count` on are not the main model's. Raises CheckpointError for an expert's tensor
    whose name is not understood, and for a layer with experts in two modules.
    """
    indexer = _Indexer(count)
    numbers: dict[str, int] = {}
    others: list[TensorInfo] = []
    for name in indexer.take_uniform(tensors):
        info = tensors[name]
        head, separator, suffix = name.partition(".experts.")
        if EXPERTS + suffix in _ROUTER_AMONG_EXPERTS:
            others.append(info)
            continue
        if not separator:
            stem, suffix = _bare_stem(name)
            if not stem:
                others.append(info)
                continue
        else:
            stem = head + ".experts."
        layer = indexer.layer_at(stem, info)
        if layer is None:
            continue
        number, _, leaf = suffix.partition(".")
        expert = numbers.get(number)
        if expert is None and number[:1].isdigit():
            expert = numbers[number] = _expert_number(number, info)
        expert_tensors = layer.experts.setdefault(expert, {})
        expert_tensors[suffix if expert is None else leaf] = info
    for layer in indexer.layers.values():
        for leaf in layer.leaves:
            if not _LEAF.fullmatch(leaf):
                raise _not_understood(
                    next(
                        expert_tensors[leaf]
                        for expert_tensors in layer.experts.values()
                        if leaf in expert_tensors
                    )
                )
    _add_auxiliary(indexer.layers, others)
    return [indexer.layers[index] for index in sorted(indexer.layers)], indexer.extra


def _bare_stem(name: str) -> tuple[str, str]:
    """A name of `BARE` split after its module; empty strings for any other name."""
    for module, matrices in BARE.items():
        start = name.find(module)
        if start > 0 and name[start - 1] == ".":
            end = start + len(module)
            if name.startswith(matrices, end):
                return name[:end], name[end:]
    return "", ""


def _expert_number(text: str, info: TensorInfo) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 6 or (text[0] == "0" and text != "0"):
        raise _not_understood(info)
    return int(text)


def _add_auxiliary(layers: Mapping[int, LayerTensors], others: list[TensorInfo]) -> None:
    """Adds the tensors of router, shared experts and latent projections to their layers."""
    roots = {layer.root: layer for layer in layers.values()}
    outside: dict[str, list[tuple[str, TensorInfo]]] = defaultdict(list)
    modules = AUXILIARY.modules
    for info in others:
        match = _LAYER.match(info.name)
        layer = roots.get(match[0]) if match else None
        if layer is None:
            continue
        inside = info.name.startswith(layer.block)
        suffix = info.name[len(layer.block if inside else layer.root) :]
        module = suffix.partition(".")[0]
        if module in modules and not inside and module in AUXILIARY.router_modules:
            outside[layer.root].append((suffix, info))
        elif module in modules:
            layer.auxiliary[suffix] = info
    # A router outside the experts' module counts only if there is none inside.
    for root, routers in outside.items():
        present = {suffix.partition(".")[0] for suffix in roots[root].auxiliary}
        if present.isdisjoint(AUXILIARY.router_modules):
            roots[root].auxiliary.update(routers)


@dataclass
class UniformExperts:
    """Experts 0 to `count` - 1 of one layer, all with the same `leaves`, dtypes and shapes."""

    count: int
    leaves: list[str] = field(default_factory=list)


def uniform_experts(
    tensors: TensorTable | TensorRuns,
) -> tuple[Mapping[str, UniformExperts], list[str]]:
    """Uniform experts by the prefix of their names, and the names of all other tensors.

    Works on columns or runs of names instead of single tensors, for speed. A prefix looks like
    ``model.layers.3.mlp.experts.``. Experts of a layer with any irregularity (a missing expert or tensor,
    differing dtypes or shapes, a number with a leading zero, an extra tensor) are among the others.
    """
    if isinstance(tensors, TensorRuns):
        return _uniform_runs(tensors) or uniform_experts(table_of(tensors.values()))
    of_experts = [_EXPERTS_MARK in name for name in tensors]
    columns = _columns(list(compress(tensors, of_experts)))
    if columns is None:
        # Fused experts have names without a number.
        of_experts = [_NUMBER.search(name) is not None for name in tensors]
        columns = _columns(list(compress(tensors, of_experts)))
    if columns is None:
        return {}, list(tensors)
    heads, numbers, leaves = columns
    kinds = compress(tensors.kinds, of_experts)
    experts: dict[str, dict[str, int]] = defaultdict(dict)
    for (head, number), count in Counter(zip(heads, numbers, strict=True)).items():
        experts[head][number] = count
    uniform = {
        head: UniformExperts(len(tensors_of_expert))
        for head, tensors_of_expert in experts.items()
        if all(str(expert) in tensors_of_expert for expert in range(len(tensors_of_expert)))
    }
    for (head, leaf, _), count in Counter(zip(heads, leaves, kinds, strict=True)).items():
        if head in uniform and count == uniform[head].count:
            uniform[head].leaves.append(leaf)
        else:
            uniform.pop(head, None)
    for head, tensors_of_expert in experts.items():
        if head in uniform and set(tensors_of_expert.values()) != {len(uniform[head].leaves)}:
            del uniform[head]
    uniform_heads = set(uniform)
    others = [name for name, is_expert in zip(tensors, of_experts, strict=True) if not is_expert]
    if len(uniform_heads) < len(experts):
        expert_names = compress(tensors, of_experts)
        others += [name for name, head in zip(expert_names, heads, strict=True) if head not in uniform_heads]
    return {head + _EXPERTS_MARK: layer for head, layer in uniform.items()}, others


def _uniform_runs(
    tensors: TensorRuns,
) -> tuple[Mapping[str, UniformExperts], list[str]] | None:
    """`uniform_experts` of runs that are all a tensor of each expert; None if a number is anywhere else."""
    uniform: dict[str, UniformExperts] = {}
    others: list[str] = []
    for run in tensors.runs:
        if run.numbers is None:
            if _NUMBER.search(run.before):
                return None
            others.append(run.before)
            continue
        experts = uniform.setdefault(run.before, UniformExperts(run.numbers))
        leaf = run.after[1:]
        plain = run.before.endswith(_EXPERTS_MARK) and run.after.startswith(".")
        if not plain or leaf in experts.leaves or experts.count != run.numbers:
            return None
        if _NUMBER.search(run.before + run.after):
            return None
        experts.leaves.append(leaf)
    return uniform, others


def _columns(names: list[str]) -> tuple[list[str], list[str], list[str]] | None:
    """Each name's prefix, expert number and leaf, as three columns; None if a name has no expert number.

    All names are split at once: the piece between two numbers ends one name and begins the next, and only
    few distinct pieces occur.
    """
    pieces = _NUMBER.split("\n".join(names))
    if not names or len(pieces) != 2 * len(names) + 1:
        return None
    halves_of = {piece: piece.split("\n") for piece in pieces[2:-1:2]}
    if any(len(halves) != 2 for halves in halves_of.values()):
        return None
    between = list(map(halves_of.__getitem__, pieces[2:-1:2]))
    heads = [pieces[0], *(head for _, head in between)]
    leaves = [*(leaf for leaf, _ in between), pieces[-1]]
    return heads, pieces[1::2], leaves
