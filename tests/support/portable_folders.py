"""Checkpoint folders of one random layer in any storage, and what a converted folder holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moectl.checkpoint.checkpoint import Checkpoint, Origin
from moectl.checkpoint.tensors.storage import PER_EXPERT, Storage, storages
from moectl.convert.execute.convert import convert
from moectl.convert.portable.options import PortableOptions
from moectl.convert.portable.portable_plan import plan_portable
from moectl.files.safetensors_header import read_header
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import WeightFormat
from support.stored_layers import EXPERTS, LAYER, PREFIX, Case, Layer, make_layer

FILE = "model.safetensors"
DIMS = Dims(128, 256)


def storage_of(name: str, weight: WeightFormat, leaf: str = "", arrangement: str = PER_EXPERT) -> Storage:
    """The storage of gated experts with this name and format, and with a tensor whose name ends so."""
    for storage in storages():
        kinds = {stored.role for stored in storage.tensors.values()}
        if (
            storage.arrangement.name == arrangement
            and name in storage.format.storages
            and (storage.weight.name, storage.weight.bits) == (weight.name, weight.bits)
            and all(a in (b, -2) for a, b in zip(storage.weight.block, weight.block, strict=True))
            and ("w3" in kinds or arrangement != PER_EXPERT)
            and any(name.startswith("gate") and name.endswith(leaf) for name in storage.tensors)
        ):
            return storage
    raise LookupError(f"{name} {weight}")


def case_of(storage: Storage, weight: WeightFormat, dims: Dims = DIMS, **fields: object) -> Case:
    """The storage with what is optional left out, but for zero points that the format has."""
    roles = {stored.role for stored in storage.tensors.values()}
    out = {r for r in roles if r.endswith(("_bias", "_input", "_prequant", "_order"))}
    if not weight.zero_point:
        out |= {r for r in roles if r.endswith("_zero")}
    dtypes = {
        stored.role: weight.scale_dtype
        for stored in storage.tensors.values()
        if stored.role.endswith("_scale") and weight.scale_dtype in stored.dtypes
    }
    return Case(storage, weight, dims, dtypes, left_out=frozenset(out), **fields)


def write_folder(folder: Path, layer: Layer, dense: str = "") -> Checkpoint:
    """The layer as a folder, and as an opened checkpoint.

    `dense` names a module of the layer that is stored as the gate projection of expert 0 is.
    """
    folder.mkdir(parents=True)
    tensors = {name: t.contiguous() for name, t in layer.contents().items()}
    for name in list(tensors):
        if name.endswith("_shape"):
            w2 = "down" in name
            sides = (layer.case.dims.hidden, layer.case.dims.intermediate)
            tensors[name] = torch.tensor(sides if w2 else sides[::-1], dtype=tensors[name].dtype)
    other = {
        f"model.layers.{LAYER}.self_attn.q_proj.weight": torch.randn(8, layer.case.dims.hidden),
        f"model.layers.{LAYER}.input_layernorm.weight": torch.ones(layer.case.dims.hidden),
    }
    gate = PREFIX.format(layer=LAYER) + "0.gate_proj."
    for name in [name for name in tensors if dense and name.startswith(gate)]:
        other[f"model.layers.{LAYER}.{dense}.{name.removeprefix(gate)}"] = tensors[name].clone()
    save_file({**tensors, **other}, folder / FILE)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    path = folder / FILE
    with path.open("rb") as file:
        infos = read_header(file, path.stat().st_size, FILE)
    origin = Origin("folder", str(folder), path=folder)
    return Checkpoint({}, infos, (layer.group,), origin, folder)


def converted(
    layer: Layer, folder: Path, target: str, container: str | None = None, dense: str = "", **asked: object
) -> Path:
    """A folder with the layer, and a `dense` module as in `write_folder`, in a portable format."""
    checkpoint = write_folder(folder / "source", layer, dense)
    out = folder / "out"
    convert(plan_portable(checkpoint, PortableOptions(target, container, **asked)), out)
    return out


def contents(out: Path) -> dict[str, Tensor]:
    """Every tensor of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def layer_in(out: Path, storage: Storage, weight: WeightFormat, dims: Dims = DIMS) -> Layer:
    """The layer that a converted folder holds, as its format describes it."""
    tensors = contents(out)
    found = {}
    for leaf, stored in storage.tensors.items():
        names = [(PREFIX + "{expert}." + leaf).format(layer=LAYER, expert=e) for e in range(EXPERTS)]
        if names[0] in tensors:
            found[stored.role] = [tensors[name] for name in names]
    return Layer(case_of(storage, weight, dims), found)


def random_layer(
    name: str,
    weight: WeightFormat,
    leaf: str = "",
    arrangement: str = PER_EXPERT,
    dims: Dims = DIMS,
    seed: int = 0,
) -> Layer:
    """A random layer in a storage."""
    return make_layer(case_of(storage_of(name, weight, leaf, arrangement), weight, dims), seed)


def scaled_down(layer: Layer, role: str, factor: float) -> Layer:
    """The layer with other numbers in one role."""
    tensors = {**layer.tensors, role: [t * factor for t in layer.tensors[role]]}
    return replace(layer, tensors=tensors)
