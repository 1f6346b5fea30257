"""SGLang's names for what a checkpoint, a device and a deployment are."""

from __future__ import annotations

from ....environment import Device
from ....environment.variables import Variable
from ....problem.moe_problem import MoEProblem
from ...backend import SupportQuery, is_on
from ...gpu_archs import Arch, Archs, gfx, sm

SM90, SM100, SM110, SM120 = sm(90, 99), sm(100, 109), sm(110, 119), sm(120, 129)
BLACKWELL: Archs = (SM100, SM110, SM120)
GFX95 = gfx("gfx950")

USE_AITER = Variable("SGLANG_USE_AITER", "uses AITER's kernels on ROCm")
JIT_DEEP_GEMM = Variable("SGLANG_ENABLE_JIT_DEEPGEMM", "compiles and uses DeepGEMM's kernels", default="1")
VARIABLES = {variable.name: variable for variable in (USE_AITER, JIT_DEEP_GEMM)}

EXCHANGES = frozenset(
    {
        "deepep",
        "mooncake",
        "nixl",
        "mori",
        "flashinfer",
        "megamoe",
        "deepep_v2",
        "pplx",
        "flashinfer_megamoe",
    }
)
DEEPEP_LIKE = frozenset({"deepep", "mooncake", "nixl", "pplx"})
"""Exchanges with a low-latency mode in `DeepEPMoE`."""
AITER_EXCHANGES = frozenset({"none", "deepep", "mooncake", "nixl", "mori"})


def on(device: Device, *archs: Arch) -> bool:
    """True when `device` is in one of the sets."""
    return any(arch.fits(device) for arch in archs)


def exchange(ask: SupportQuery) -> str:
    """The all2all kernels; unlike vLLM's they need no data parallelism, and spread experts by themselves."""
    named = ask.problem.parallel.all2all
    return named if named in EXCHANGES else "none"


def uses_aiter(ask: SupportQuery) -> bool:
    """True on ROCm with AITER switched on."""
    return ask.device.platform == "rocm" and is_on(ask.packages, USE_AITER)


def has_deep_gemm(ask: SupportQuery) -> bool:
    """True when DeepGEMM's kernels are available: on CUDA devices from SM90 on."""
    return (
        ask.device.platform == "cuda"
        and ask.device.capability >= 90
        and ask.packages.has("deep_gemm")
        and is_on(ask.packages, JIT_DEEP_GEMM)
    )


def fp4_experts(problem: MoEProblem) -> bool:
    """True for MXFP4 experts of a checkpoint that is FP8 elsewhere (DeepSeek-V4)."""
    return problem.storage == "mxfp4"


def weight_only_nvfp4(problem: MoEProblem) -> bool:
    """True for ModelOpt's NVFP4 weights with 16-bit activations."""
    scheme = problem.scheme
    return problem.storage == "modelopt" and scheme.weight.name == "nvfp4" and scheme.act.name == "a16"


def quantization(problem: MoEProblem, device: Device) -> str:
    """The engine's name of the checkpoint's quantization; empty for none."""
    weight = problem.scheme.weight.name
    cuda = device.platform == "cuda"
    if problem.storage == "modelopt":
        mixed = weight_only_nvfp4(problem) or weight not in ("nvfp4", "fp8")
        return "modelopt_mixed" if mixed else {"nvfp4": "modelopt_fp4", "fp8": "modelopt_fp8"}[weight]
    if problem.storage == "fp8":
        return "mxfp8" if weight == "mxfp8" else "fp8"
    if problem.storage in ("gptq", "awq"):
        return f"{problem.storage}_marlin" if cuda else problem.storage
    named = {"plain": "", "gpt_oss": "mxfp4", "mxfp4": "fp8"}
    return named.get(problem.storage, problem.storage)


def dtype(problem: MoEProblem, device: Device) -> str:
    """The model's dtype; gpt-oss' MXFP4 checkpoints run in bfloat16."""
    return "bf16" if problem.storage == "gpt_oss" else problem.dtype


def activation(problem: MoEProblem) -> str:
    """The name that a model's module passes to its experts; clamps and factors are passed apart."""
    name = problem.activation.name
    return {"swigluoai": "silu", "gelu_tanh": "gelu"}.get(name, name)


def routing(problem: MoEProblem) -> str:
    """The routing method, by how scores are computed."""
    return problem.routing.scoring
