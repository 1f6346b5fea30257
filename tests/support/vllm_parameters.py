"""A layer's parameters from vLLM's own loading and repacking, and from a converted directory, compared.

Run by the interpreter of an environment with vLLM 0.33's Python, on any machine: vLLM is told that this is a
GPU of the given capability, and its CUDA operators for repacking are its own references in torch. Prints one
JSON object: the kernel's class, and by parameter what differs.

usage: vllm_parameters.py CHECKPOINT DIRECTORY CAPABILITY BACKEND
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_HAS_FLASHINFER_CUBIN": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_TARGET_DEVICE": "empty",
}

import torch

LIBRARIES = (
    *("vllm._C", "vllm._moe_C", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._qutlass_C"),
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
)
"""Compiled modules, which do not load without a GPU's driver."""

HOST_QUERIES = {
    "cutlass_group_gemm_supported": range(90, 120),
    "cutlass_scaled_mm_supports_fp8": range(89, 200),
    "cutlass_scaled_mm_supports_block_fp8": range(90, 200),
    "cutlass_scaled_mm_supports_fp4": range(100, 130),
    "mxfp4_experts_quant_supported": range(100, 120),
}
"""Operators that answer whether a capability is supported, and where they say yes."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pretend(capability: tuple[int, int]) -> torch.library.Library:
    """Make vLLM believe in a GPU of `capability`, with its references for CUDA operators."""
    for name in LIBRARIES:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    operators = torch.library.Library("_C", "FRAGMENT")
    for name, supported in HOST_QUERIES.items():
        operators.define(f"{name}(int cuda_device_capability) -> bool")
        operators.impl(
            name, lambda given, supported=supported: given in supported, "CompositeExplicitAutograd"
        )
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Pretended(NonNvmlCudaPlatform):
        device_type = "cpu"
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 141 << 30)

    platforms._current_platform = Pretended()
    torch.cuda.get_device_capability = lambda *device: capability
    torch.accelerator.current_device_index = lambda: torch.device("cpu")
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test as reference
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_cols

    def marlin(codes: torch.Tensor, k: int, n: int, bits: int) -> torch.Tensor:
        return reference.marlin_weights(codes, k, n, bits, reference.get_weight_perm(bits))

    def gptq(words: torch.Tensor, k: int, n: int, bits: int, is_a_8bit: bool) -> torch.Tensor:
        assert not is_a_8bit
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
        codes = (words[:, None] >> shifts) & (2**bits - 1)
        return marlin(codes.reshape(k, n), k, n, bits)

    def awq(words: torch.Tensor, k: int, n: int, bits: int, is_a_8bit: bool) -> torch.Tensor:
        assert not is_a_8bit and bits == 4
        codes = unpack_cols(words, bits, k, n)
        order = torch.tensor(AWQ_ORDER).argsort()
        return marlin(codes.reshape(-1, 8)[:, order].reshape(k, n).contiguous(), k, n, bits)

    sizes = "SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit"
    for name, function in (("gptq_marlin_repack", gptq), ("awq_marlin_repack", awq)):
        operators.define(f"{name}(Tensor b_q_weight, {sizes}) -> Tensor")
        operators.impl(name, function, "CPU")
    from vllm.utils.import_utils import has_triton_kernels

    if has_triton_kernels():
        import triton_kernels.target_info
        import triton_kernels.tensor_details.layout

        for module in (triton_kernels.target_info, triton_kernels.tensor_details.layout):
            module.cuda_capability_geq = lambda major, minor=0: capability >= (major, minor)
    return operators


def reference_flashinfer() -> None:
    """Stand in for the operators of FlashInfer that vLLM repacks with, which are CUDA code."""
    import flashinfer.fp4_quantization
    import flashinfer.fused_moe

    from support import flashinfer_reference

    for name in flashinfer_reference.OPERATORS:
        for module in (flashinfer, flashinfer.fused_moe, flashinfer.fp4_quantization):
            if hasattr(module, name):
                setattr(module, name, getattr(flashinfer_reference, name))


def reference_humming(capability: tuple[int, int]) -> None:
    """Have Humming's Python run on a CPU, with references for its operators."""
    import vllm.utils.humming

    from support import humming_reference

    humming_reference.install(capability)
    vllm.utils.humming.num_compute_units = lambda *device: 132


def config_of(backend: str) -> Any:
    """vLLM's config of a model without anything but experts."""
    from vllm.config import VllmConfig
    from vllm.config.device import DeviceConfig

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.kernel_config.moe_backend = backend
    model = types.SimpleNamespace(
        quantization_config=None,
        dtype=torch.bfloat16,
        hf_config=types.SimpleNamespace(),
        hf_text_config=types.SimpleNamespace(),
        quantization=None,
        enforce_eager=True,
        is_moe=True,
    )
    object.__setattr__(config, "model_config", model)
    return config


def built(published: dict[str, Any], quantization: Any, number: int) -> Any:
    """vLLM's layer of experts, as the model of a checkpoint with the config `published` builds it."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    get_current_vllm_config().compilation_config.static_forward_context.clear()
    text = published.get("text_config", published)
    gpt_oss = published["model_type"] == "gpt_oss"
    special = {"has_bias": True, "activation": "swigluoai", "routed_experts_cls": GptOssRoutedExperts}
    experts = text.get("num_local_experts") or text.get("num_experts") or text["n_routed_experts"]
    inner = (
        text["intermediate_size"] if gpt_oss else text.get("moe_intermediate_size", text["intermediate_size"])
    )
    prefix = f"model.layers.{number}.mlp.experts"
    return FusedMoEFactory(
        num_experts=experts,
        top_k=text["num_experts_per_tok"],
        hidden_size=text["hidden_size"],
        intermediate_size=inner,
        quant_config=quantization,
        prefix=prefix,
        params_dtype=torch.bfloat16,
        **(special if gpt_oss else {}),
    ).routed_experts


SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w3": "w3", "w2": "w2"}
FUSED = {"gate_up_proj": "w13", "down_proj": "w2"}
KINDS = {"_blocks": "_weight", "_scales": "_weight_scale", "_bias": "_bias"}


def load(layer: Any, tensors: dict[str, torch.Tensor], number: int) -> None:
    """Give a layer its published tensors as vLLM's models do, by the parameters' own loaders."""
    for name, tensor in tensors.items():
        if f".layers.{number}." not in f".{name}" or ".experts." not in name:
            continue
        parts = name.split(".experts.")[1].split(".")
        if len(parts) == 1:
            matrix, kind = parts[0].rsplit("_", 1)
            own = FUSED[matrix] + KINDS[f"_{kind}"]
            given = tensor.flatten(2) if kind == "blocks" else tensor
            parameter = getattr(layer, own)
            parameter.weight_loader(parameter, given, weight_name=own, shard_id=None, expert_id=None)
        elif parts[2] not in ("g_idx", "bias"):
            expert, shard = int(parts[0]), SHARDS[parts[1]]
            own = f"{'w2' if shard == 'w2' else 'w13'}_{parts[2]}"
            if not hasattr(layer, own):
                own = own.removesuffix("_inv")  # as the model's own mapper of names does
            parameter = getattr(layer, own)
            parameter.weight_loader(parameter, tensor, own, shard_id=shard, expert_id=expert)


UNREAD = ("_weight_shape", "_qzeros")
"""Ends of names of parameters that vLLM loads and no kernel reads; zero points where there are some."""


def values(layer: Any) -> dict[str, torch.Tensor]:
    """What the kernel of a loaded layer reads, by name: parameters, and storages of wrapped tensors."""
    unread = UNREAD if layer.quant_method.moe_quant_config.w1_zp is None else UNREAD[:1]
    parameters = layer.named_parameters(recurse=False)
    found = {name: tensor.data for name, tensor in parameters if not name.endswith(unread)}
    for name in ("humming_configs", "weight_schemas", "input_schemas"):
        for half, made in getattr(layer, name, {}).items():
            # Some loaders leave out the dtype of scales, which the config has.
            told = replace(made, bs_dtype=None) if name == "weight_schemas" else made
            found[f"{half} of {name}"] = torch.tensor(list(repr(told).encode()), dtype=torch.uint8)
    for half in ("w13", "w2"):
        weight = getattr(layer, f"{half}_weight")
        if isinstance(weight, torch.Tensor):
            found[f"{half}_weight"] = weight.data
            continue
        scale = getattr(layer.quant_method, f"{half}_precision_config").weight_scale
        for name, wrapped in ((f"{half}_weight", weight), (f"{half}_weight_scale", scale)):
            found[name] = wrapped.storage.data
            shape = [*wrapped.shape, *wrapped.storage.layout.__dict__.get("shape", ())]
            found[f"{name} as {type(wrapped.storage.layout).__name__} of {wrapped.dtype}"] = torch.tensor(
                shape
            )
    return found


def difference(own: torch.Tensor | None, ours: torch.Tensor | None) -> str:
    """How two tensors differ; empty when they are equal in shape, strides, dtype and bytes."""
    if own is None or ours is None:
        return "only vLLM has it" if ours is None else "only moectl has it"
    forms = [(tuple(t.shape), t.stride(), t.dtype) for t in (own, ours)]
    if forms[0] != forms[1]:
        return f"vLLM {forms[0]}, moectl {forms[1]}"
    different = (own.contiguous().view(torch.uint8) != ours.contiguous().view(torch.uint8)).sum().item()
    return f"{different} bytes" if different else ""


def main(checkpoint: Path, directory: Path, capability: str, backend: str) -> None:
    kept = pretend((int(capability[:-1]), int(capability[-1])))
    if "flashinfer" in backend:
        reference_flashinfer()
    if backend == "humming":
        reference_humming((int(capability[:-1]), int(capability[-1])))
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.quantization import get_quantization_config

    import moectl.integrations.vllm

    moectl.integrations.vllm.register()
    published = json.loads((checkpoint / "config.json").read_text())
    hf_config = types.SimpleNamespace(model_type=published["model_type"])
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MOECTL_TEST_PORT", "29555")}
    with set_current_vllm_config(config_of(backend)):
        init_distributed_environment(1, 0, "env://", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        converted = json.loads((directory / "config.json").read_text())
        prepared = get_quantization_config("moectl").from_config(converted["quantization_config"])
        prepared.maybe_update_config(str(directory), hf_config=hf_config)
        number = min(prepared.experts.layers)
        prepared.inner.packed_modules_mapping = {}
        own = built(published, prepared.inner, number)
        load(own, tensors, number)
        own.quant_method.process_weights_after_loading(own)
    with set_current_vllm_config(config_of("auto")):
        ours = built(published, prepared, number)
        allocated = sum(parameter.numel() for parameter in ours.parameters())
        ours.quant_method.process_weights_after_loading(ours)
    first, second = values(own), values(ours)
    differences = {
        name: difference(first.get(name), second.get(name)) for name in first.keys() | second.keys()
    }
    kernels = [type(layer.quant_method.moe_kernel.fused_experts).__name__ for layer in (own, ours)]
    methods = [type(layer.quant_method).__name__ for layer in (own, ours)]
    print(
        json.dumps(
            {"kernels": kernels, "methods": methods, "allocated": allocated, "differences": differences}
        )
    )
    del kept


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
