"""Random tensors of a resized model: experts quantized in their format, other tensors drawn directly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint, ExpertNames, LayerGroup
from ..convert.codecs import codec_for
from ..convert.sources import TensorMapping, map_layer
from ..convert.sources.packings import extra_values
from ..dtypes import MODEL_DTYPES
from ..files.tensor_table import TensorInfo
from ..problem.moe_problem import Dims, MoEProblem
from ..problem.schemes import FULL, Scheme, WeightFormat
from ..seeds import seed_of
from ..torch_dtypes import TORCH_DTYPES
from .resize import match_shared

BANK_ROWS = 4096
"""Rows of each matrix kind that are drawn and quantized; every expert is made of such rows."""

PIECE_ROWS = 1024
"""Rows that are quantized together: encoding takes several times the memory of what it encodes. A bank whose
rows share a scale has so many."""

ROUTER_SPREAD = 2.0
"""Standard deviation of router logits for inputs of unit variance: far enough apart to rank experts."""

BIAS_SPREAD = 0.05

LARGEST_INPUT = 8.0
"""Largest magnitude of activations that static scales are made for."""

SCALE_SPREAD = 0.125
"""How far the one scale of a matrix is from its bank's, at most, so that every expert has its own."""


@dataclass(frozen=True)
class _Bank:
    """Quantized rows, in units that are picked together.

    Attributes:
        codes: ``[units, rows of a unit, groups, elements of a group]``.
        scale, zero: ``[units, groups]``, or ``[1, 1]`` for one scale of all.
        single: the number that a matrix has once (its scale, or the scale of its scales), if any.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    single: Tensor | None

    @property
    def turns(self) -> int:
        """Groups that a row may be turned by."""
        return self.codes.shape[2]


def _bank(weight: WeightFormat, weights: Tensor) -> _Bank:
    """The bank of `weights` ``[rows, columns]``."""
    codec = codec_for(weight)
    pieces = [codec.encode(piece[None]) for piece in torch.split(weights, PIECE_ROWS)]
    codes = torch.cat([piece.codes[0] for piece in pieces])

    def joined(name: str) -> Tensor | None:
        found = [getattr(piece, name) for piece in pieces]
        return None if found[0] is None else torch.cat([t[0] for t in found])

    rows, columns = weights.shape
    tall = max(1, weight.block[0])
    group = 1 if weight.bits == 16 else columns if weight.group in (FULL, 0) else weight.group
    groups = columns // group if columns % group == 0 else 1
    scale = joined("scale")
    single = joined("global_scale") if weight.number.global_scale else scale if _is_single(weight) else None
    return _Bank(codes.view(rows // tall, tall, groups, -1), scale, joined("zero"), single)


def _is_single(weight: WeightFormat) -> bool:
    """True for formats with one scale for the whole matrix."""
    return weight.block == (FULL, FULL)


@dataclass(frozen=True)
class _Experts:
    """The experts of a group of layers, or its shared experts as one.

    `mappings` are how their tensors are stored, by stored role.
    """

    problem: MoEProblem
    mappings: Mapping[str, TensorMapping]
    zeros_less_one: bool


@dataclass(frozen=True)
class _TensorPlace:
    """What a tensor is: its kind and role, the layer, and the expert where it has one of its own."""

    kind: str
    role: str
    layer: int
    expert: int | None = None
    experts: _Experts | None = None


@dataclass
class TensorMaker:
    """Makes each tensor's bytes from the seed and its own name, so that order and batch do not matter."""

    seed: int
    _places: dict[str, _TensorPlace] = field(default_factory=dict)
    _banks: dict[tuple[WeightFormat, int], _Bank] = field(default_factory=dict)

    def add(self, checkpoint: Checkpoint) -> None:
        """Takes in a model's layers; MoectlError when their experts cannot be stored as the model does it."""
        for group in checkpoint.groups:
            own = _experts(checkpoint, group)
            shared = _shared_experts(checkpoint, group)
            names = group.names
            for layer in group.layers:
                for kind, roles in (
                    ("router", names.router),
                    ("shared", names.shared),
                    ("latent", names.latent),
                ):
                    for role, template in roles.items():
                        made = shared if kind == "shared" and role != "gate" else None
                        self._places[template.format(layer=layer)] = _TensorPlace(
                            kind, role, layer, None, made
                        )
                for role, template in names.experts.items():
                    several: list[int | None] = (
                        list(range(group.problem.experts)) if "{expert}" in template else [None]
                    )
                    for expert in several:
                        place = _TensorPlace("expert", role, layer, expert, own)
                        self._places[template.format(layer=layer, expert=expert)] = place

    def parts(self, info: TensorInfo) -> Iterator[Tensor]:
        """The tensor in pieces of whole experts, each contiguous bytes."""
        place = self._places.get(info.name, _TensorPlace("rest", "", 0))
        if place.experts is None:
            yield _as_bytes(self._plain(info, place))
            return
        made, mapping = place.experts, place.experts.mappings[place.role]
        one = place.expert is not None or mapping.shared
        for expert in (place.expert or 0,) if one else range(made.problem.experts):
            yield _as_bytes(self._stored(made, mapping, place, expert))

    def _generator(self, *key: object) -> torch.Generator:
        """A generator that depends on the seed and `key` alone."""
        return torch.Generator().manual_seed(seed_of(self.seed, *key))

    def _plain(self, info: TensorInfo, place: _TensorPlace) -> Tensor:
        """What is stored as it is: routers, plain shared experts, projections and the rest."""
        generator, dtype = self._generator(info.name), TORCH_DTYPES[info.dtype]
        if place.role == "hash":
            tokens, top_k = info.shape
            experts = self._experts_of(place.layer)
            return torch.rand(tokens, experts, generator=generator).topk(top_k).indices.to(dtype)
        if info.name.endswith("norm.weight") or place.role == "input_scale":
            return torch.ones(info.shape, dtype=dtype)
        if place.role == "expert_scale":
            return (torch.rand(info.shape, generator=generator) + 0.5).to(dtype)
        values = torch.randn(info.shape, generator=generator)
        if math.prod(info.shape) == max(info.shape) and place.role != "gate":
            values *= BIAS_SPREAD
        else:
            values *= (ROUTER_SPREAD if place.kind == "router" else 1.0) / math.sqrt(info.shape[-1])
        return values.to(dtype)

    def _experts_of(self, layer: int) -> int:
        return next(
            place.experts.problem.experts
            for place in self._places.values()
            if place.kind == "expert" and place.layer == layer and place.experts
        )

    def _stored(self, made: _Experts, mapping: TensorMapping, place: _TensorPlace, expert: int) -> Tensor:
        """One expert's tensor as it is stored."""
        matrix, _, kind = place.role.partition("_")
        if not mapping.role:
            found = extra_values(place.role, made.problem, mapping.shape, made.zeros_less_one)
            return found.to(TORCH_DTYPES[mapping.dtype])
        if place.kind == "shared":
            matrix = f"shared {matrix}"
        make = {"input": self._input, "bias": self._bias}.get(kind)
        rows = (
            make(made, matrix, place.layer, expert)
            if make
            else self._pick(made, matrix, kind, place.layer, expert)
        )
        return mapping.packed(rows[None])

    def _bank_of(self, made: _Experts, columns: int) -> _Bank:
        weight = made.problem.scheme.weight
        if (weight, columns) not in self._banks:
            rows = PIECE_ROWS if _is_single(weight) or weight.number.global_scale else BANK_ROWS
            drawn = torch.randn(1, rows, columns, generator=self._generator("bank", columns))
            self._banks[weight, columns] = _bank(weight, drawn[0] / math.sqrt(columns))
        return self._banks[weight, columns]

    def _pick(self, made: _Experts, matrix: str, kind: str, layer: int, expert: int) -> Tensor:
        """One expert's rows of a kind, turned by whole groups; all kinds of a matrix alike."""
        weight = made.problem.scheme.weight
        rows, columns = _extents(made.problem, matrix)
        bank = self._bank_of(made, columns)
        if kind == "global" or (kind == "scale" and _is_single(weight)):
            assert bank.single is not None, "the format has one scale for a matrix"
            return bank.single * self._own(matrix, layer, expert).expand(_halves(made.problem, matrix), 1)
        generator = self._generator(matrix, layer, expert)
        tall = bank.codes.shape[1]
        chosen = torch.randint(len(bank.codes), (-(-rows // tall),), generator=generator)
        turn = int(torch.randint(bank.turns, (), generator=generator))
        if kind:
            source = bank.scale if kind == "scale" else bank.zero
            assert source is not None, "the format has scales and, where they are stored, zeros"
            return source[chosen].roll(turn, dims=1)
        codes = bank.codes[chosen].roll(turn, dims=2).reshape(len(chosen) * tall, -1)[:rows]
        return codes.to(TORCH_DTYPES[MODEL_DTYPES[made.problem.dtype]]) if weight.bits == 16 else codes

    def _own(self, matrix: str, layer: int, expert: int) -> Tensor:
        """``[1, 1]``: a factor near 1 that gate and up share, of one expert."""
        role = matrix if matrix.endswith("w2") else "w13"
        drawn = torch.rand(1, 1, generator=self._generator("own", role, layer, expert))
        return 1 + SCALE_SPREAD * (2 * drawn - 1)

    def _input(self, made: _Experts, matrix: str, layer: int, expert: int) -> Tensor:
        """Static scales of the activations that enter a matrix."""
        largest = made.problem.scheme.act.number.input_largest or LARGEST_INPUT
        scale = LARGEST_INPUT / largest * self._own(f"input {matrix}", layer, expert)
        return scale.expand(_halves(made.problem, matrix), 1)

    def _bias(self, made: _Experts, matrix: str, layer: int, expert: int) -> Tensor:
        generator = self._generator(matrix, "bias", layer, expert)
        values = torch.randn(_extents(made.problem, matrix)[0], generator=generator) * BIAS_SPREAD
        return values.to(TORCH_DTYPES[MODEL_DTYPES[made.problem.dtype]])


def _experts(checkpoint: Checkpoint, group: LayerGroup) -> _Experts:
    layer = map_layer(checkpoint, group, group.layers[0])
    mappings = {each.mapping.stored: each.mapping for each in layer.mapped}
    return _Experts(group.problem, mappings, layer.zeros_less_one)


def _shared_experts(checkpoint: Checkpoint, group: LayerGroup) -> _Experts | None:
    """The shared experts as one expert; None where they are plain floats or not listed."""
    layer = group.layers[0]
    infos = {
        template: checkpoint.tensors[template.format(layer=layer)] for template in group.names.shared.values()
    }
    match = match_shared(group, infos)
    if match is None or match.weight.bits == 16:
        return None
    templates = {role: template for role, template in group.names.shared.items() if role != "gate"}
    problem = replace(
        group.problem,
        dims=Dims(match.sizes["hidden"], match.sizes["intermediate"]),
        experts=1,
        local_experts=1,
        top_k=1,
        scheme=Scheme(match.weight, group.problem.scheme.act),
        storage=match.storage.name(group.problem.storage),
        rows="concatenated",
        act_order="",
        bias="w2_bias" in templates,
        activation=replace(group.problem.activation, gated=match.storage.gated),
    )
    names = ExpertNames(templates)
    return _experts(checkpoint, LayerGroup(group.layers, problem, names, {}, storage=match.storage))


def _halves(problem: MoEProblem, matrix: str) -> int:
    """Gate and up, where they are stored as one matrix."""
    return 2 if matrix.endswith("w13") and problem.activation.gated else 1


def _extents(problem: MoEProblem, matrix: str) -> tuple[int, int]:
    """Rows and columns of an expert's stored matrix."""
    dims = problem.dims
    if matrix.endswith("w2"):
        return dims.hidden, dims.intermediate
    return _halves(problem, matrix) * dims.intermediate, dims.hidden


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
