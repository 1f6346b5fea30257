"""vLLM's own selection code, run in a process that has vLLM and not moectl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .....checkpoint.checkpoint import Checkpoint, LayerGroup
from .....environment import Device
from .....errors import Unavailable, UsageError
from .....problem.moe_problem import MoEProblem
from ....engine import OwnCode
from ....selection_inputs import SelectionInputs
from ..routes.terms import activation, dtype, routing

WORKER = Path(__file__).with_name("vllm_worker.py")
"""Records decisions of a release, as a script."""

KINDS = ("cuda", "rocm", "cpu", "xpu")
OWN_QUANTIZATION = ("kimi_k3",)
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
CUSTOM_ROUTING = {
    "Llama4": "vllm.model_executor.models.llama4:Llama4MoE.custom_routing_function",
    "Custom": "",
}
"""Functions of models that route by one, by the name of the routing method."""


def question(checkpoint: Checkpoint, asked: list[tuple[LayerGroup, SelectionInputs]]) -> dict[str, Any]:
    """The tables of a grid with these layers alone, their cells, and the device.

    Raises UsageError for a device that cannot be asked about, and for weights that are assumed to be others
    than the checkpoint's; Unavailable if what tells vLLM of their format is not known.
    """
    first = asked[0][1]
    device, parallel = first.device, first.problem.parallel
    if device.platform not in KINDS:
        raise UsageError(
            f"vLLM's own code can be asked about {', '.join(KINDS)}, not {device.platform} devices"
        )
    model, config = checkpoint.config.get("model_type"), quantization(checkpoint)
    if model in OWN_QUANTIZATION:
        raise Unavailable(f"vLLM's model {model} chooses quantization methods itself, which is not asked")
    models, cells = {}, []
    for number, (group, inputs) in enumerate(asked):
        if inputs.problem.scheme != group.problem.scheme or inputs.problem.lora:
            raise UsageError(
                "vLLM's own code is asked about the checkpoint as its config describes it",
                hint="leave out --assume act= and lora=",
            )
        if config is not None and group.declared is not None:
            raise Unavailable(
                f"vLLM goes by the config of {checkpoint.origin.name}, which declares {group.declared}; the "
                f"tensors, by which moectl goes, have {group.problem.scheme}"
            )
        if config is None and inputs.problem.storage != "plain":
            raise Unavailable(
                f"vLLM needs the quantization config of {checkpoint.origin.name}, and none is known here",
                hint="name a directory that has it, or leave --offline out",
            )
        models[str(number)] = _model(group, inputs.problem)
        names = {"scheme": "asked", "device": "asked", "profile": "asked", "parallel": "asked"}
        cells.append({**names, "model": str(number), "forced": inputs.requested})
    deployment = {
        "tp": parallel.tp,
        "dp": parallel.dp,
        "ep": parallel.ep,
        "a2a": parallel.all2all,
        "eplb": parallel.eplb,
    }
    grid = {
        "MODELS": models,
        "SCHEMES": {"asked": [config, list(models)]},
        "PARALLEL": {"asked": deployment},
    }
    row = _device(device) | {"dtype": TORCH_DTYPES[dtype(first.problem, device)]}
    return {"grid": grid, "cells": cells, "device": row}


def quantization(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The quantization config where vLLM looks for it, with the method that it makes of older keys."""
    text = checkpoint.config.get("text_config")
    levels = [level for level in (checkpoint.config, text) if isinstance(level, Mapping)]
    keys = ("quantization_config", "compression_config")
    found = next((level[key] for level in levels for key in keys if level.get(key)), checkpoint.quantization)
    if found is None:
        return None
    found = dict(found)
    older = found.get("quantization")
    if (found.get("producer") or {}).get("name") == "modelopt" and isinstance(older, Mapping):
        methods = {"NVFP4": "modelopt_fp4", "MIXED_PRECISION": "modelopt_mixed"}
        found["quant_method"] = methods.get(str(older.get("quant_algo")).upper(), "modelopt")
    found["quant_method"] = str(found.get("quant_method", "")).lower().replace("_tensors", "-tensors")
    return found


def _model(group: LayerGroup, problem: MoEProblem) -> dict[str, Any]:
    routed: dict[str, Any] = {
        "scoring_func": problem.routing.scoring,
        "renormalize": problem.routing.renormalize,
        "e_bias": problem.routing.correction_bias,
        "routed_scaling_factor": problem.routing.scale,
        "apply_router_weight_on_input": problem.routing.weight_on_input,
        "router_dtype": problem.router_dtype,
    }
    if problem.routing.groups is not None:
        groups = {"num_expert_group": problem.routing.groups, "topk_group": problem.routing.topk_groups}
        routed |= {"use_grouped_topk": True, **groups}
    if (method := routing(problem)) in CUSTOM_ROUTING:
        routed |= {"custom_routing_function": CUSTOM_ROUTING[method], "scoring_func": "softmax"}
    if activation(problem) != "swigluoai" and problem.activation.limit is not None:
        routed["swiglu_limit"] = problem.activation.limit
    return {
        "model_type": problem.model_type,
        "E": problem.experts,
        "hidden": problem.dims.hidden,
        "inter": problem.dims.intermediate * problem.parallel.tp_size,
        "topk": problem.top_k,
        "activation": activation(problem),
        "has_bias": problem.bias,
        "routing": routed,
        "gated": problem.activation.gated,
        "prefix": _module(group),
    }


def _module(group: LayerGroup) -> str:
    """The experts' module in the checkpoint's own names, as quantization configs exclude it."""
    template = next(iter(group.names.experts.values()), "model.layers.{layer}.mlp.experts.weight")
    above, experts, _ = template.partition(".{expert}")[0].rpartition("experts")
    return f"{above}{experts}".format(layer=group.layers[0])


def _device(device: Device) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": device.platform,
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "sms": device.sms,
        "amx": "amx" in device.features,
    }
    if device.platform == "cuda":
        row["cc"] = divmod(device.capability, 10)
    if device.platform == "rocm":
        row["gfx"] = device.arch
    return row


OWN_CODE = OwnCode(Path(__file__).with_name("ask.py"), question)
