"""Hooks around SGLang's loading of a model: whose experts are moectl's, which tensors nobody else sees."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.runtime_context import get_parallel, get_server_args

from ....checkpoint.source.open_checkpoint import MANIFEST
from ....errors import CheckpointError, NoBackend, UsageError
from ...engine_names import SWITCH, kernels_asked
from ...limits import unsupported
from ...model_experts import DTYPES, ModelExperts, default_device, open_experts
from .. import METHOD
from ..limits import LIMITS, MEMORY_SAVER, refusals
from .deployment import shard_of
from .quantization import SglangQuantization

logger = logging.getLogger(__name__)

Load = Callable[[Any, Any], QuantizationConfig | None]


def quantization_of(original: Load, model_config: Any, load_config: Any) -> QuantizationConfig | None:
    """Stands for SGLang's ``_get_quantization_config``; the first call that names the checkpoint.

    Refuses with every reason what moectl's experts do not do in this deployment. Draft models of published
    checkpoints are SGLang's own.
    """
    if model_config.quantization != METHOD:
        if model_config.quantization is None and kernels_asked() and not model_config.is_draft_model:
            # SGLang asks methods what they claim only where there is a quantization_config.
            logger.warning(
                "moectl computes no experts of %s: SGLang knows of %s only where a checkpoint has a "
                "quantization_config; --quantization moectl takes experts over in others",
                model_config.model_path,
                SWITCH,
            )
        return original(model_config, load_config)
    name = model_config.model_path
    converted = (Path(name) / MANIFEST).exists()
    if model_config.is_draft_model and not converted:
        logger.info("moectl leaves the draft model %s to SGLang", name)
        return _others(original, model_config, load_config)
    if model_config.is_draft_model:
        raise NoBackend(
            f"moectl's experts in SGLang do not support draft models, and {name} is a converted directory",
            hint="serve it without speculative decoding, or take the draft model from a published checkpoint",
        )
    _refuse_options()
    if model_config.dtype not in DTYPES:
        raise NoBackend(
            f"moectl's experts take bfloat16 or float16, not {model_config.dtype}",
            hint="use --dtype bfloat16",
        )
    # SGLang downloads weights later, to the same folder: headers are enough.
    experts = open_experts(name, revision=model_config.revision, offline=False, download=True)
    experts = experts.in_cache(getattr(load_config, "download_dir", None))
    if resolved_view(get_server_args()).load_format == "dummy":
        experts = experts.at_random
    backends = _own_layers(experts)
    inner = _others(original, model_config, load_config, experts)
    return SglangQuantization(experts, inner, backends, DTYPES[model_config.dtype])


def _own_layers(experts: ModelExperts) -> dict[int, str]:
    """Backends of the layers that moectl computes, by number; says in the log which it leaves to SGLang."""
    shard = shard_of(get_parallel())
    backends, left = experts.own_backends(default_device(), shard)
    experts.refuse_weight_on_input("SGLang", backends, shard)
    for scheme, numbers in left.items():
        logger.info("moectl leaves experts in %s to SGLang (layers %s): no kernel here", scheme, numbers)
    return backends


def _refuse_options() -> None:
    view = resolved_view(get_server_args())
    given = {limit.option: getattr(view, limit.field, None) for limit in (*LIMITS.values(), MEMORY_SAVER)}
    # SGLang replaces the runner that nobody asked for by its own choice.
    given["--moe-runner-backend"] = get_server_args().moe_runner_backend
    given["--enable-weights-cpu-backup"] = view.enable_weights_cpu_backup
    if met := refusals(given):
        raise unsupported("SGLang", met)


def _others(
    original: Load, model_config: Any, load_config: Any, experts: ModelExperts | None = None
) -> QuantizationConfig | None:
    """The config by which SGLang itself would load the checkpoint's other layers; None for 16-bit ones."""
    theirs = copy.copy(model_config)
    if experts is not None and experts.converted:
        theirs.hf_config = copy.deepcopy(model_config.hf_config)
        theirs.hf_config.quantization_config = dict(experts.published) or None
    theirs.quantization = None
    with SglangQuantization.silent():
        theirs._verify_quantization()
    return None if theirs.quantization is None else original(theirs, load_config)


def filtered_model(
    model: torch.nn.Module, model_config: Any, load_config: Any, quant_config: Any = None
) -> torch.nn.Module | None:
    """Stands behind SGLang's ``_initialize_model``: the model's loader sees no tensor of moectl's experts."""
    if not isinstance(quant_config, SglangQuantization):
        return None
    depth = model_config.hf_text_config.num_hidden_layers
    missing = sorted(number for number in set(quant_config.backends) - quant_config.placed if number < depth)
    if missing and get_parallel().pp_size == 1:
        raise CheckpointError(
            f"{type(model).__name__} has no experts in layers {missing}, the checkpoint has",
            hint="serve it without moectl",
        )
    load: Any = model.load_weights

    def load_others(weights: Iterable[tuple[str, torch.Tensor]], *words: Any, **named: Any) -> Any:
        if quant_config.loaded:
            raise UsageError(
                "moectl's experts take no new weights while SGLang serves",
                hint="start the server again with the new checkpoint",
            )
        ours = quant_config.experts.tensor_names(quant_config.backends)
        return load((item for item in weights if not ours.fullmatch(item[0])), *words, **named)

    model.load_weights = load_others  # type: ignore[assignment]
    quant_config.filtered = True
    return model


def shared_experts_apart(
    original: Callable[..., SharedExpertsConfig], model_class: Any, hf_config: Any, quant_config: Any
) -> SharedExpertsConfig:
    """Stands for SGLang's ``resolve_shared_experts_config``: shared experts do not become routed ones."""
    if isinstance(quant_config, SglangQuantization) and quant_config.backends:
        return SharedExpertsConfig(fusion_disabled=True)
    return original(model_class, hf_config, quant_config)
