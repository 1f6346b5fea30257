"""The first stage: what SGLang's server arguments become before any layer is created.

A model's own defaults come first, then those of the quantization, then the exchange. A runner that is
named on the command line is kept, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ....problem.moe_problem import MoEProblem
from ...backend import SupportQuery
from ...gpu_archs import CPU, Archs, sm
from ...server_arguments import ServerArguments
from .terms import (
    GFX95,
    SM90,
    SM100,
    SM110,
    SM120,
    exchange,
    fp4_experts,
    on,
    quantization,
    uses_aiter,
    weight_only_nvfp4,
)

RUNNERS = frozenset(
    {
        "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "experimental_sgl_trtllm",
        "flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl",
        "flashinfer_megamoe", "cutlass", "aiter", "marlin", "humming", "experimental_sgl_marlin", "hpc_ops",
        "megamoe",
    }
)  # fmt: skip
"""Names of `--moe-runner-backend`, without those of LoRA adapters and of other vendors."""

QWEN3 = frozenset(
    {
        "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
    }
)  # fmt: skip
LONGCAT = frozenset({"LongcatFlashForCausalLM", "LongcatFlashForCausalLMNextN"})
DEEPSEEK = LONGCAT | {
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM", "PixtralForConditionalGeneration", "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration", "HYV4ForCausalLM", "HYV4ForCausalLMNextN", "Dots3NoteForCausalLM",
}  # fmt: skip
NEMOTRON = frozenset({"NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3"})
MINIMAX_M3 = frozenset({"MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM"})
MEGA_MODELS = NEMOTRON - {"NemotronH_Omni_Reasoning_V3"} | {
    "BeamForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM", "KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM",
}  # fmt: skip
"""Architectures that FlashInfer's MegaMoE is validated for."""
DEEPEP_V2_MODELS = frozenset(
    {"DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM", "Qwen3MoeForCausalLM"}
)
_MODELOPT = frozenset({"modelopt_fp4", "modelopt_fp8", "modelopt_mixed"})
_HOPPER_TO_GEFORCE: Archs = (SM90, SM100, SM120)


@dataclass(frozen=True, slots=True)
class ModelDefault:
    """A model's default runner: the first row that matches applies.

    `quantizations`: the engine's names of a checkpoint's quantization, ``""`` for none; None: any.
    `alone`: only without an exchange.
    """

    models: frozenset[str]
    runner: str
    where: Archs | None = None
    quantizations: frozenset[str] | None = None
    alone: bool = True
    when: Callable[[SupportQuery], bool] = lambda ask: True

    def fits(self, ask: SupportQuery) -> bool:
        """True when this default applies to `ask`."""
        found = quantization(ask.problem, ask.device)
        return (
            ask.model.architecture in self.models
            and (self.where is None or on(ask.device, *self.where))
            and (self.quantizations is None or found in self.quantizations)
            and not (self.alone and exchange(ask) != "none")
            and self.when(ask)
        )


def _named(*names: str) -> frozenset[str]:
    return frozenset(names)


def _kimi_int4(ask: SupportQuery) -> bool:
    weight = ask.problem.scheme.weight
    return ask.problem.storage == "compressed-tensors" and weight.name == "int4" and weight.group == 32


_GPT = _named("GptOssForCausalLM")
DEFAULTS: tuple[ModelDefault, ...] = (
    ModelDefault(_GPT, "flashinfer_mxfp4", (SM100, SM120), _named("mxfp4"), alone=False),
    ModelDefault(_GPT, "", None, _named("mxfp4"), alone=False, when=uses_aiter),
    ModelDefault(_GPT, "triton", None, alone=False, when=uses_aiter),
    ModelDefault(
        _GPT,
        "triton_kernel",
        alone=False,
        when=lambda ask: (
            not ask.problem.parallel.ep
            and ask.packages.has("triton_kernels")
            and not (on(ask.device, CPU) and "amx" in ask.device.features)
        ),
    ),
    ModelDefault(QWEN3, "marlin", (SM100,), alone=False, when=lambda ask: weight_only_nvfp4(ask.problem)),
    ModelDefault(QWEN3, "flashinfer_trtllm", (SM100,), _named("", "fp8", "modelopt_fp4", "modelopt_mixed")),
    ModelDefault(DEEPSEEK - LONGCAT, "flashinfer_trtllm", (SM100,), _MODELOPT | {"", "fp8"}),
    ModelDefault(DEEPSEEK - LONGCAT, "flashinfer_trtllm", (SM100,), when=_kimi_int4),
    ModelDefault(_named("Glm4MoeForCausalLM"), "flashinfer_trtllm", (SM100,), _named("", "modelopt_fp4")),
    ModelDefault(
        _named("MiniMaxM2ForCausalLM"),
        "flashinfer_trtllm_routed",
        (SM100,),
        _named("modelopt_fp4"),
        alone=False,
    ),
    ModelDefault(
        _named("DeepseekV4ForCausalLM"),
        "flashinfer_trtllm_routed",
        alone=False,
        when=lambda ask: ask.problem.scheme.weight.name == "nvfp4",
    ),
    ModelDefault(
        _named("DeepseekV4ForCausalLM"),
        "flashinfer_mxfp4",
        _HOPPER_TO_GEFORCE,
        when=lambda ask: ask.problem.scheme.weight.name == "mxfp4",
    ),
    ModelDefault(
        _named("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        "flashinfer_mxfp4",
        _HOPPER_TO_GEFORCE,
        when=lambda ask: fp4_experts(ask.problem),
    ),
    ModelDefault(
        NEMOTRON,
        "flashinfer_trtllm_routed",
        (SM100,),
        when=lambda ask: ask.problem.parallel.eplb,
    ),
    ModelDefault(NEMOTRON, "flashinfer_trtllm", (SM100,), _MODELOPT | {""}),
    ModelDefault(NEMOTRON, "marlin", (sm(80, 99),), _named("modelopt_fp4", "modelopt_mixed"), alone=False),
    ModelDefault(NEMOTRON, "flashinfer_cutlass", None, _MODELOPT | {""}, alone=False),
    ModelDefault(
        _named("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
        "flashinfer_mxfp4",
        (SM100,),
        when=lambda ask: fp4_experts(ask.problem),
    ),
    ModelDefault(
        _named("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"), "flashinfer_trtllm", (SM100,), _named("fp8")
    ),
    ModelDefault(
        _named("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
        "marlin",
        (SM90,),
        alone=False,
        when=lambda ask: fp4_experts(ask.problem),
    ),
    ModelDefault(
        _named(
            "Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration"
        ),
        "flashinfer_trtllm",
        (SM100,),
        _named("modelopt_fp4"),
        alone=False,
    ),
    ModelDefault(
        _named("Cohere2VisionForConditionalGeneration", "Cohere2MoeForCausalLM"),
        "flashinfer_trtllm",
        (SM100,),
        alone=False,
        when=lambda ask: ask.problem.storage == "plain" or ask.problem.scheme.weight.name == "nvfp4",
    ),
    ModelDefault(
        _named("KimiK3ForConditionalGeneration"),
        "flashinfer_mxfp4",
        (sm(100, 100), sm(103, 103), sm(107, 107)),
        alone=False,
        when=lambda ask: ask.problem.scheme.weight.name == "mxfp4",
    ),
    ModelDefault(_named("InternS2MobiusForCausalLM"), "triton_kernel", alone=False),
    ModelDefault(MINIMAX_M3, "deep_gemm", (SM100,), _named("mxfp8"), alone=False),
    ModelDefault(
        MINIMAX_M3,
        "flashinfer_trtllm_routed",
        (SM100,),
        alone=False,
        when=lambda ask: ask.problem.scheme.weight.name == "nvfp4",
    ),
    ModelDefault(
        MINIMAX_M3,
        "triton",
        None,
        _named("mxfp8"),
        alone=False,
        when=lambda ask: ask.device.platform == "rocm",
    ),
    ModelDefault(MINIMAX_M3, "triton", None, _named(""), alone=False),
)
"""Defaults of models, in the order in which SGLang asks."""

_CUTLASS = _MODELOPT | {""}
_TRTLLM = _MODELOPT | {"", "nvfp4_online", "fp8", "mxfp8", "compressed-tensors"}
_ROUTED = _named("", "fp8", "mxfp8", "modelopt_fp4", "modelopt_mixed", "nvfp4_online", "minimax_m3_nvfp4")
_MXFP8 = _named("cutlass", "deep_gemm", "flashinfer_megamoe", "flashinfer_trtllm", "flashinfer_trtllm_routed")
_FLASHINFER = _named(
    "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm", "flashinfer_trtllm_routed", "deep_gemm"
)


def stated_quantization(ask: SupportQuery) -> str:
    """The quantization in the server arguments, which only some models take over from the checkpoint."""
    found = quantization(ask.problem, ask.device)
    raw = {"gptq_marlin": "gptq", "awq_marlin": "awq"}.get(found, found)
    architecture, sm100 = ask.model.architecture, on(ask.device, SM100)
    if architecture in NEMOTRON and found in _MODELOPT:
        return found
    if architecture in MINIMAX_M3:
        return "modelopt_mixed" if found == "modelopt_fp4" else found
    if sm100 and architecture in QWEN3 | DEEPSEEK | {"Glm4MoeForCausalLM"}:
        return raw
    return ""


def resolve(ask: SupportQuery) -> ServerArguments:
    """The server arguments for `ask`, with everything they refuse."""
    requested, a2a = ask.request, exchange(ask)
    notes: list[str] = []
    refusals: list[str] = []
    if requested == "megamoe":
        requested, a2a = "", "megamoe"
        parallel = replace(ask.problem.parallel, all2all=a2a)
        ask = replace(ask, request="", problem=replace(ask.problem, parallel=parallel))
        notes.append("--moe-runner-backend megamoe is taken as --moe-a2a-backend megamoe")
    if a2a == "megamoe" and not (ask.device.platform == "rocm" or on(ask.device, SM90, SM100)):
        refusals.append("megamoe needs SM90, SM100 or ROCm")
    runner, why = requested, ""
    refusals += _refused_platform(ask)
    if not runner:
        row = next((row for row in DEFAULTS if row.fits(ask)), None)
        runner = row.runner if row else ""
        if runner:
            where = f" on {ask.device.arch}" if row is not None and row.where else ""
            why = f"SGLang's default runner of {ask.model.architecture}{where}"
    runner = _by_quantization(ask, runner, a2a, notes)
    refusals += _refused_runner(ask, runner, a2a)
    runner = _by_exchange(ask, runner, a2a, notes, refusals)
    if a2a in EP_SPANNING and ask.problem.parallel.ranks > 1 and not ask.problem.parallel.ep:
        notes.append(f"{a2a} spreads experts over all ranks: state --ep for the sizes of one rank")
    return ServerArguments(runner, a2a, tuple(notes), tuple(refusals), why)


_ROCM = _named("", "awq", "fp8", "compressed-tensors", "quark", "mxfp4", "mxfp8")
_STATE_SPACE = NEMOTRON | {
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
}
"""Architectures with state-space or linear attention, whose cache needs a GPU."""


def _refused_platform(ask: SupportQuery) -> list[str]:
    """What does not run on the platform, whatever the runner."""
    stated = quantization(ask.problem, ask.device)
    hybrid = ask.model.architecture == "DeepseekV4ForCausalLM"
    if ask.device.platform == "rocm" and stated not in _ROCM and not hybrid:
        return [f"{stated} quantization is not supported on ROCm"]
    if ask.device.platform == "rocm" and stated == "mxfp4" and not on(ask.device, GFX95):
        return ["MXFP4 on ROCm needs gfx950"]
    if ask.device.platform == "cpu" and ask.model.architecture in _STATE_SPACE:
        return [f"{ask.model.architecture} needs a GPU for its state cache"]
    return []


EP_SPANNING = _named(
    "deepep", "mooncake", "nixl", "megamoe", "flashinfer", "flashinfer_megamoe", "mori", "pplx", "deepep_v2"
)


def _by_quantization(ask: SupportQuery, runner: str, a2a: str, notes: list[str]) -> str:
    """The runner after the constraints of the quantization."""
    stated = stated_quantization(ask)
    if stated == "mxfp8":
        rocm = ask.device.platform == "rocm"
        gfx95 = on(ask.device, GFX95)
        usual = "triton" if gfx95 else "flashinfer_trtllm"
        if a2a == "flashinfer_megamoe":
            usual = "flashinfer_megamoe"
        allowed = set(_MXFP8)
        allowed |= {"triton"} if gfx95 or (rocm and runner == "triton") else set()
        allowed |= {"aiter"} if gfx95 and uses_aiter(ask) else set()
        if runner and runner not in allowed:
            notes.append(
                f"SGLang replaces {runner} by {usual}: MXFP8 experts run on {', '.join(sorted(allowed))}"
            )
        return runner if runner in allowed else usual
    if not runner and stated == "modelopt_fp4" and on(ask.device, SM110, SM120):
        notes.append("SGLang's default runner of ModelOpt's NVFP4 on SM110 and SM120 is flashinfer_cutlass")
        return "flashinfer_cutlass"
    return runner


def _refused_runner(ask: SupportQuery, runner: str, a2a: str) -> list[str]:
    """Why the runner is refused for the quantization or the deployment."""
    stated, says = stated_quantization(ask), list[str]()
    allowed = {
        "flashinfer_cutlass": _CUTLASS,
        "flashinfer_trtllm": _TRTLLM,
        "experimental_sgl_trtllm": _TRTLLM,
        "flashinfer_trtllm_routed": _ROUTED,
        "flashinfer_cutedsl": _named("modelopt_fp4", "modelopt_mixed", "nvfp4_online"),
    }.get(runner)
    hybrid = ask.model.architecture == "DeepseekV4ForCausalLM" and ask.problem.scheme.weight.name == "nvfp4"
    if allowed is not None and stated not in allowed and not (runner == "flashinfer_cutedsl" and hybrid):
        of = stated or "no stated quantization"
        names = ", ".join(sorted(name or "none" for name in allowed))
        says.append(f"{runner} is for --quantization {names}; the server arguments have {of}")
    w4a16 = ask.model.architecture in QWEN3 and weight_only_nvfp4(ask.problem)
    if w4a16 and on(ask.device, SM100) and runner not in ("", "marlin"):
        says.append(f"NVFP4 weights with 16-bit activations need marlin; got {runner}")
    if runner == "flashinfer_cutedsl" and a2a not in ("none", "deepep", "flashinfer"):
        says.append(f"flashinfer_cutedsl supports deepep, flashinfer or no exchange; got {a2a}")
    if runner == "cutlass" and stated in ("fp8", "mxfp8") and ask.problem.parallel.ep_size > 1:
        says.append("cutlass with FP8 needs --ep-size 1")
    if runner == "triton_kernel" and ask.model.architecture in _GPT and ask.problem.parallel.ep_size > 1:
        says.append("triton_kernel needs --ep-size 1")
    if runner == "experimental_sgl_marlin" and ask.problem.parallel.ep_size > 1 and a2a != "none":
        says.append("experimental_sgl_marlin with expert parallelism needs --moe-a2a-backend none")
    return says


def _by_exchange(ask: SupportQuery, runner: str, a2a: str, notes: list[str], refusals: list[str]) -> str:
    """The runner after the constraints of the exchange."""
    problem, architecture = ask.problem, ask.model.architecture
    if a2a == "flashinfer_megamoe":
        if architecture not in MEGA_MODELS:
            refusals.append(f"flashinfer_megamoe is not validated for {architecture or 'this architecture'}")
        elif not _mega_formats(problem, stated_quantization(ask)):
            refusals.append("flashinfer_megamoe needs MXFP8, NVFP4 or FP4 experts")
        elif problem.parallel.dp == 1:
            refusals.append("flashinfer_megamoe needs --attn-dp-size equal to --tp-size")
        elif runner not in ("", "flashinfer_megamoe"):
            refusals.append(f"flashinfer_megamoe needs the runner of that name; got {runner}")
        elif not on(ask.device, SM100):
            refusals.append("flashinfer_megamoe needs an SM100-family GPU")
        return runner or "flashinfer_megamoe"
    if a2a == "deepep_v2":
        if architecture not in DEEPEP_V2_MODELS:
            refusals.append(f"DeepEP v2 is not validated for {architecture or 'this architecture'}")
        elif runner not in ("", "deep_gemm"):
            refusals.append(f"DeepEP v2 supports the runner deep_gemm only; got {runner}")
        if not runner:
            notes.append("DeepEP v2 sets the runner to deep_gemm")
        return runner or "deep_gemm"
    if a2a == "flashinfer":
        if problem.parallel.tp > 1 or problem.parallel.dp == 1:
            refusals.append("FlashInfer's all2all needs --attn-dp-size equal to --tp-size")
        elif runner not in _FLASHINFER:
            refusals.append(
                f"FlashInfer's all2all needs one of {', '.join(sorted(_FLASHINFER))}; got {runner or 'auto'}"
            )
    if a2a == "pplx":
        if problem.parallel.dp < 2:
            refusals.append("pplx needs --attn-dp-size 2 or more")
        elif runner not in ("", "deep_gemm"):
            refusals.append(f"pplx supports the runner deep_gemm only; got {runner}")
        if not runner:
            notes.append("pplx sets the runner to deep_gemm")
        return runner or "deep_gemm"
    return runner


def _mega_formats(problem: MoEProblem, stated: str) -> bool:
    return (
        stated in ("mxfp8", "modelopt_fp4")
        or fp4_experts(problem)
        or (problem.model_type == "deepseek_v4" and problem.scheme.weight.name in ("nvfp4", "mxfp4"))
    )
