"""What changes between vLLM's releases did to users, as their threads measured it."""

from ...gpu_archs import SM10X, SM90
from ...reported_effects import ReportedEffect

REPORTS = (
    ReportedEffect(
        "0.20.0",
        "triton",
        "flashinfer_cutlass",
        (SM90,),
        "bf16",
        "vllm#41306: on 8 H200, one request at a time, Mixtral-8x7B took 59% longer to its first token and "
        "21% longer for each further one, DeepSeek-V2-Chat 23% and 5%",
    ),
    ReportedEffect(
        "0.23.0",
        "flashinfer_cutlass",
        "triton",
        (SM90,),
        "bf16",
        "vllm#44220 made Triton the default on Hopper again, after vllm#41306; vllm#54742 measured 2.7% to "
        "3.5% more throughput with FlashInfer's CUTLASS kernels for Qwen3-30B-A3B on an H100",
    ),
    ReportedEffect(
        "0.24.0",
        "flashinfer_cutlass",
        "flashinfer_trtllm",
        (SM10X,),
        "bf16",
        "vllm#53472: on 8 B200, Nemotron-3-Ultra-550B-A55B decoded 21% slower and prefilled 19% faster; "
        "--moe-backend flashinfer_cutlass recovered about 90%",
        lambda problem: not problem.activation.gated,
    ),
)
