"""Random cells that no list of published models suggests: odd sizes, every format, layouts, requests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

Table = dict[str, Any]

HIDDEN = (
    256,
    320,
    512,
    704,
    1024,
    1088,
    1600,
    2048,
    2112,
    2880,
    3072,
    4096,
    5120,
    6144,
    7168,
    7200,
    8192,
    9216,
)
PER_RANK = (
    32,
    48,
    64,
    80,
    96,
    128,
    160,
    176,
    192,
    256,
    320,
    384,
    512,
    704,
    768,
    1024,
    1536,
    2048,
    2880,
    3584,
)
"""Intermediate sizes of one rank: a layer that is sliced has a multiple of one."""
EXPERTS = (8, 16, 24, 32, 40, 60, 64, 72, 96, 128, 160, 192, 256, 288, 384, 512, 1040)
ACTIVATIONS = (
    *("silu",) * 8,
    *("swigluoai", "swigluoai", "swigluoai_uninterleave", "gelu", "gelu_tanh", "relu2_no_mul"),
    *("silu_no_mul", "gelu_no_mul", "swiglustep"),
)
MODEL_TYPES = (*("",) * 6, "gpt_oss", "qwen3_5_moe_text", "deepseek_v3", "kolibri1")
ROUTINGS: tuple[Table, ...] = (
    *({"scoring_func": "softmax", "renormalize": True},) * 3,
    {"scoring_func": "softmax", "renormalize": False},
    {"scoring_func": "sigmoid", "renormalize": True},
    {"scoring_func": "sigmoid", "renormalize": False},
    {"scoring_func": "sigmoid", "renormalize": True, "e_bias": True},
    {"scoring_func": "sqrtsoftplus", "renormalize": True, "e_bias": True},
)
REQUESTS = (
    *("triton", "marlin", "humming", "cutlass", "deep_gemm", "flashinfer_trtllm", "flashinfer_cutlass"),
    *("flashinfer_cutedsl", "flashinfer_b12x", "b12x", "aiter", "emulation", "hpc", "rdna3", "xpu", "cpu"),
    *("triton_unfused", "flashinfer_trtllm_afp8", "flashinfer_cutlass_afp8", "batched_triton", "nonsense"),
    *("flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm", "aiter_mxfp4_fp8", "flydsl"),
)
DEVICES: dict[str, Table] = {
    "a100": {"kind": "cuda", "cc": [8, 0], "name": "NVIDIA A100-SXM4-80GB", "mem": 80},
    "l40s": {"kind": "cuda", "cc": [8, 9], "name": "NVIDIA L40S", "mem": 48},
    "h100": {"kind": "cuda", "cc": [9, 0], "name": "NVIDIA H100 80GB HBM3", "mem": 80},
    "b200": {"kind": "cuda", "cc": [10, 0], "name": "NVIDIA B200", "mem": 180},
    "b300": {"kind": "cuda", "cc": [10, 3], "name": "NVIDIA B300 SXM6 AC", "mem": 270},
    "thor": {"kind": "cuda", "cc": [11, 0], "name": "NVIDIA Thor", "mem": 128},
    "rtx": {"kind": "cuda", "cc": [12, 0], "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "mem": 96},
    "t4": {"kind": "cuda", "cc": [7, 5], "name": "Tesla T4", "mem": 16},
    "mi300x": {"kind": "rocm", "gfx": "gfx942", "name": "AMD_Instinct_MI300X", "mem": 192},
    "mi355x": {"kind": "rocm", "gfx": "gfx950", "name": "AMD Instinct MI355X", "mem": 288},
    "cpu": {"kind": "cpu", "amx": True, "name": "cpu", "mem": 256},
}
FULL = ("flashinfer", "triton_kernels", "deep_gemm", "humming", "deep_ep")
CUBIN = {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
PROFILES: dict[str, Table] = {
    "full": {"packages": [*FULL], "env": CUBIN},
    "optional": {"packages": [*FULL, "quark", "b12x", "hpc"], "env": CUBIN},
    "plain": {"packages": ["triton_kernels", "deep_ep"], "env": {}},
    "gemm_on": {"packages": [*FULL], "env": {**CUBIN, "VLLM_USE_DEEP_GEMM": "1"}},
    "moe_gemm_off": {"packages": [*FULL], "env": {**CUBIN, "VLLM_MOE_USE_DEEP_GEMM": "0"}},
    "invariant": {"packages": [*FULL], "env": {**CUBIN, "VLLM_BATCH_INVARIANT": "1"}},
    "indexed": {
        "packages": [*FULL],
        "env": {**CUBIN, "VLLM_HUMMING_MOE_GEMM_TYPE": "indexed", "VLLM_USE_FLASHINFER_MOE_INT4": "1"},
    },
    "grouped": {
        "packages": [*FULL, "b12x"],
        "env": {**CUBIN, "VLLM_HUMMING_MOE_GEMM_TYPE": "grouped", "VLLM_B12X_MOE_FP4_FORCE_A16": "1"},
    },
    "rocm": {"packages": ["triton_kernels", "aiter", "deep_ep"], "env": {}},
    "aiter": {"packages": ["triton_kernels", "aiter", "quark"], "env": {"VLLM_ROCM_USE_AITER": "1"}},
    "aiter_off": {
        "packages": ["triton_kernels", "aiter"],
        "env": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "0"},
    },
    "none": {"packages": [], "env": {}},
}
RUNS: tuple[tuple[str, str], ...] = (
    *((device, "full") for device in DEVICES if DEVICES[device]["kind"] == "cuda"),
    *(("h100", name) for name in ("optional", "plain", "gemm_on", "moe_gemm_off", "invariant", "indexed")),
    *(("b200", name) for name in ("optional", "plain", "gemm_on", "moe_gemm_off", "invariant", "indexed")),
    *(("h100", "grouped"), ("b200", "grouped"), ("rtx", "grouped"), ("rtx", "optional"), ("l40s", "indexed")),
    *(("rtx", "invariant"), ("rtx", "moe_gemm_off"), ("a100", "invariant"), ("l40s", "plain")),
    *((device, name) for device in ("mi300x", "mi355x") for name in ("rocm", "aiter", "aiter_off")),
    ("cpu", "none"),
)
PARALLEL: dict[str, Table] = {
    f"tp{tp}_dp{dp}{'_ep' if ep else ''}{'_' + a2a if a2a else ''}{'_eplb' if eplb else ''}": {
        "tp": tp,
        "dp": dp,
        "ep": ep,
        "a2a": a2a or "allgather_reducescatter",
        "eplb": eplb,
    }
    for tp, dp, ep, a2a, eplb in (
        *((tp, 1, False, "", False) for tp in (1, 2, 4, 8)),
        *((tp, 1, True, "", eplb) for tp in (2, 8) for eplb in (False, True)),
        *(
            (1, 2, False, "", False),
            (2, 2, False, "", False),
            (1, 4, True, "", True),
            (2, 4, True, "", False),
        ),
        *((1, 8, True, a2a, False) for a2a in ("", "deepep_high_throughput", "deepep_low_latency")),
        *((2, 2, True, a2a, False) for a2a in ("flashinfer_nvlink_one_sided", "")),
        (1, 4, True, "flashinfer_nvlink_two_sided", False),
        (2, 2, True, "deepep_low_latency", True),
    )
}


def _compressed(weights: Table, inputs: Table | None, form: str) -> Table:
    shared = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "symmetric": True, "observer": "minmax", "observer_kwargs": {}, **weights},
        "input_activations": inputs and {**shared, "symmetric": True, "observer": None, **inputs},
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _ints() -> list[Table]:
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    found = [_compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, token, "int-quantized")]
    for bits in (4, 8):
        for size in (32, 64, 128):
            for symmetric in (True, False):
                row = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size}
                found.append(_compressed({**row, "symmetric": symmetric}, None, "pack-quantized"))
        channel = {"num_bits": bits, "type": "int", "strategy": "channel"}
        found.append(_compressed(channel, None, "pack-quantized"))
    row = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    found += [
        _compressed({**row, "actorder": order}, None, "pack-quantized") for order in ("weight", "group")
    ]
    found.append(_compressed(row, fp8, "pack-quantized"))
    found.append(_compressed({"num_bits": 4, "type": "int", "strategy": "channel"}, token, "pack-quantized"))
    for bits in (4, 8):
        for size in (-1, 32, 64, 128):
            gptq = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": True, "lm_head": False}
            found += [{**gptq, "desc_act": act, "dynamic": {}} for act in (False, True)]
    found.append({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False})
    for size in (32, 64, 128):
        for zeros in (True, False):
            awq = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
            found.append({**awq, "zero_point": zeros, "modules_to_not_convert": None})
    return found


def _floats() -> list[Table]:
    fp8 = {"num_bits": 8, "type": "float"}
    token = {**fp8, "strategy": "token", "dynamic": True}
    group = {**fp8, "strategy": "group", "group_size": 128, "dynamic": True}
    block = {**fp8, "strategy": "block", "block_structure": [128, 128]}
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    mxfp4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    mxfp8 = {**fp8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    found: list[Table] = [{"quant_method": "fp8", "activation_scheme": act} for act in ("dynamic", "static")]
    for edges in ([128, 128], [128, 128], [64, 64], [64, 128]):
        found.append({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": edges})
    found += [
        _compressed(block, group, "float-quantized"),
        _compressed({**block, "block_structure": [64, 64]}, group, "float-quantized"),
        _compressed({**fp8, "strategy": "tensor"}, {**fp8, "strategy": "tensor"}, "float-quantized"),
        _compressed(
            {**fp8, "strategy": "tensor"}, {**fp8, "strategy": "tensor", "dynamic": True}, "float-quantized"
        ),
        _compressed({**fp8, "strategy": "channel"}, token, "float-quantized"),
        _compressed({**fp8, "strategy": "channel"}, {**fp8, "strategy": "tensor"}, "float-quantized"),
        _compressed({**fp8, "strategy": "channel"}, None, "float-quantized"),
        _compressed(nvfp4, {**nvfp4, "dynamic": "local"}, "nvfp4-pack-quantized"),
        _compressed(nvfp4, None, "nvfp4-pack-quantized"),
        _compressed(nvfp4, token, "nvfp4-pack-quantized"),
        _compressed(mxfp4, {**mxfp4, "dynamic": True}, "mxfp4-pack-quantized"),
        _compressed(mxfp4, None, "mxfp4-pack-quantized"),
        _compressed(mxfp4, token, "mxfp4-pack-quantized"),
        _compressed(mxfp8, {**mxfp8, "dynamic": True}, "mxfp8-quantized"),
        {"quant_method": "mxfp4"},
        {"quant_method": "mxfp4"},
        {"quant_method": "mxfp4"},
    ]
    modelopt: Table = {"quant_method": "modelopt", "ignore": [], "kv_cache_quant_algo": None}
    for name in ("FP8", "NVFP4", "NVFP4", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4"):
        more = {"group_size": 16} if "NVFP4" in name else {}
        found.append({**modelopt, "quant_algo": name, **more, "producer": {"name": "modelopt"}})
    return found


def _quark() -> list[Table]:
    def spec(dtype: str, scheme: str, size: int | None = None, dynamic: bool = False) -> Table:
        return {
            "dtype": dtype,
            "is_dynamic": dynamic,
            "qscheme": scheme,
            "group_size": size,
            "ch_axis": {"per_group": -1, "per_channel": 0}.get(scheme),
            "symmetric": True,
            "scale_format": "e8m0" if dtype == "fp4" else None,
            "scale_type": "float",
            "round_method": "half_even",
            "observer_cls": "PerBlockMXObserver" if dtype == "fp4" else "PerTensorMinMaxObserver",
        }

    fp4, tensor = spec("fp4", "per_group", 32), spec("fp8_e4m3", "per_tensor")
    pairs: list[tuple[Table, Table | None]] = [
        (fp4, None),
        (fp4, {**fp4, "is_dynamic": True}),
        (fp4, tensor),
        (fp4, {**tensor, "is_dynamic": True}),
        (tensor, tensor),
        (tensor, {**tensor, "is_dynamic": True}),
        (spec("fp8_e4m3", "per_channel"), spec("fp8_e4m3", "per_channel", dynamic=True)),
    ]
    return [
        {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "global_quant_config": {
                "weight": weight,
                "input_tensors": act,
                "output_tensors": None,
                "bias": None,
            },
            "layer_type_quant_config": {},
            "layer_quant_config": {},
            "exclude": ["lm_head"],
            "algo_config": None,
            "kv_cache_quant_config": {},
            "softmax_quant_spec": None,
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "order",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }
        for weight, act in pairs
    ]


def _model(dice: random.Random, ranks: int) -> Table:
    routing = dict(dice.choice(ROUTINGS))
    experts = dice.choice(EXPERTS)
    model = {
        "model_type": dice.choice(MODEL_TYPES),
        "E": experts,
        "hidden": dice.choice(HIDDEN),
        "inter": dice.choice(PER_RANK) * ranks,
        "topk": dice.randint(1, 10 if experts >= 16 else 4),
        "activation": dice.choice(ACTIVATIONS),
        "has_bias": dice.random() < 0.15,
        "routing": routing,
    }
    if routing.get("e_bias") and routing["scoring_func"] == "sigmoid" and dice.random() < 0.6:
        groups = dice.choice([1, 4, 8])
        routing |= {"use_grouped_topk": True, "num_expert_group": groups, "topk_group": max(1, groups // 2)}
        routing["routed_scaling_factor"] = 2.5
    if model["activation"] == "silu" and dice.random() < 0.1:
        routing["swiglu_limit"] = dice.choice([7.0, 10.0])
    if dice.random() < 0.2:
        routing["router_dtype"] = "fp32"
    return model


def random_cells(seed: int, count: int) -> tuple[Table, list[Table]]:
    """A grid of random tables, and `count` cells of it; equal arguments give equal ones."""
    dice = random.Random(seed)
    schemes: Mapping[str, Any] = {
        "plain": None,
        **{f"float-{number}": config for number, config in enumerate(_floats())},
        **{f"int-{number}": config for number, config in enumerate(_ints())},
        **{f"quark-{number}": config for number, config in enumerate(_quark())},
    }
    families = [[name for name in schemes if name.startswith(start)] for start in ("float", "int", "quark")]
    models: Table = {}
    cells = []
    for number in range(count):
        device, profile = dice.choice(RUNS)
        deployed = dice.choice(list(PARALLEL))
        row = PARALLEL[deployed]
        models[f"m{number}"] = _model(dice, 1 if row["ep"] else row["tp"] * row["dp"])
        scheme = "plain" if dice.random() < 0.1 else dice.choice(dice.choices(families, (6, 4, 1))[0])
        if models[f"m{number}"]["model_type"] == "gpt_oss" and dice.random() < 0.5:
            scheme = next(name for name, config in schemes.items() if config == {"quant_method": "mxfp4"})
        if models[f"m{number}"]["routing"]["scoring_func"] == "sqrtsoftplus":
            scheme = "plain"  # DeepSeek-V4's own class stands for it where experts are quantized.
        cells.append(
            {
                "scheme": scheme,
                "model": f"m{number}",
                "device": device,
                "profile": profile,
                "parallel": deployed,
                "forced": dice.choice(REQUESTS) if dice.random() < 0.3 else None,
            }
        )
    grid = {
        "MODELS": models,
        "SCHEMES": {name: [config, []] for name, config in schemes.items()},
        "DEVICES": DEVICES,
        "PROFILES": PROFILES,
        "PARALLEL": PARALLEL,
    }
    return grid, cells
