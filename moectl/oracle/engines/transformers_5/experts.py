"""transformers' implementations of experts: what each needs, and the exception it raises without.

`experts_implementation` is accepted when the model is made; whether its kernels can be loaded shows on the
first token only. The reason code of a check is the class of that exception.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ....problem.moe_problem import MoEProblem
from ....problem.schemes import BF16, Scheme
from ...backend import Backend, BackendRule, Capability, ExpertsClass, PackageNeed, SupportQuery, only
from ...gpu_archs import CUDA, ROCM, XPU, Archs, sm
from .releases import Release
from .terms import (
    BEFORE_SM80,
    BLACKWELL,
    EVERYWHERE,
    HOPPER,
    HUB_KERNELS,
    NATIVE_FP8,
    NO_DEEP_GEMM,
    has_interface,
    hub_kernels,
    kernels,
    on,
)

DECODED_BY = {
    "torch.grouped_mm": "torch.bmm",
    "loop": "torch.bmm",
    "finegrained-fp8 matmul_grouped": "finegrained-fp8 matmul_batched",
}
"""Kernels that `generate` replaces for decoding, except on CPUs."""

_TOKEN_COPIES = frozenset({"torch.bmm"})
"""Kernels that copy the weights of every token's experts."""


def decoding_kernel(kernel: str, platform: str) -> str:
    """The kernel that computes experts in `generate` after the prompt, if `kernel` computed that."""
    return kernel if platform == "cpu" else DECODED_BY.get(kernel, kernel)


def _wide(problem: MoEProblem) -> MoEProblem:
    return replace(problem, scheme=Scheme(BF16))


def _decodes(kernel: str, ask: SupportQuery) -> str:
    after = decoding_kernel(kernel, ask.device.platform)
    if after == kernel:
        return ""
    text = "generate() decodes with batched_mm instead of grouped_mm"
    if after not in _TOKEN_COPIES:
        return text
    copied = _wide(ask.problem).expert_bytes() * ask.problem.top_k / 2**20
    return f"{text}: it copies the weights of a token's experts, {copied:.0f} MiB per token and layer"


def compiles_as_loop(kernel: str, dtype: str) -> bool:
    """True for kernels that torch.compile replaces by a loop over experts, for all dtypes but bfloat16."""
    return kernel == "torch.grouped_mm" and dtype != "bf16"


def _compiled(kernel: str, ask: SupportQuery) -> str:
    if not compiles_as_loop(kernel, ask.dtype):
        return ""
    return f"under torch.compile grouped_mm becomes a loop over experts in {ask.dtype}"


def _dequantized(ask: SupportQuery) -> str:
    times = _wide(ask.problem).expert_bytes() / ask.problem.expert_bytes()
    return f"experts are dequantized to {ask.dtype} on loading, and take {times:.2g} times the memory"


def _swiglu(ask: SupportQuery) -> str:
    name = ask.problem.activation.name
    if name == "silu" and ask.problem.activation.limit is None:
        return ""
    used = ask.problem.activation
    return f"sonicmoe computes plain SwiGLU for hidden_act silu; this model's experts use {used}"


def _interface(release: Release, wanted: bool) -> BackendRule:
    return BackendRule(
        question="experts_implementation",
        group="scheme",
        code="" if wanted else "KeyError",
        holds=lambda ask: has_interface(ask.problem, release) == wanted,
        wanted=lambda ask: f"model type {ask.problem.model_type}",
        offered="models whose experts follow it" if wanted else "models whose experts have one forward",
    )


HUB = BackendRule(
    question="kernels of the Hub",
    group="policy",
    code="ImportError",
    holds=lambda ask: hub_kernels(ask.packages),
    wanted=lambda ask: "none",
    offered="allowed",
    switch=HUB_KERNELS.name,
)


def _toolkit(oldest: str) -> PackageNeed:
    return PackageNeed("nvcc", code="ImportError", oldest=oldest)


AS_HELD, QUANTIZED, NOT_READ = "as held", "quantized", "not read"
"""What a checkpoint has of experts that are 16-bit in memory."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The implementations of one release for weights that are 16-bit in memory.

    `stored` is what a checkpoint has: `AS_HELD`, `QUANTIZED` experts that are dequantized on loading, or
    such that are `NOT_READ`.
    """

    release: Release
    stored: str = AS_HELD

    def _one(self, name: str, kernel: str, variants: tuple[ExpertsClass, ...]) -> Backend:
        return Backend(name, kernel, variants, dequantizes=self.stored != AS_HELD)

    def _plain(self, name: str, kernel: str, experts: str, arch: Archs = EVERYWHERE) -> Backend:
        return self._one(name, kernel, (ExpertsClass(experts, self._capability(kernel, arch)),))

    def _capability(self, kernel: str, arch: Archs) -> Capability:
        remarks = ((_dequantized,) if self.stored == QUANTIZED else ()) + (
            lambda ask: _decodes(kernel, ask),
            lambda ask: _compiled(kernel, ask),
        )
        return Capability(
            arch=arch,
            rules=(_interface(self.release, True),),
            remarks=remarks,
            lora=True,
            codes={"device": "ImportError", "model dtype": "ValueError", "gating": "ValueError"},
        )

    def _hub(self, kernel: str, arch: Archs, *needs: PackageNeed) -> Capability:
        capability = self._capability(kernel, arch)
        return replace(capability, needs=(kernels(self.release), *needs), rules=(HUB, *capability.rules))

    def implementations(self) -> dict[str, tuple[Backend, ...]]:
        """By the value of `experts_implementation`: the backends that it selects, in order."""
        deep = "deepgemm_bf16_experts_forward"
        sonic = self._hub(
            "sonic-moe",
            (sm(90), ROCM),
            PackageNeed("nvidia_cutlass_dsl", code="ImportError", oldest="4.6.0"),
            PackageNeed("apache_tvm_ffi", code="ImportError", oldest="0.1.10"),
        )
        normed = BackendRule(
            question="norm after experts",
            group="scheme",
            code="ValueError",
            holds=lambda ask: ask.problem.model_type not in self.release.models.normed,
            wanted=lambda ask: "a norm",
            offered="none",
        )
        sonic = replace(sonic, ungated=False, rules=(*sonic.rules, normed), remarks=(*sonic.remarks, _swiglu))
        own = self.own()
        return {
            "deepgemm_megamoe": (own,),
            "grouped_mm": (
                self._plain(
                    "grouped_mm", "torch.grouped_mm", "grouped_mm_experts_forward", (sm(80), *EVERYWHERE[1:])
                ),
                self._plain("grouped_mm_loop", "loop", "grouped_mm_experts_forward", (BEFORE_SM80,)),
                own,
            ),
            "batched_mm": (self._plain("batched_mm", "torch.bmm", "batched_mm_experts_forward"), own),
            "eager": (self._plain("eager", "torch.linear", "Experts.forward"), own),
            "deepgemm": (
                self._one(
                    "deepgemm",
                    "deep-gemm",
                    tuple(
                        ExpertsClass(
                            deep,
                            replace(
                                capability,
                                dtypes=only("bf16"),
                                rules=(*capability.rules, normed),
                            ),
                        )
                        for capability in (
                            self._hub("deep-gemm", HOPPER, _toolkit("12.3")),
                            self._hub("deep-gemm", (BLACKWELL,), _toolkit("12.9")),
                        )
                    ),
                ),
                own,
            ),
            "sonicmoe": (
                self._one("sonicmoe", "sonic-moe", (ExpertsClass("sonicmoe_experts_forward", sonic),)),
                own,
            ),
        }

    def own(self) -> Backend:
        """The one forward of models without the interface: a product over all experts (Llama 4)."""
        capability = Capability(
            rules=(_interface(self.release, False),),
            remarks=(_dequantized,) if self.stored == QUANTIZED else (),
            lora=True,
        )
        kernel = "torch.linear" if self.stored == QUANTIZED else "torch.bmm"
        experts = "SequentialLlama4TextExperts" if self.stored == QUANTIZED else "Llama4TextExperts"
        return self._one("own", kernel, (ExpertsClass(experts, capability),))


@cache
def mxfp4(release: Release) -> Backend:
    """gpt-oss' experts as published, by the Hub's Triton kernels."""

    def on_arch(arch: Archs, triton: str) -> ExpertsClass:
        needs = (PackageNeed("triton", code="dequantized", oldest=triton), kernels(release))
        return ExpertsClass("Mxfp4GptOssExperts", Capability(arch=arch, needs=needs, lora=True))

    return Backend(
        "gpt_oss_triton_kernels",
        "gpt-oss-triton-kernels",
        (on_arch((sm(75), ROCM), "3.4.0"), on_arch((XPU,), "3.5.0")),
    )


@cache
def megablocks(release: Release, dequantizes: bool) -> Backend:
    """gpt-oss' layer by the Hub's MegaBlocks, with `use_kernels`."""
    capability = Capability(
        arch=EVERYWHERE, needs=(kernels(release),), remarks=(_dequantized,) if dequantizes else (), lora=True
    )
    experts = (ExpertsClass("MegaBlocksMoeMLP", capability),)
    return Backend("megablocks", "MegaBlocksMoeMLP", experts, dequantizes=dequantizes)


# ------------------------------------------------------------------------------------------- FP8


def _fp4(ask: SupportQuery) -> bool:
    return ask.problem.scheme.weight.name == "mxfp4"


def _blackwell_or_newer(ask: SupportQuery) -> bool:
    return on(ask.device, sm(100))


def _powers_of_two(ask: SupportQuery) -> bool:
    """True for weights whose scales are powers of two (UE8M0), as a config says."""
    weight = ask.problem.scheme.weight
    return weight.name == "mxfp4" or weight.scale_dtype == "F8_E8M0"


_FP4_NEEDS_SM100 = BackendRule(
    question="FP4 weights in DeepGEMM",
    group="arch",
    code="NotImplementedError",
    holds=lambda ask: not _fp4(ask) or _blackwell_or_newer(ask),
    wanted=lambda ask: ask.device.arch,
    offered="sm100 or newer",
)
_SCALES = BackendRule(
    question="scales in DeepGEMM",
    group="scheme",
    code="NotImplementedError",
    holds=lambda ask: not _blackwell_or_newer(ask) or _powers_of_two(ask),
    wanted=lambda ask: f"float32 on {ask.device.arch}",
    offered="UE8M0 on sm100 and newer",
)
_NOT_XPU = BackendRule(
    question="CUDA in torch",
    group="arch",
    code="AssertionError",
    holds=lambda ask: ask.device.platform != "xpu",
    wanted=lambda ask: "an XPU",
    offered="a GPU of NVIDIA or AMD",
)


def _blocks(ask: SupportQuery) -> bool:
    weight = ask.problem.scheme.weight
    return weight.name == "fp8" and tuple(weight.block) in ((128, 128), (1, 128))


_CAST_BLOCKS = BackendRule(
    question="weight blocks in DeepGEMM",
    group="scheme",
    code="ValueError",
    holds=lambda ask: _fp4(ask) or _blocks(ask),
    wanted=lambda ask: str(ask.problem.scheme.weight),
    offered="128x128 or 1x128",
)
_LINEAR_BLOCKS = replace(
    _CAST_BLOCKS,
    holds=lambda ask: _fp4(ask) or (_blocks(ask) and tuple(ask.problem.scheme.weight.block) == (128, 128)),
    offered="128x128",
)
_LINEAR_ON = BackendRule(
    question="DeepGEMM for linear layers",
    group="policy",
    code="",
    holds=lambda ask: not NO_DEEP_GEMM.is_on(ask.packages.env.get(NO_DEEP_GEMM.name)),
    wanted=lambda ask: "off",
    offered="on",
    switch=NO_DEEP_GEMM.name,
)
_PACKED = BackendRule(
    question="weights of Mega MoE",
    group="scheme",
    code="NotImplementedError",
    holds=_fp4,
    wanted=lambda ask: str(ask.problem.scheme.weight),
    offered="FP4",
)
_SPREAD = BackendRule(
    question="experts over ranks",
    group="parallel",
    code="ValueError",
    holds=lambda ask: ask.problem.parallel.ep_size > 1,
    wanted=lambda ask: "false",
    offered="true",
)


@cache
def fp8(release: Release) -> dict[str, tuple[Backend, ...]]:
    """Implementations for FP8 (and FP4) experts, as `Experts.implementations`."""

    def capability(
        kernel: str, arch: Archs, rules: tuple[BackendRule, ...] = (), *needs: PackageNeed
    ) -> Capability:
        return Capability(
            arch=arch,
            needs=(kernels(release), *needs),
            rules=(HUB, *rules),
            remarks=(lambda ask: _decodes(kernel, ask),),
            lora=True,
            codes={"device": "ImportError", "model dtype": "ValueError"},
        )

    def triton(name: str, function: str, experts: str) -> Backend:
        kernel = f"finegrained-fp8 {function}"
        return Backend(name, kernel, (ExpertsClass(experts, capability(kernel, NATIVE_FP8)),))

    def deep(name: str, experts: str, *rules: BackendRule) -> Backend:
        variants = (
            ExpertsClass(experts, capability("deep-gemm", arch, rules, _toolkit(oldest)))
            for arch, oldest in ((HOPPER, "12.3"), ((BLACKWELL,), "12.9"))
        )
        return Backend(name, "deep-gemm", tuple(variants))

    def bf16(backend: Backend) -> Backend:
        variants = (
            replace(variant, capability=replace(variant.capability, dtypes=only("bf16")))
            for variant in backend.variants
        )
        return replace(backend, variants=tuple(variants))

    mega = capability("deep-gemm", (CUDA, ROCM, XPU), (_NOT_XPU, _FP4_NEEDS_SM100, _SCALES, _PACKED, _SPREAD))
    return {
        "grouped_mm": (triton("grouped_mm", "matmul_grouped", "fp8_grouped_mm_experts_forward"),),
        "batched_mm": (triton("batched_mm", "matmul_batched", "fp8_batched_mm_experts_forward"),),
        "eager": (
            deep(
                "eager",
                "FP8Experts.forward",
                *(replace(rule, code="") for rule in (_FP4_NEEDS_SM100, _SCALES, _LINEAR_BLOCKS, _LINEAR_ON)),
            ),
            triton("eager", "matmul_2d", "FP8Experts.forward"),
        ),
        "deepgemm": (
            bf16(
                deep(
                    "deepgemm",
                    "deepgemm_fp8_fp4_experts_forward",
                    _NOT_XPU,
                    _FP4_NEEDS_SM100,
                    _SCALES,
                    _CAST_BLOCKS,
                )
            ),
        ),
        "deepgemm_megamoe": (
            Backend(
                "deepgemm_megamoe",
                "deep-gemm",
                (ExpertsClass("deepgemm_fp8_fp4_megamoe_experts_forward", mega),),
            ),
        ),
    }
