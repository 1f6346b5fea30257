"""TensorRT-LLM's implementations of experts, in its order of priority, and what each can run.

One row is one class with its `can_implement`, the activation functions that it declares, and its static
capabilities. A backend (`moe_config.backend`) is a family of classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...backend import (
    ANY,
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    NameSet,
    PackageNeed,
    ParallelSupport,
    but,
    only,
)
from ...gpu_archs import Archs, sm
from .gates import (
    AS_MANY_EXPERT_RANKS,
    CODES,
    GATED,
    GPT_OSS_ONLY,
    NO_BIAS,
    NO_GPT_OSS,
    NVFP4_ROWS,
    ONE_EXPERT_RANK,
    OWN_TOKENS,
    WHOLE_EXPERTS,
    experts_divide,
    hidden,
    intermediate,
    quantization,
    shard,
    takes_constants,
)
from .quantization import UNQUANTIZED
from .terms import RENORMALIZED, SM100F, USE_FLASHINFER

ALL_CONSTANTS = frozenset({"alpha", "beta", "clamp"})
SM80, SM89, SM90_ONLY = (sm(80),), (sm(89),), (sm(90, 90),)
SM12X: Archs = (sm(120, 120), sm(121, 121))
ADA_HOPPER: Archs = (sm(89, 99),)
HALF, BF16 = only("bf16", "fp16"), only("bf16")


@dataclass(frozen=True, slots=True)
class Implementation:
    """One class of experts.

    Attributes:
        experts: its name; `backend`: the family that it belongs to.
        algorithms: devices by quantization algorithm; None as devices: those of `where`.
        where: devices, whatever the algorithm; None: any.
        dtypes: the model's 16-bit dtypes; `narrow`: those for some algorithms.
        activations: functions that its kernels compute; `constants`: parameters that they take.
        gpt_oss: algorithms with which it runs gpt-oss' kind of SwiGLU.
        rules: further checks; `for_algorithm`: those for one algorithm.
        lora: algorithms with which it runs adapters on experts.
        eplb, weighted_input, uneven: expert load balancing, router weights on the input, different numbers of
            experts on ranks. For the choice only EPLB is checked, if the class `rejects_eplb`; building the
            layer fails on the others.
    """

    experts: str
    backend: str
    algorithms: Mapping[str, Archs | None]
    where: Archs | None = None
    dtypes: NameSet = HALF
    narrow: Mapping[str, NameSet] = field(default_factory=dict)
    activations: frozenset[str] = frozenset({"Swiglu"})
    constants: frozenset[str] = frozenset()
    gpt_oss: frozenset[str] = frozenset()
    rules: tuple[BackendRule, ...] = ()
    for_algorithm: Mapping[str, tuple[BackendRule, ...]] = field(default_factory=dict)
    needs: tuple[PackageNeed, ...] = ()
    switches: tuple[EnvironmentSwitch, ...] = ()
    routing: NameSet = ANY
    dp: bool = True
    eplb: bool = True
    rejects_eplb: bool = False
    lora: frozenset[str] = frozenset()
    weighted_input: bool = False
    uneven: bool = False

    def variant(self, algorithm: str) -> ExpertsClass:
        """The class as layers of the format `algorithm` ask it."""
        styles = () if algorithm in self.gpt_oss or GPT_OSS_ONLY in self.rules else (NO_GPT_OSS,)
        return ExpertsClass(
            self.experts,
            Capability(
                arch=self.algorithms.get(algorithm) or self.where,
                needs=self.needs,
                switches=self.switches,
                activations=only(*self.activations),
                routing=self.routing,
                parallel=ParallelSupport(eplb=not self.rejects_eplb, dp=self.dp),
                dtypes=self.narrow.get(algorithm, self.dtypes),
                lora=algorithm in self.lora,
                rules=(
                    quantization(algorithm, tuple(self.algorithms)),
                    takes_constants(self.constants),
                    *styles,
                    *self.rules,
                    *self.for_algorithm.get(algorithm, ()),
                ),
                codes=CODES,
            ),
        )


_FLASHINFER = (PackageNeed("flashinfer", code="dep_missing"),)
_CUTLASS_DSL = (PackageNeed("cutlass_dsl", code="dep_missing"),)

# ------------------------------------------------------------------------------- CuTe DSL, MegaMoE

B12X = Implementation(
    "CuteDslB12xFusedMoE",
    "cutedsl",
    {"NVFP4": None, "W4A16_NVFP4": None},
    where=SM12X,
    activations=frozenset({"Swiglu", "Relu2"}),
    needs=_FLASHINFER,
    rules=(ONE_EXPERT_RANK,),
    dp=False,
    eplb=False,
    uneven=True,
)
MEGA_DEEPGEMM = Implementation(
    "DeepgemmCudaW4a8Mxfp4Mxfp8Impl",
    "megamoe_deepgemm",
    {"W4A8_MXFP4_MXFP8": None},
    where=SM100F,
    dtypes=BF16,
    activations=frozenset({"Swiglu", "SiTu"}),
    constants=ALL_CONSTANTS,
    rules=(
        hidden(512),
        intermediate(512),
        WHOLE_EXPERTS,
        experts_divide("slots_not_divisible_by_ep"),
        OWN_TOKENS,
    ),
    uneven=True,
)
MEGA_CUTEDSL = Implementation(
    "MegaMoECuteDsl",
    "megamoe_cutedsl",
    {"NVFP4": None},
    where=SM100F,
    dtypes=BF16,
    constants=frozenset({"clamp"}),
    rules=(
        hidden(32),
        intermediate(16),
        WHOLE_EXPERTS,
        experts_divide("slots_not_divisible_by_ep"),
        AS_MANY_EXPERT_RANKS,
    ),
    needs=_CUTLASS_DSL,
    uneven=True,
)
CUTEDSL = Implementation(
    "CuteDslFusedMoE",
    "cutedsl",
    {"NVFP4": SM100F},
    where=(sm(90),),
    dtypes=BF16,
    activations=frozenset({"Swiglu", "Relu2"}),
    constants=frozenset({"clamp"}),
    for_algorithm={"NVFP4": (NVFP4_ROWS,)},
    weighted_input=True,
    uneven=True,
)

# -------------------------------------------------------------------------------------- TRTLLM-Gen

_GEN = Implementation(
    "",
    "trtllm",
    {},
    where=SM100F,
    dtypes=BF16,
    activations=frozenset({"Swiglu", "SwigluBias", "Relu2", "Silu"}),
    constants=ALL_CONSTANTS,
)
_SITU = _GEN.activations | {"SiTu"}


def _native(
    name: str, algorithm: str, gpt_oss: bool, situ: bool = False, *rules: BackendRule
) -> Implementation:
    """TensorRT-LLM's own kernels."""
    return replace(
        _GEN,
        experts=f"TrtllmTrtllmGen{name}Impl",
        algorithms={algorithm: None},
        gpt_oss=frozenset({algorithm} if gpt_oss else ()),
        activations=_SITU if situ else _GEN.activations,
        rules=rules,
    )


def _flashinfer(native: Implementation, *rules: BackendRule) -> Implementation:
    """FlashInfer's copy of the kernels of `native`: opt-in, for fewer activations and routing methods."""
    return replace(
        native,
        experts=native.experts.replace("TrtllmTrtllm", "FlashinferTrtllm"),
        activations=native.activations - {"SiTu", "Relu2"},
        needs=_FLASHINFER,
        switches=(EnvironmentSwitch(USE_FLASHINFER, code="path_not_enabled"),),
        routing=but("DeepSeekV3", "Default"),
        rules=(*native.rules, *rules),
    )


NATIVE = (
    _native("Nvfp4", "NVFP4", True, True),
    _native("Fp8BlockScales", "FP8_BLOCK_SCALES", False, False, NO_BIAS, GATED),
    _native("W4a16Mxfp4", "W4A16_MXFP4", True),
    _native("W4a8Mxfp4Mxfp8", "W4A8_MXFP4_MXFP8", True, True),
    replace(
        _native("W4a8Nvfp4Fp8", "W4A8_NVFP4_FP8", False, False, NO_BIAS),
        constants=frozenset(),
    ),
    _native("W4a8Mxfp4Fp8", "W4A8_MXFP4_FP8", True),
)
_MXFP4_SIZES = (NO_BIAS, shard(128), hidden(512))
FLASHINFER = (
    _flashinfer(NATIVE[0], shard(32, "alpha"), hidden(32, "alpha"), NO_BIAS),
    _flashinfer(NATIVE[1]),
    _flashinfer(NATIVE[2], *_MXFP4_SIZES),
    _flashinfer(NATIVE[3], *_MXFP4_SIZES),
    replace(
        _GEN,
        experts="FlashinferTrtllmGenBf16Impl",
        algorithms={UNQUANTIZED: None},
        activations=frozenset({"Swiglu", "Relu2"}),
        needs=tuple(
            PackageNeed("flashinfer", f"fused_moe.trtllm_bf16_{form}", code="dep_missing")
            for form in ("moe", "routed_moe")
        ),
        rules=(shard(128),),
    ),
)
"""The last has no counterpart and needs no variable."""

# ----------------------------------------------------------------------------------------- others

DEEPGEMM = Implementation(
    "DeepgemmCudaFp8BlockScalesImpl",
    "deepgemm",
    {"FP8_BLOCK_SCALES": None},
    where=SM100F,
    constants=frozenset({"clamp"}),
    weighted_input=True,
)
DENSEGEMM = Implementation(
    "DenseGEMMFusedMoE",
    "densegemm",
    {"NVFP4": None},
    where=SM100F,
    rules=(ONE_EXPERT_RANK, intermediate(256)),
)
MARLIN = Implementation(
    "MarlinFusedMoE",
    "marlin",
    {"NVFP4": None, "W4A16_NVFP4": None},
    where=ADA_HOPPER,
    dtypes=BF16,
    activations=frozenset({"Swiglu", "Geglu", "Relu2"}),
    eplb=False,
    rejects_eplb=True,
    weighted_input=True,
)
TRITON = Implementation(
    "TritonFusedMoE",
    "triton",
    {UNQUANTIZED: None, "FP8": None, "W4A8_MXFP4_FP8": None, "W4A16_MXFP4": None},
    where=SM90_ONLY,
    narrow={UNQUANTIZED: BF16, "FP8": ANY, "W4A8_MXFP4_FP8": ANY},
    activations=frozenset({"Swiglu", "SwigluBias"}),
    constants=ALL_CONSTANTS,
    rules=(GPT_OSS_ONLY,),
    routing=only(*RENORMALIZED),
    eplb=False,
    rejects_eplb=True,
    uneven=True,
)
CUTLASS = Implementation(
    "CutlassFusedMoE",
    "cutlass",
    {
        UNQUANTIZED: SM80,
        "FP8": SM89,
        "FP8_BLOCK_SCALES": (*SM90_ONLY, sm(120, 120)),
        "NVFP4": (*SM100F, *SM12X),
        "W4A16_NVFP4": SM80,
        "W4A8_AWQ": (sm(89, 89), *SM90_ONLY),
        "W8A16": SM80,
        "W4A16_MXFP4": SM90_ONLY,
        "W4A8_MXFP4_FP8": SM100F,
        "W4A8_MXFP4_MXFP8": (*SM100F, *SM12X),
        "MXFP8": SM100F,
    },
    where=SM80,
    narrow={"FP8_BLOCK_SCALES": BF16},
    activations=frozenset({"Swiglu", "SwigluBias", "Geglu", "SiTu", "Relu2", "Silu"}),
    constants=ALL_CONSTANTS,
    gpt_oss=frozenset({UNQUANTIZED, "MXFP8", "NVFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8"}),
    for_algorithm={"NVFP4": (NO_BIAS, NVFP4_ROWS)},
    lora=frozenset({UNQUANTIZED, "FP8"}),
    weighted_input=True,
)
VANILLA = Implementation(
    "VanillaMoE",
    "vanilla",
    dict.fromkeys(
        (
            UNQUANTIZED, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4",
            "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "MXFP8", "W8A16", "W4A16_AWQ",
            "W4A8_AWQ",
        )
    ),
    dtypes=ANY,
    activations=frozenset({"Swiglu", "Relu2"}),
    rules=(experts_divide("topology_unsupported"),),
    eplb=False,
    rejects_eplb=True,
    uneven=True,
)  # fmt: skip

IMPLEMENTATIONS = (
    B12X,
    MEGA_DEEPGEMM,
    MEGA_CUTEDSL,
    CUTEDSL,
    *FLASHINFER,
    *NATIVE,
    DEEPGEMM,
    DENSEGEMM,
    MARLIN,
    TRITON,
    CUTLASS,
    VANILLA,
)
"""TensorRT-LLM's `IMPL_PRIORITY`."""
FAMILIES = tuple(dict.fromkeys(row.backend for row in IMPLEMENTATIONS))
BY_EXPERTS = {row.experts: row for row in IMPLEMENTATIONS}


def backends(algorithm: str) -> tuple[Backend, ...]:
    """Every backend with its classes, as layers of the format `algorithm` ask them (empty: unread ones)."""
    return tuple(
        Backend(
            family,
            family.upper(),
            tuple(row.variant(algorithm) for row in IMPLEMENTATIONS if row.backend == family),
        )
        for family in FAMILIES
    )
