"""All built-in models, read from config and headers without their names, against a table of facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moectl.checkpoint import LayerGroup, layer_groups, open_checkpoint
from moectl.checkpoint.config.declared_layers import CONFIG_ONLY
from moectl.checkpoint.source.catalogue import model_names, read_entry
from moectl.checkpoint.source.open_checkpoint import QUANTIZATION_FILES
from moectl.problem.layer_ranges import ranges
from moectl.problem.moe_problem import MoEProblem
from support.sampling import every_nth

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data/checkpoints/expected.jsonl").read_text().splitlines()
]
EXPECTED: dict[str, dict[str, Any]] = {row.pop("checkpoint"): row for row in ROWS}

SILENT = ("nvidia/DeepSeek-R1-0528-FP4", "nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4")
"""Their configs say nothing of a quantization; only headers show it."""


def weight_format(problem: MoEProblem) -> str:
    weight = problem.scheme.weight
    kinds = {(-1, -1): "tensor", (1, -1): "channel"}
    name = f"fp8_{kinds.get(weight.block, 'block')}" if weight.name == "fp8" else weight.name
    return f"{name}_zp" if weight.zero_point else name


def main_group(groups: tuple[LayerGroup, ...]) -> LayerGroup:
    """The group of the last layer, which is like most."""
    return max(groups, key=lambda group: group.layers[-1])


def facts(groups: tuple[LayerGroup, ...]) -> dict[str, Any]:
    group = main_group(groups)
    problem, routing = group.problem, group.problem.routing
    weight = problem.scheme.weight
    return {
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.model_hidden,
        "expert_hidden": problem.dims.hidden,
        "moe_intermediate": problem.dims.intermediate,
        "shared_experts": problem.shared_experts,
        "weight_format": weight_format(problem),
        "group": weight.group if weight.group > 0 else None,
        "activations": problem.scheme.act.name,
        "storage": problem.storage,
        "scoring": routing.scoring,
        "renormalize": routing.renormalize,
        "after_topk": routing.after_topk,
        "scale": routing.scale,
        "expert_groups": [routing.groups, routing.topk_groups] if (routing.groups or 1) > 1 else None,
        "correction_bias": routing.correction_bias,
        "activation": problem.activation.name,
        "limit": problem.activation.limit,
        "gated": problem.activation.gated,
        "expert_bias": problem.bias,
        "tensor_layout": group.storage.arrangement.name if group.storage else "",
        "rows": problem.rows,
        "router_dtype": problem.router_dtype,
    }


def test_every_built_in_model_is_in_the_table() -> None:
    assert set(EXPECTED) == set(model_names())
    assert len(EXPECTED) == 60


@pytest.mark.parametrize("model", every_nth(EXPECTED, 3))
def test_from_headers_without_any_name(model: str, sparse_model: Callable[..., Path]) -> None:
    found = open_checkpoint(sparse_model(model, layers=4), offline=True, allow_catalogue=False)
    expected = {name: EXPECTED[model][name] for name in facts(found.groups)}
    assert facts(found.groups) == expected
    layers = [layer for group in found.groups for layer in group.layers]
    assert sorted(layers) == list(read_entry(model).layers[:4])
    for group in found.groups:
        assert not any("have experts" in note or "have no experts" in note for note in group.notes)
        assert group.sources["storage"].startswith("header:")
        assert group.sources["router_dtype"].startswith("header:")


@pytest.mark.parametrize("model", EXPECTED)
def test_from_the_config_alone(model: str) -> None:
    entry = read_entry(model)
    file, document = next(iter(entry.documents.items()), ("", None))
    quantization = document and {"quant_method": QUANTIZATION_FILES[file], **document}
    groups = layer_groups(entry.config, None, quantization=quantization, quantization_file=file)
    shown = {"tensor_layout", "router_dtype"}
    if model in SILENT:
        shown |= {"weight_format", "group", "activations", "storage"}
    if model == "RedHatAI/Qwen3-Coder-Next-NVFP4":
        shown |= {"activations"}
    found = {name: value for name, value in facts(groups).items() if name not in shown}
    assert found == {name: EXPECTED[model][name] for name in found}
    assert ranges(layer for group in groups for layer in group.layers) == EXPECTED[model]["layers"]
    assert [ranges(group.layers) for group in groups] == EXPECTED[model]["groups"]
    assert all(CONFIG_ONLY in group.notes for group in groups)


@pytest.mark.parametrize("model", EXPECTED)
def test_what_config_and_headers_say_of_quantization_agrees(model: str) -> None:
    """Exclusion lists and lists of modules say of every layer what its tensors show."""
    entry = read_entry(model)
    file, document = next(iter(entry.documents.items()), ("", None))
    quantization = document and {"quant_method": QUANTIZATION_FILES[file], **document}
    few = replace(entry, layers=entry.layers[:4])
    groups = layer_groups(entry.config, few.listing(), quantization=quantization, quantization_file=file)
    disagree = [note for group in groups for note in group.notes if "headers say" in note]
    assert bool(disagree) == (model in SILENT or model == "RedHatAI/Qwen3-Coder-Next-NVFP4"), disagree


def test_nothing_is_assumed_of_a_published_model() -> None:
    for model in EXPECTED:
        entry = read_entry(model)
        (group, *_) = layer_groups(entry.config, None)
        assumed = [
            name
            for name, source in group.sources.items()
            if source == "assumed" and name.split(".")[0] in ("routing", "activation")
        ]
        assert assumed == [], model
