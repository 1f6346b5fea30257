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
"""Rows that are drawn and quantized per number of columns; every expert is made of such rows."""

PIECE_ROWS = 1024
"""Rows quantized at once, since encoding takes several times the memory of its input. A bank whose rows share
a scale has only these."""

ROUTER_SPREAD = 2.0
"""Standard deviation of router logits for inputs of unit variance: enough to rank experts."""

BIAS_SPREAD = 0.05
"""Standard deviation of biases."""

LARGEST_INPUT, LARGEST_HIDDEN = 8.0, 32.0
"""Largest magnitudes that static scales allow for: of tokens, and of what enters w2, a product or a square of
sums of unit variance."""

SCALE_SPREAD = 0.125
"""Largest relative difference of a matrix's only scale from its bank's, so that experts differ."""


@dataclass(frozen=True)
class _Bank:
    """Quantized rows, in units that are picked together.

    Attributes:
        codes: ``[units, rows of a unit, groups, elements of a group]``.
        scale, zero: ``[units, groups]``, or ``[1, 1]`` if all share one scale.
        single: the scale, or the scale of the scales, that a matrix has only once; if any.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    single: Tensor | None

    @property
    def groups(self) -> int:
        """Number of groups in a row."""
        return self.codes.shape[2]


def _bank(weight: WeightFormat, weights: Tensor) -> _Bank:
    """The bank of `weights` ``[rows, columns]``."""
    codec = codec_for(weight)
    pieces = [codec.encode(piece[None]) for piece in torch.split(weights, PIECE_ROWS)]
    codes = torch.cat([piece.codes[0] for piece in pieces])

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(piece, name) for piece in pieces]
        return None if tensors[0] is None else torch.cat([t[0] for t in tensors])

    rows, columns = weights.shape
    unit_rows = max(1, weight.block[0])
    group = 1 if weight.bits == 16 else columns if weight.group in (FULL, 0) else weight.group
    groups = columns // group if columns % group == 0 else 1
    scale = joined("scale")
    single = joined("global_scale") if weight.number.global_scale else scale if _is_single(weight) else None
    return _Bank(codes.view(rows // unit_rows, unit_rows, groups, -1), scale, joined("zero"), single)


def _is_single(weight: WeightFormat) -> bool:
    """True for formats with one scale for the whole matrix."""
    return weight.block == (FULL, FULL)


@dataclass(frozen=True)
class _Experts:
    """The experts of a group of layers, or its shared experts as a single one.

    `mappings` describe how their tensors are stored, by stored role.
    """

    problem: MoEProblem
    mappings: Mapping[str, TensorMapping]
    zeros_less_one: bool


@dataclass(frozen=True)
class _TensorRole:
    """What a tensor is: kind, role and layer, and the number of the expert if it belongs to one."""

    kind: str
    role: str
    layer: int
    expert: int | None = None
    experts: _Experts | None = None


@dataclass
class TensorMaker:
    """Makes each tensor's bytes from the seed and the tensor's name alone, so that order does not matter."""

    seed: int
    _roles: dict[str, _TensorRole] = field(default_factory=dict)
    _banks: dict[tuple[WeightFormat, int], _Bank] = field(default_factory=dict)

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds the layers of a model; MoectlError if their experts cannot be stored as in the model."""
        for group in checkpoint.groups:
            routed = _experts(checkpoint, group)
            shared = _shared_experts(checkpoint, group)
            names = group.names
            for layer in group.layers:
                for kind, roles in (
                    ("router", names.router),
                    ("shared", names.shared),
                    ("latent", names.latent),
                ):
                    for role, template in roles.items():
                        experts = shared if kind == "shared" and role != "gate" else None
                        self._roles[template.format(layer=layer)] = _TensorRole(
                            kind, role, layer, None, experts
                        )
                for role, template in names.experts.items():
                    numbers: list[int | None] = (
                        list(range(group.problem.experts)) if "{expert}" in template else [None]
                    )
                    for expert in numbers:
                        tensor_role = _TensorRole("expert", role, layer, expert, routed)
                        self._roles[template.format(layer=layer, expert=expert)] = tensor_role

    def parts(self, info: TensorInfo) -> Iterator[Tensor]:
        """Yields the tensor's bytes, expert by expert if it holds several."""
        role = self._roles.get(info.name, _TensorRole("rest", "", 0))
        if role.experts is None:
            yield _as_bytes(self._plain(info, role))
            return
        experts, mapping = role.experts, role.experts.mappings[role.role]
        single = role.expert is not None or mapping.shared
        for expert in (role.expert or 0,) if single else range(experts.problem.experts):
            yield _as_bytes(self._stored(experts, mapping, role, expert))

    def _generator(self, *key: object) -> torch.Generator:
        """A generator that depends on the seed and `key` alone."""
        return torch.Generator().manual_seed(seed_of(self.seed, *key))

    def _plain(self, info: TensorInfo, role: _TensorRole) -> Tensor:
        """A tensor that is not quantized: routers, plain shared experts, projections and others."""
        generator, dtype = self._generator(info.name), TORCH_DTYPES[info.dtype]
        if role.role == "hash":
            tokens, top_k = info.shape
            experts = self._expert_count(role.layer)
            return torch.rand(tokens, experts, generator=generator).topk(top_k).indices.to(dtype)
        if info.name.endswith("norm.weight") or role.role == "input_scale":
            return torch.ones(info.shape, dtype=dtype)
        if role.role == "expert_scale":
            return (torch.rand(info.shape, generator=generator) + 0.5).to(dtype)
        values = torch.randn(info.shape, generator=generator)
        if math.prod(info.shape) == max(info.shape) and role.role != "gate":
            values *= BIAS_SPREAD
        else:
            values *= (ROUTER_SPREAD if role.kind == "router" else 1.0) / math.sqrt(info.shape[-1])
        return values.to(dtype)

    def _expert_count(self, layer: int) -> int:
        return next(
            role.experts.problem.experts
            for role in self._roles.values()
            if role.kind == "expert" and role.layer == layer and role.experts
        )

    def _stored(self, experts: _Experts, mapping: TensorMapping, role: _TensorRole, expert: int) -> Tensor:
        """One expert's tensor as it is stored."""
        matrix, _, kind = role.role.partition("_")
        if not mapping.role:
            values = extra_values(role.role, experts.problem, mapping.shape, experts.zeros_less_one)
            return values.to(TORCH_DTYPES[mapping.dtype])
        if role.kind == "shared":
            matrix = f"shared {matrix}"
        make = {"input": self._input, "bias": self._bias}.get(kind)
        rows = (
            make(experts, matrix, role.layer, expert)
            if make
            else self._pick(experts, matrix, kind, role.layer, expert)
        )
        return mapping.packed(rows[None])

    def _bank_of(self, experts: _Experts, columns: int) -> _Bank:
        weight = experts.problem.scheme.weight
        if (weight, columns) not in self._banks:
            rows = PIECE_ROWS if _is_single(weight) or weight.number.global_scale else BANK_ROWS
            drawn = torch.randn(1, rows, columns, generator=self._generator("bank", columns))
            self._banks[weight, columns] = _bank(weight, drawn[0] / math.sqrt(columns))
        return self._banks[weight, columns]

    def _pick(self, experts: _Experts, matrix: str, kind: str, layer: int, expert: int) -> Tensor:
        """One expert's rows of a kind, rotated by whole groups; equally for all kinds of a matrix."""
        weight = experts.problem.scheme.weight
        rows, columns = _extents(experts.problem, matrix)
        bank = self._bank_of(experts, columns)
        if kind == "global" or (kind == "scale" and _is_single(weight)):
            assert bank.single is not None, "the format has one scale for a matrix"
            factor = self._scale_factor(matrix, layer, expert)
            return bank.single * factor.expand(_halves(experts.problem, matrix), 1)
        generator = self._generator(matrix, layer, expert)
        unit_rows = bank.codes.shape[1]
        chosen = torch.randint(len(bank.codes), (-(-rows // unit_rows),), generator=generator)
        shift = int(torch.randint(bank.groups, (), generator=generator))
        if kind:
            source = bank.scale if kind == "scale" else bank.zero
            assert source is not None, "only kinds that the format stores are picked"
            return source[chosen].roll(shift, dims=1)
        codes = bank.codes[chosen].roll(shift, dims=2).reshape(len(chosen) * unit_rows, -1)[:rows]
        return codes.to(TORCH_DTYPES[MODEL_DTYPES[experts.problem.dtype]]) if weight.bits == 16 else codes

    def _scale_factor(self, matrix: str, layer: int, expert: int) -> Tensor:
        """``[1, 1]``: one expert's factor near 1, which gate and up share."""
        role = matrix if matrix.endswith("w2") else "w13"
        drawn = torch.rand(1, 1, generator=self._generator("own", role, layer, expert))
        return 1 + SCALE_SPREAD * (2 * drawn - 1)

    def _input(self, experts: _Experts, matrix: str, layer: int, expert: int) -> Tensor:
        """Static scales of the activations that enter a matrix."""
        held = LARGEST_HIDDEN if matrix.endswith("w2") else LARGEST_INPUT
        largest = experts.problem.scheme.act.number.input_largest or held
        scale = held / largest * self._scale_factor(f"input {matrix}", layer, expert)
        return scale.expand(_halves(experts.problem, matrix), 1)

    def _bias(self, experts: _Experts, matrix: str, layer: int, expert: int) -> Tensor:
        generator = self._generator(matrix, "bias", layer, expert)
        values = torch.randn(_extents(experts.problem, matrix)[0], generator=generator) * BIAS_SPREAD
        return values.to(TORCH_DTYPES[MODEL_DTYPES[experts.problem.dtype]])


def _experts(checkpoint: Checkpoint, group: LayerGroup) -> _Experts:
    layer = map_layer(checkpoint, group, group.layers[0])
    mappings = {mapped.mapping.stored: mapped.mapping for mapped in layer.mapped}
    return _Experts(group.problem, mappings, layer.zeros_less_one)


def _shared_experts(checkpoint: Checkpoint, group: LayerGroup) -> _Experts | None:
    """The shared experts as one expert; None if they are not quantized or not listed."""
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
    """2 if gate and up are stored as one matrix, else 1."""
    return 2 if matrix.endswith("w13") and problem.activation.gated else 1


def _extents(problem: MoEProblem, matrix: str) -> tuple[int, int]:
    """Rows and columns of an expert's stored matrix."""
    dims = problem.dims
    if matrix.endswith("w2"):
        return dims.hidden, dims.intermediate
    return _halves(problem, matrix) * dims.intermediate, dims.hidden


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
