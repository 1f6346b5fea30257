"""Names of portable outputs, family by family, as the loaders of vLLM and transformers map them."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.checkpoint import Checkpoint, Origin
from moectl.checkpoint.source.catalogue import built_in, model_names
from moectl.convert.execute.convert import convert
from moectl.convert.plan.conversion_plan import ConversionPlan
from moectl.convert.portable.options import PortableOptions
from moectl.convert.portable.portable_plan import plan_portable
from moectl.convert.portable.verify_portable import verify_portable
from moectl.errors import UsageError
from moectl.problem.portable_formats import PORTABLE, TRANSFORMERS_FUSED, TRANSFORMERS_PER_EXPERT
from moectl.synth.resize import Resized, SynthSizes, resized
from support.portable_folders import contents

VLLM = json.loads((Path(__file__).parents[2] / "data/engines/vllm_expert_names.json").read_text())
FORMATS = [(name, container) for name, portable in PORTABLE.items() for container in portable.containers]
REQUANTIZE = {"requantize": True}


@cache
def small(name: str) -> Checkpoint:
    """A built-in model with few and small experts, from headers alone."""
    entry = built_in(name)
    config = resized(entry, SynthSizes(layers=2, experts=8, hidden=512, intermediate=256, top_k=2))
    model = Resized(entry, config)
    tensors = model.listing()
    return Checkpoint(config, tensors, model.groups(tensors), Origin("catalogue", name))


def one_of_each_kind() -> Iterator[Checkpoint]:
    """A built-in model for each family, arrangement and format of experts; takes a second."""
    kinds = set()
    for name in model_names():
        group = small(name).groups[-1]
        assert group.storage is not None
        kind = (group.problem.model_type, group.storage.arrangement.name, group.problem.scheme.weight.name)
        if kind not in kinds:
            kinds.add(kind)
            yield small(name)


def planned(checkpoint: Checkpoint, name: str, container: str) -> ConversionPlan | None:
    """The plan, or None if names are the reason for a refusal; other refusals are of formats."""
    try:
        return plan_portable(checkpoint, PortableOptions(name, container, **REQUANTIZE), experts_only=True)
    except UsageError as error:
        assert "no engine has names" in str(error) or "container" in str(error), error
        return None


def written(plan: ConversionPlan) -> list[str]:
    return [name for layer in plan.layers if layer.layer >= 0 for name in layer.file.tensors]


def engines(plan: ConversionPlan) -> set[str]:
    return {reader.split()[0] for reader in plan.layout.readers}


def vllm_knows(name: str, model_type: str) -> bool:
    """Whether a loader of vLLM has the name of an expert tensor."""
    (family,) = (family for family in VLLM["families"] if model_type in family["model_types"])
    _, within = re.split(r"(?:layers|blocks)\.\d+\.", name)
    if not within.startswith(family["module"] + "."):
        return False
    leaf = within.removeprefix(family["module"] + ".")
    if any(fnmatch.fnmatchcase(leaf, fused) for fused in family.get("fused", ())):
        return True
    for matrix in family["matrices"]:
        module = matrix if "{expert}" in matrix else "{expert}." + matrix
        pattern = re.escape(module).replace(r"\{expert\}", r"\d+") + r"\.(\w+)"
        match = re.fullmatch(pattern, leaf)
        if match and match[1] in VLLM["suffixes"]:
            return True
    return False


@pytest.mark.slow
def test_vllm_maps_every_name_of_a_format_that_it_is_said_to_read():
    for checkpoint in one_of_each_kind():
        model_type = checkpoint.groups[-1].problem.model_type
        read = 0
        for target, container in FORMATS:
            plan = planned(checkpoint, target, container)
            if plan is not None and "vLLM" in engines(plan):
                read += 1
                unknown = [name for name in written(plan) if not vllm_knows(name, model_type)]
                assert unknown == [], (checkpoint.origin, target, container)
        assert read or model_type == "dbrx", checkpoint.origin


@cache
def renamings(model_type: str) -> tuple[list[Any], list[Any]]:
    """The renamings and converters of transformers for a model type."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_checkpoint_conversion_mapping(model_type) or []
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    return [t for t in transforms if not isinstance(t, WeightConverter)], converters


def transformers_name(name: str, model_type: str) -> str:
    """The parameter of the model into which transformers loads a tensor."""
    from transformers.core_model_loading import rename_source_key

    return str(rename_source_key(name, *renamings(model_type))[0])


def test_transformers_maps_every_name_of_a_format_that_it_is_said_to_read():
    pytest.importorskip("transformers", reason="a development dependency where Python is 3.11 or newer")
    for checkpoint in one_of_each_kind():
        model_type = checkpoint.groups[-1].problem.model_type
        for target, container in FORMATS:
            plan = planned(checkpoint, target, container)
            if plan is None or "transformers" not in engines(plan):
                continue
            for stored in written(plan):
                # Quantizers of transformers read a module's other tensors along with its weight.
                quantized = re.sub(r"(experts\.\d+\.\w+)\.\w+$", r"\1.weight", stored)
                parameter = transformers_name(quantized, model_type)
                merged = re.search(r"experts\.(gate_up_proj|up_proj|down_proj)(_\w+)?$", parameter)
                assert merged, (checkpoint.origin, target, container, stored, parameter)


def test_the_model_types_are_those_of_transformers():
    transformers = pytest.importorskip(
        "transformers", reason="a development dependency where Python is 3.11 or newer"
    )
    from transformers.core_model_loading import MergeModulelist
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert transformers.__version__.startswith("5.23.")
    merging = set()
    for model_type in CONFIG_MAPPING:
        types = {model_type}
        types |= {sub.model_type for sub in CONFIG_MAPPING[model_type].sub_configs.values() if _typed(sub)}
        converters = [converter for kind in types for converter in renamings(kind)[1]]
        if any(isinstance(op, MergeModulelist) for c in converters for op in c.operations):
            merging.add(model_type)
    assert merging - {"dots3_note_vision_encoder"} == TRANSFORMERS_PER_EXPERT
    assert set(CONFIG_MAPPING) >= TRANSFORMERS_FUSED


def _typed(config: Any) -> bool:
    return isinstance(getattr(config, "model_type", None), str)


GRANITE = {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
STEP = {
    "architectures": ["Step3TextForCausalLM"],
    "model_type": "step3_text",
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "share_expert_dim": 64,
    "norm_expert_weight": True,
    "moe_layers_enum": "0",
    "torch_dtype": "bfloat16",
}
FAMILIES = {
    "granitemoe": (
        GRANITE,
        "block_sparse_moe",
        {"input_linear": (128, 128), "output_linear": (128, 64)},
        "router.layer",
    ),
    "step3_text": (
        STEP,
        "moe",
        {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)},
        "gate",
    ),
    "step3p5": (
        {**STEP, "model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"]},
        "moe",
        {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)},
        "gate",
    ),
}


def family(folder: Path, name: str) -> Path:
    """A plain checkpoint of a family whose fused experts are in no module called experts."""
    config, module, matrices, router = FAMILIES[name]
    generator = torch.Generator().manual_seed(0)
    prefix = f"model.layers.0.{module}"
    tensors = {f"{prefix}.{router}.weight": torch.randn(4, 128, generator=generator)}
    for matrix, (n, k) in matrices.items():
        tensors[f"{prefix}.{matrix}.weight"] = torch.randn(4, n, k, generator=generator) / k**0.5
    if name == "step3p5":
        tensors[f"{prefix}.router_bias"] = torch.randn(4, generator=generator)
    folder.mkdir()
    save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("target", ["int4-g32", "nvfp4", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_with_names_of_its_own_is_read_again_with_its_router(name, target, tmp_path):
    source = open_checkpoint(family(tmp_path / "source", name))
    plan = plan_portable(source, PortableOptions(target))
    assert [n for n in written(plan) if not vllm_knows(n, name)] == []
    convert(plan, tmp_path / "out")
    assert verify_portable(tmp_path / "out").ok
    (again,) = open_checkpoint(tmp_path / "out").groups
    (before,) = source.groups
    assert again.names.router == before.names.router and again.names.router["weight"]
    assert again.problem.scheme.weight.name == PORTABLE[target].weight.name
    assert (again.problem.experts, again.problem.routing) == (before.problem.experts, before.problem.routing)


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_experts_decoded_or_kept_in_16_bits_keep_every_value(name, tmp_path):
    source = family(tmp_path / "source", name)
    convert(plan_portable(open_checkpoint(source), PortableOptions("bf16")), tmp_path / "out")
    before, after = contents(source), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("name", FAMILIES)
def test_gate_up_and_down_come_out_under_their_own_names(name, tmp_path):
    source = family(tmp_path / "source", name)
    convert(plan_portable(open_checkpoint(source), PortableOptions("fp8-channel")), tmp_path / "out")
    before, after = contents(source), contents(tmp_path / "out")
    prefix = f"model.layers.0.{FAMILIES[name][1]}."
    if name == "granitemoe":
        gate, up = before[f"{prefix}input_linear.weight"].chunk(2, dim=1)
        matrices = {"gate_proj": gate, "up_proj": up, "down_proj": before[f"{prefix}output_linear.weight"]}
    else:
        matrices = {m: before[f"{prefix}{m}.weight"] for m in ("gate_proj", "up_proj", "down_proj")}
    for matrix, weights in matrices.items():
        for expert, expected in enumerate(weights):
            if name == "step3_text":
                stored = f"{prefix}{matrix}"
                codes, scale = after[f"{stored}.weight"][expert], after[f"{stored}.weight_scale"][expert]
            else:
                stored = f"{prefix}experts.{expert}.{matrix}"
                codes, scale = after[f"{stored}.weight"], after[f"{stored}.weight_scale"]
            error = codes.float() * scale.float() - expected.float()
            assert error.norm() < 0.05 * expected.float().norm(), (matrix, expert)


def test_a_format_that_a_family_has_no_names_in_is_refused(tmp_path):
    dbrx = small("databricks/dbrx-instruct")
    with pytest.raises(UsageError, match=r"no engine has names for experts of dbrx .*mlp\.w1"):
        plan_portable(dbrx, PortableOptions("int4-g32"))
    step = open_checkpoint(family(tmp_path / "source", "step3_text"))
    with pytest.raises(UsageError, match=r"experts of step3_text .* in gptq\. .*--container"):
        plan_portable(step, PortableOptions("int4-g32", "gptq"))


@pytest.mark.parametrize("target, container, read", [("nvfp4", None, False), ("mxfp4", "native", True)])
def test_readers_of_gpt_oss_are_those_that_have_a_loader(target, container, read):
    plan = plan_portable(small("openai/gpt-oss-20b"), PortableOptions(target, container), experts_only=True)
    assert ("vLLM" in engines(plan)) is read
    assert plan.finalizer is not None and plan.finalizer.served is read
