"""Random layers in any storage, in memory, and what their numbers mean by the formats' own rules.

The judges here read one expert's matrix as its format describes it, element by element, and share
nothing with the code that they judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moectl.checkpoint.checkpoint import Checkpoint, ExpertNames, LayerGroup, Origin
from moectl.checkpoint.tensors.shapes import SymbolicShape
from moectl.checkpoint.tensors.storage import Storage, format_sizes
from moectl.checkpoint.tensors.stored_formats import SHOWN
from moectl.files.tensor_table import TensorInfo
from moectl.problem.moe_problem import Activation, Dims, MoEProblem
from moectl.problem.schemes import FULL, Scheme, WeightFormat
from moectl.torch_dtypes import TORCH_DTYPES

EXPERTS, LAYER = 2, 7
PREFIX = "model.layers.{layer}.mlp.experts."
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds column 0, 1, ... of eight."""


@dataclass(frozen=True)
class Case:
    """A storage with one choice wherever it leaves one.

    Attributes:
        dtypes: of tensors by stored role, where not the first that is allowed.
        other: which of the other shapes scalars have; -1 for the usual one.
        left_out: stored roles that the checkpoint does not have.
    """

    storage: Storage
    weight: WeightFormat
    dims: Dims
    dtypes: Mapping[str, str]
    other: int = -1
    left_out: frozenset[str] = frozenset()

    @property
    def problem(self) -> MoEProblem:
        roles = {stored.role for stored in self.storage.tensors.values()} - self.left_out
        return MoEProblem(
            self.dims,
            EXPERTS,
            2,
            Scheme(self.weight),
            activation=Activation("silu", gated=self.storage.gated),
            storage=self.storage.format.storages[0],
            bias="w2_bias" in roles,
        )


@dataclass(frozen=True)
class Layer:
    """One layer's tensors by stored role: one, or one for each expert."""

    case: Case
    tensors: Mapping[str, list[Tensor]]

    @property
    def names(self) -> ExpertNames:
        per_expert = "{expert}." if self.case.storage.arrangement.name == "per_expert" else ""
        found = {
            stored.role: PREFIX + per_expert + leaf
            for leaf, stored in self.case.storage.tensors.items()
            if stored.role in self.tensors
        }
        return ExpertNames(found)

    @property
    def group(self) -> LayerGroup:
        return LayerGroup((LAYER,), self.case.problem, self.names, {}, storage=self.case.storage)

    def contents(self) -> dict[str, Tensor]:
        """Every tensor by its full name."""
        return {
            template.format(layer=LAYER, expert=expert): t
            for role, template in self.names.experts.items()
            for expert, t in enumerate(self.tensors[role])
        }

    def checkpoint(self, config: Mapping[str, object] | None = None) -> tuple[Checkpoint, bytes]:
        """A checkpoint of one file, and the bytes of that file's tensors."""
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        infos, data = {}, b""
        for name, t in self.contents().items():
            piece = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            infos[name] = TensorInfo(
                name, names[t.dtype], tuple(t.shape), "f", len(data), len(data) + len(piece)
            )
            data += piece
        return Checkpoint(config or {}, infos, (self.group,), Origin("folder", "test")), data


def cases(storage: Storage) -> Iterator[Case]:
    """The choices of a storage, each of them at least once."""
    form, dims = storage.format, Dims(64, 96)
    blocks = [(32, 32)] if "w13" in {s.role for s in storage.tensors.values()} else [(32, 32), (64, 64)]
    if SHOWN not in form.weight.block:
        weights = [form.weight]
    elif form.weight.block[0] == 1:
        weights = [replace(form.weight, block=(1, group)) for group in (32, FULL)]
    else:
        weights = [replace(form.weight, block=block) for block in blocks]
    roles = {stored.role: stored for stored in storage.tensors.values()}
    if "w2_zero" in roles:
        weights = [replace(weight, zero_point=zero) for weight in weights for zero in (False, True)]
    optional = frozenset(role for role, stored in roles.items() if not stored.required)
    optional |= frozenset(role for role in roles if role.endswith("_bias"))
    optional -= {role for role in roles if role.endswith("_zero") and weights[0].zero_point}
    prequant = frozenset(role for role in roles if role.endswith("_prequant"))
    for weight in weights:
        needed = {role for role in roles if role.endswith("_zero") and weight.zero_point}
        floats = max(
            (s.dtypes for r, s in roles.items() if r.endswith(("_scale", "_global"))), default=(), key=len
        )
        for i, dtype in enumerate(floats or ("",)):
            chosen = {
                role: dtype for role, s in roles.items() if dtype in s.dtypes and role.endswith("_scale")
            }
            chosen |= {
                role: dtype for role, s in roles.items() if dtype in s.dtypes and role.endswith("_global")
            }
            shown = chosen.get("w2_scale", "").replace("F8_E8M0", "E8M0")
            own = replace(weight, scale_dtype=shown) if shown and weight.scale_dtype != "E8M0" else weight
            out = prequant | (optional - needed if i % 2 else frozenset())
            yield Case(storage, own, dims, chosen, -1, out)
        most = max(len(s.others) for s in roles.values())
        for other in range(most):
            yield Case(storage, own, dims, chosen, other, prequant)


def make_layer(case: Case, seed: int = 0) -> Layer:
    """Random tensors that are numbers everywhere."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "experts": EXPERTS,
        "hidden": case.dims.hidden,
        "intermediate": case.dims.intermediate,
        **format_sizes(Scheme(case.weight)),
    }
    tensors: dict[str, list[Tensor]] = {}
    for stored in case.storage.tensors.values():
        if stored.role in case.left_out:
            continue
        axes = (
            stored.others[min(case.other, len(stored.others) - 1)]
            if case.other >= 0 and stored.others
            else stored.shape
        )
        shape = tuple(axis.value(sizes) for axis in axes)
        dtype = case.dtypes.get(stored.role, stored.dtypes[0])
        count = EXPERTS if case.storage.arrangement.name == "per_expert" else 1
        tensors[stored.role] = [numbers(stored.role, dtype, shape, generator) for _ in range(count)]
    return Layer(case, tensors)


def numbers(role: str, dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random numbers of a stored role: positive scales, codes that are numbers, zero biases as any."""
    kind = TORCH_DTYPES[dtype]
    if kind.is_floating_point and kind.itemsize > 1:
        drawn = torch.rand(shape, generator=generator) + 0.5
        return (drawn if role.endswith(("_scale", "_global", "_input")) else drawn - 1).to(kind)
    if role.endswith("_scale"):  # E8M0, or E4M3 above zero
        return torch.randint(100, 126, shape, generator=generator, dtype=torch.uint8).view(kind)
    if dtype == "F8_E4M3":
        drawn = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
        sign = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8)
        return (drawn | (sign << 7)).view(kind)
    low, high = (
        (0, 256)
        if kind is torch.uint8
        else (-(2 ** (8 * kind.itemsize - 1)) + (kind.itemsize == 8), 2**31 - 1)
    )
    if kind is torch.int8:
        low, high = -128, 128
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(kind)


def one_matrix(layer: Layer, matrix: str, expert: int) -> dict[str, Tensor]:
    """The tensors of one expert's matrix as its format describes them, by kind."""
    case, found = layer.case, {}
    names = {stored.role: (leaf, stored) for leaf, stored in case.storage.tensors.items()}
    for role, many in layer.tensors.items():
        if role.partition("_")[0] != matrix:
            continue
        kind = role.partition("_")[2]
        if case.storage.arrangement.name == "per_expert":
            found[kind] = many[expert]
            continue
        (t,) = many
        leading = _leading(names[role][1].shape, t.shape)
        if case.storage.arrangement.name == "flat":
            t = t.reshape(EXPERTS, -1, t.shape[-1])[expert]
            found[kind] = t.T if matrix == "w2" else t
            continue
        t = t[expert] if leading else t
        turned = case.storage.arrangement.name == "fused_transposed" and t.ndim == 2 and t.numel() > 2
        blocks = case.storage.arrangement.name == "fused_blocks" and not kind
        found[kind] = t.T if turned else t.flatten(-2) if blocks else t
    return found


def _leading(axes: SymbolicShape, shape: tuple[int, ...]) -> bool:
    """True when the tensor has an axis of experts."""
    return bool(shape) and shape[0] == EXPERTS


def judge(layer: Layer, matrix: str, expert: int) -> np.ndarray:
    """``[n, k]`` float64: one expert's matrix by its format's own rules."""
    tensors, weight = one_matrix(layer, matrix, expert), layer.case.weight
    packing = layer.case.storage.format.packing
    codes = CODES[packing](tensors, weight)
    n, k = codes.shape
    if "scale" not in tensors:
        return codes
    scale = _floats(tensors["scale"])
    if packing in ("gptq", "awq"):
        scale = scale.T
    rows, columns = weight.block
    if rows == FULL:  # one number, or one for each half
        scale = np.repeat(scale.reshape(-1), n // scale.size)[:, None]
        return codes * scale
    scale = scale.reshape(-(-n // rows), -1)
    spread = np.repeat(scale, rows, 0)[:n]
    spread = spread if columns == FULL else np.repeat(spread, columns, 1)[:, :k]
    found = codes * spread
    if "global" in tensors:
        factors = _floats(tensors["global"]).reshape(-1)
        factors = 1 / factors if packing == "divisors" else factors
        found = found * np.repeat(factors, n // factors.size)[:, None]
    return found


def _floats(t: Tensor) -> np.ndarray:
    """Scales as numbers; bytes are E8M0."""
    if t.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return 2.0 ** (t.contiguous().view(torch.uint8).numpy().astype(np.float64) - 127)
    return t.double().numpy()


def _fields(t: Tensor, bits: int) -> np.ndarray:
    """Codes of words, a new last axis counted from the lowest bits."""
    words = t.contiguous().numpy().view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    return (words & ((1 << bits) - 1)).astype(np.float64)


def _rows(tensors: Mapping[str, Tensor], weight: WeightFormat) -> np.ndarray:
    w = tensors[""]
    if weight.bits == 4:
        data = w.contiguous().view(torch.uint8).numpy()
        codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
        return np.where(codes & 8, -1, 1) * np.array(E2M1)[codes & 7]
    return w.double().numpy()


def _words(tensors: Mapping[str, Tensor], weight: WeightFormat) -> np.ndarray:
    codes = _fields(tensors[""], weight.bits)
    codes = codes.reshape(len(codes), -1)
    if not weight.zero_point:
        return codes - 2 ** (weight.bits - 1)
    zero = _fields(tensors["zero"], weight.bits)  # [n / pack, groups, pack]
    return codes - _groupwise(zero.transpose(0, 2, 1).reshape(len(codes), -1), codes.shape[1])


def _gptq(tensors: Mapping[str, Tensor], weight: WeightFormat) -> np.ndarray:
    """The first version of the format: one is added to zero points, in bytes as engines do."""
    codes = _fields(tensors[""], weight.bits)  # [k / pack, n, pack]
    codes = codes.transpose(1, 0, 2).reshape(codes.shape[1], -1)
    if not weight.zero_point:
        return codes - 2 ** (weight.bits - 1)
    zero = _fields(tensors["zero"], weight.bits)
    return codes - _groupwise((zero.reshape(len(zero), -1).T + 1) % 256, codes.shape[1])


def _awq(tensors: Mapping[str, Tensor], weight: WeightFormat) -> np.ndarray:
    codes = _fields(tensors[""], 4)[..., AWQ_ORDER]
    codes = codes.reshape(len(codes), -1).T
    if not weight.zero_point:
        return codes - 8
    zero = _fields(tensors["zero"], 4)[..., AWQ_ORDER]
    return codes - _groupwise(zero.reshape(len(zero), -1).T, codes.shape[1])


def _groupwise(zero: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(zero, columns // zero.shape[1], 1)


CODES = {"rows": _rows, "divisors": _rows, "signed": _rows, "words": _words, "gptq": _gptq, "awq": _awq}
