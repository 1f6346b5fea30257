"""Layers of built-in models by name, for benchmarks and tuning without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ...dtypes import DTYPE_BITS
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem, Routing
from ...problem.published_layers import SCHEMES
from ...problem.schemes import BF16
from ..config.declared_layers import declared_layers
from ..tensors.layer_groups import layer_groups
from .catalogue import CatalogueEntry, built_in, short_name
from .shards import separate_quantization


def named_layer(text: str) -> tuple[str, MoEProblem]:
    """The model's short name and its layer for ``NAME`` or ``NAME:FORMAT``.

    NAME is any name of a built-in model (`built_in`); the layer has its published format, or FORMAT of
    `SCHEMES`, and the sizes of the most frequent kind of layer. Scores of the router are plain softmax, as
    random routings need no others. Raises UsageError for unknown names.

    Example:
        >>> name, problem = named_layer("deepseek-ai/DeepSeek-V3")
        >>> name, problem.experts, str(problem.scheme)
        ('deepseek-v3', 256, 'fp8 block 128x128, fp8 dynamic activations')
        >>> str(named_layer("moonshotai/Kimi-K2-Thinking:mxfp4")[1].scheme)
        'mxfp4 group 32, a16 activations'
    """
    name, colon, format = text.partition(":")
    entry = built_in(name)
    problem = _published(entry)
    if colon:
        if format not in SCHEMES:
            raise UsageError(f"no format is called {format!r}", hint=f"give one of {', '.join(SCHEMES)}")
        problem = replace(problem, scheme=SCHEMES[format])
    return short_name(entry.name), problem


def declared_layer(entry: CatalogueEntry) -> MoEProblem:
    """The layer of a built-in model by its config; by its tensors if only they tell that it is quantized.

    Much faster than `named_layer` for models with many tensors.

    Example:
        >>> str(declared_layer(built_in("kimi-k2")).scheme.weight)
        'int4 group 32'
    """
    quantization, file = separate_quantization(entry.documents)
    problem = declared_layers(entry.config, quantization, file).group.problem
    packed = any(DTYPE_BITS[schema.dtype] <= 8 for schema in entry.tensors)
    return _published(entry) if packed and problem.scheme.weight == BF16 else problem


@cache
def _published(entry: CatalogueEntry) -> MoEProblem:
    quantization, file = separate_quantization(entry.documents)
    groups = layer_groups(entry.config, entry.listing(), quantization=quantization, quantization_file=file)
    problem = max(groups, key=lambda group: len(group.layers)).problem
    routing = Routing(weight_on_input=problem.routing.weight_on_input)
    return replace(problem, routing=routing, storage="plain", shared_experts=0, model_type="")
