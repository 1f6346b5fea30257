"""Bytes of the weights that are no routed experts, computed from config.json where no header lists them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...errors import CheckpointError
from ...problem.model_shape import BlockedMatrix
from ...problem.other_weights import OtherWeights, sum_weights
from ...problem.schemes import BF16, WeightFormat
from .declared_layers import DeclaredLayers, declared_layers
from .outer_formats import OuterFormats
from .outer_matrices import OuterMatrices, OuterMatrix
from .stated_sizes import Untold


def estimated_weights(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    file: str = "",
    stored: Collection[str] = ("bf16",),
) -> OtherWeights | None:
    """The weights outside the routed experts of a model with this `config`; None if they cannot be told.

    Norms and biases, below 0.1 %, are left out, and so are layers for multi-token prediction, which engines
    load only when they are asked to predict. `quantization` and `file` are as in `declared_layers`; `stored`
    are the number formats of the experts' tensors: when those are quantized, and the config has no word of
    it, nothing is known of the rest either.

    Example:
        >>> config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8,
        ...           "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336,
        ...           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
        >>> estimated_weights(config).total
        692191232
    """
    try:
        declared = declared_layers(config, quantization, file)
        if not declared.quantization and set(stored) - {"bf16"}:
            return None
        matrices = OuterMatrices(config, declared)
        found = (
            (f"{name}.weight", weight.nbytes(matrix.rows, matrix.columns))
            for name, matrix, weight in _formatted(matrices, declared)
        )
        return sum_weights(found, declared.layers, matrices.kv_heads, "config")
    except (Untold, CheckpointError):
        return None


def blocked_matrices(
    config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None, file: str = ""
) -> tuple[BlockedMatrix, ...]:
    """FP8 matrices with blocks outside the experts that are sharded alone; empty where they cannot be told.

    One of each name and size, in the order of the layers. Projections that engines merge with others, such as
    gate and up, are left out, as are replicated ones. Arguments are as in `estimated_weights`.
    """
    try:
        found = dict[tuple[str, int], BlockedMatrix]()
        declared = declared_layers(config, quantization, file)
        for name, matrix, weight in _formatted(OuterMatrices(config, declared), declared):
            leaf = matrix.module.rpartition(".")[2]
            if weight.name != "fp8" or min(weight.block) <= 1 or leaf not in (*_BY_COLUMNS, *_BY_ROWS):
                continue
            rows = leaf in _BY_ROWS
            size = matrix.rows if rows else matrix.columns
            item = BlockedMatrix(name, size, weight.block[0 if rows else 1], rows)
            found.setdefault((matrix.module, size), item)
        return tuple(found.values())
    except (Untold, CheckpointError):
        return ()


_BY_COLUMNS = ("o_proj", "out_proj", "down_proj")
"""Matrices whose input features are sharded."""
_BY_ROWS = ("q_b_proj", "kv_b_proj")
"""Matrices whose output features are sharded, each for itself."""


def _formatted(
    matrices: OuterMatrices, declared: DeclaredLayers
) -> Iterator[tuple[str, OuterMatrix, WeightFormat]]:
    """Every matrix with its name, from the layer's number on, and its format."""
    formats = OuterFormats(declared)
    for prefix, matrix in matrices:
        weight = formats.of(prefix, matrix.module) if matrix.quantizable else BF16
        yield f"{prefix}{matrix.module}", matrix, weight
