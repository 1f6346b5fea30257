"""Where the tensors of a synthesized model are described: the catalogue, or a checkpoint of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config.declared_layers import DeclaredLayers, declared_layers
from ..checkpoint.source.catalogue import CatalogueEntry, TensorSchema, built_in, model_names, read_entry
from ..checkpoint.source.open_checkpoint import open_checkpoint
from ..checkpoint.source.shards import CONFIG, QUANTIZATION_FILES, read_document, separate_quantization
from ..checkpoint.tensors.shapes import AxisSize
from ..errors import MoectlError, UsageError
from ..files.user_paths import user_path


def schema_of(model: str) -> tuple[CatalogueEntry, Mapping[str, Any]]:
    """The tensors of a model at the sizes of its entry's config, and the config to be written for it.

    `model` is a built-in model, a checkpoint's directory, or a config.json. A config without tensors takes
    those of the built-in model that has the same architecture and number formats.

    Raises UsageError for an unknown model or a config that no built-in model is like, CheckpointError for a
    checkpoint that cannot be read.
    """
    path = user_path(model)
    is_config = path.suffix == ".json" and path.is_file()
    if not is_config and not (path / CONFIG).is_file():
        if path.is_dir() and ("/" not in model or model.startswith((".", "/", "~"))):
            open_checkpoint(path, offline=True)  # raises the error of a directory without a config
        entry = built_in(model)
        return entry, entry.config
    checkpoint = open_checkpoint(path if is_config else path.absolute(), offline=True)
    folder = path.parent if is_config else path
    found = {
        name: document
        for name in QUANTIZATION_FILES
        if (path.name == CONFIG or not is_config) and (document := read_document(folder, name)) is not None
    }
    if not checkpoint.tensors:
        return _like(checkpoint.config, found, model)
    entry = CatalogueEntry(
        folder.resolve().name,
        checkpoint.config,
        tuple(_schemas(checkpoint)),
        tuple(sorted(layer for group in checkpoint.groups for layer in group.layers)),
        checkpoint.groups[0].problem.experts,
        "",
        found,
    )
    return entry, checkpoint.config


def _schemas(checkpoint: Checkpoint) -> list[TensorSchema]:
    """The MoE tensors of an opened checkpoint, each group's with its layers."""
    schemas = []
    for group in checkpoint.groups:
        names = group.names
        for roles in (names.experts, names.router, names.shared, names.latent):
            for template in roles.values():
                info = checkpoint.tensors[template.format(layer=group.layers[0], expert=0)]
                shape = tuple(AxisSize("", size) for size in info.shape)
                schemas.append(TensorSchema(template, info.dtype, shape, group.layers))
    return schemas


def _like(
    config: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]], model: str
) -> tuple[CatalogueEntry, Mapping[str, Any]]:
    """The built-in model with the tensors that `config` alone does not tell, and `config`."""
    declared, fewer = _declared(config, documents), ""
    for name in model_names():
        entry = read_entry(name)
        try:
            kind = _kind(_declared(entry.config, entry.documents))
        except MoectlError:
            continue
        if kind == _kind(declared):
            if set(declared.group.layers) <= set(entry.layers):
                return replace(entry, documents=documents), config
            fewer = entry.name
    if fewer:
        raise UsageError(
            f"{model} names no tensors, and {fewer}, which is like it, lacks some of its MoE layers",
            hint="choose fewer layers in the config, or give the directory with its weights",
        )
    raise UsageError(
        f"{model} names no tensors, and no built-in model has its architecture with "
        f"{declared.group.problem.scheme}",
        hint="give the directory of a checkpoint with its weights, or a built-in model",
    )


def _declared(config: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]]) -> DeclaredLayers:
    quantization, file = separate_quantization(documents)
    return declared_layers(config, quantization, file)


def _kind(declared: DeclaredLayers) -> tuple[object, ...]:
    """What decides which tensors a model has, and in which dtypes, whatever its sizes."""
    problem = declared.group.problem
    return (
        declared.family,
        problem.scheme,
        problem.storage,
        problem.dtype,
        problem.act_order,
        problem.activation.gated,
        problem.bias,
        problem.shared_experts > 0,
        problem.routing.correction_bias,
        problem.routing.hashed,
        problem.model_hidden == problem.dims.hidden,
    )
