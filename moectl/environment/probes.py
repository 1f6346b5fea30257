"""Optional packages that decide on backends: how to tell each from others, and what it must hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """Where a package may be installed, and what must be in its source files.

    Attributes:
        modules: importable names, the engine's bundled copy last.
        distribution: name of its metadata.
        marks: files of which the real package has at least one; empty: any package of the name.
        symbols: dotted names that are looked for.
        own: what this tool's own runners look for and engines do without: symbols, and patterns of
            library files (``*.so``).
        serves: what it is for, in a few words.
        get: how to install it.
        other: who publishes another package of the same name, where there is one.
    """

    modules: tuple[str, ...]
    distribution: str = ""
    marks: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    serves: str = ""
    get: str = ""
    other: str = ""


MARLIN_LIBRARY = "_moe_C*.so"
"""vLLM's library of MoE kernels, whose name tells how it was built."""

PROBES: dict[str, Probe] = {
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
        serves="TRT-LLM, CUTLASS and CuteDSL kernels",
        get="pip install flashinfer-python",
    ),
    "flashinfer_cubin": Probe(
        ("flashinfer_cubin",),
        "flashinfer-cubin",
        serves="FlashInfer's compiled kernels",
        get="pip install flashinfer-cubin, in the version of flashinfer-python",
    ),
    "triton_kernels": Probe(
        ("triton_kernels", "vllm.third_party.triton_kernels"),
        marks=("matmul_ogs.py", "matmul.py"),
        own=("matmul_ogs.matmul_ogs", "routing.compute_expt_data"),
        serves="OpenAI's Triton kernels for MXFP4",
        get="comes with vLLM; its source is python/triton_kernels of github.com/triton-lang/triton",
        other="Kernelize AI's package of that name on PyPI",
    ),
    "deep_gemm": Probe(
        ("deep_gemm", "vllm.third_party.deep_gemm"),
        "deep-gemm",
        symbols=("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
        serves="FP8 and FP4 GEMMs",
        get="comes with vLLM; its source is github.com/deepseek-ai/DeepGEMM",
    ),
    "humming": Probe(
        ("humming",),
        "humming-kernels",
        marks=("layer.py", "kernel", "ops"),
        symbols=("schema.HummingWeightSchema", "tune.get_heuristics_config"),
        own=("forward.humming_forward", "transform.transform_humming_tensors"),
        serves="weight-only and 8-bit GEMMs",
        get="pip install humming-kernels",
        other="a package of that name that is not humming-kernels",
    ),
    "deep_ep": Probe(
        ("deep_ep",),
        "deep-ep",
        symbols=("Buffer",),
        serves="token exchange",
        get="build github.com/deepseek-ai/DeepEP",
    ),
    "aiter": Probe(
        ("aiter",),
        "amd-aiter",
        symbols=("fused_moe.fused_moe", "ops.shuffle.shuffle_weight"),
        serves="AMD's kernels",
        get="build github.com/ROCm/aiter",
    ),
    "quark": Probe(
        ("quark",), "amd-quark", ("torch",), serves="emulation of MX formats", get="pip install amd-quark"
    ),
    "b12x": Probe(("b12x",), "b12x", serves="FP4 kernels for SM12x", get="pip install b12x"),
    "hpc": Probe(
        ("hpc",),
        symbols=("fuse_moe", "fuse_moe_blockwise"),
        serves="FP8 kernels for Hopper",
        get="build github.com/Tencent/hpc-ops",
    ),
    "vllm": Probe(
        ("vllm",),
        "vllm",
        own=(MARLIN_LIBRARY,),
        serves="Marlin's MoE kernels, called without the engine",
        get="pip install vllm==0.33.0",
    ),
    "zentorch": Probe(("zentorch",), "zentorch", serves="AMD CPU kernels", get="pip install zentorch"),
}
"""Optional packages that decide, by the name under which `Packages` lists them."""

TOOLS = ("nvcc", "ninja")
"""Programs that compile kernels when they are first called."""
