"""Packages of external kernels that moectl's runners call, and how to locate them."""

from __future__ import annotations

from collections.abc import Mapping

from ..environment.package_probes import Probe

MARLIN_LIBRARY = "_moe_C*.so"
"""File name pattern of vLLM's library of MoE kernels, whose suffix depends on the build."""

CUTLASS_LIBRARY = "_C_stable_libtorch*.so"
"""File name pattern of vLLM's library of other kernels, with its CUTLASS GEMMs."""

TRITON_EXPERTS = "model_executor/layers/fused_moe"
"""Directory of vLLM's Triton experts in its package, with their tuned files in ``configs``."""

TRITON_KERNEL = "fused_moe_kernel"
"""Name of the kernel in ``fused_moe.py`` of that directory."""

TRITON_SYMBOL = ".".join((*TRITON_EXPERTS.split("/"), "fused_moe", TRITON_KERNEL))
"""The kernel's dotted name in vLLM's package."""

KERNEL_PACKAGES: Mapping[str, Probe] = {
    "flashinfer": Probe(
        ("flashinfer",),
        "flashinfer-python",
        symbols=(
            "cute_dsl.blockscaled_gemm.grouped_gemm_nt_masked",
            "cute_dsl.utils.convert_sf_to_mma_layout",
            "cute_dsl_fused_moe_nvfp4",
            "fp4_quantize",
            "nvfp4_block_scale_interleave",
            "scaled_fp4_grouped_quantize",
            "silu_and_mul_scaled_nvfp4_experts_quantize",
            "fused_moe.b12x_fused_moe",
            "fused_moe.cutlass_fused_moe",
            *(
                f"fused_moe.trtllm_{kind}_{form}"
                for kind in (
                    "bf16",
                    "fp4_block_scale",
                    "fp8_block_scale",
                    "fp8_per_tensor_scale",
                    "mxint4_block_scale",
                )
                for form in ("moe", "routed_moe")
            ),
            "tllm_enums.Situ",
        ),
        oldest="0.7.2",
        get="pip install flashinfer-python",
    ),
    "flashinfer_cubin": Probe(
        ("flashinfer_cubin",),
        "flashinfer-cubin",
        get="pip install flashinfer-cubin, in the version of flashinfer-python",
    ),
    "triton_kernels": Probe(
        ("triton_kernels", "vllm.third_party.triton_kernels"),
        marks=("matmul_ogs.py", "matmul.py"),
        own=("matmul_ogs.matmul_ogs", "routing.compute_expt_data"),
        get="comes with vLLM; its source is python/triton_kernels of github.com/triton-lang/triton",
        other="Kernelize AI's package of that name on PyPI",
    ),
    "humming": Probe(
        ("humming",),
        "humming-kernels",
        marks=("layer.py", "kernel", "ops"),
        symbols=("schema.HummingWeightSchema", "tune.get_heuristics_config"),
        own=("forward.humming_forward", "transform.transform_humming_tensors"),
        oldest="0.1.19",
        get="pip install humming-kernels",
        other="a package of that name that is not humming-kernels",
    ),
    "deep_gemm": Probe(
        ("deep_gemm", "vllm.third_party.deep_gemm"),
        "deep-gemm",
        symbols=("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
        own=("m_grouped_bf16_gemm_nt_contiguous",),
        get="comes with vLLM; its source is github.com/deepseek-ai/DeepGEMM",
    ),
    "sonicmoe": Probe(
        ("sonicmoe",),
        "sonic-moe",
        own=("moe_general_routing_inputs",),
        oldest="0.1.2",
        get="pip install sonic-moe",
    ),
    "vllm": Probe(
        ("vllm",),
        "vllm",
        own=(MARLIN_LIBRARY, CUTLASS_LIBRARY, TRITON_SYMBOL),
        get="pip install vllm==0.33.0",
    ),
}
"""Probes by the package's name in `Packages`."""
