"""What the field calls the kernels behind moectl's backends."""

KERNEL_NAMES: tuple[tuple[str, str], ...] = (
    ("grouped_gemm", "own Triton kernels"),
    ("marlin", "own Triton kernels, Marlin layout"),
    ("indexed", "Humming"),
    ("grouped_contiguous", "Humming, grouped"),
    ("moe_wna16_marlin_gemm", "vLLM Marlin"),
    ("matmul_ogs", "OpenAI triton_kernels"),
    ("fused_moe_kernel", "vLLM Triton"),
    ("cutlass_moe_mm", "vLLM CUTLASS"),
    ("cutlass_fused_moe", "FlashInfer CUTLASS"),
    ("logits", "FlashInfer TRT-LLM, routing fused"),
    ("ids and weights", "FlashInfer TRT-LLM"),
    ("m_grouped_gemm_nt_contiguous", "DeepGEMM"),
    ("m_grouped_gemm_nt_masked", "DeepGEMM, batched"),
    ("torch_grouped", "torch's grouped products"),
    ("moe_general_routing_inputs", "SonicMoE"),
    ("torch", "plain torch"),
    ("emulation", "emulation: dequantized to 16 bits"),
)
"""By prefix of the name of the experts; the first that matches counts."""
