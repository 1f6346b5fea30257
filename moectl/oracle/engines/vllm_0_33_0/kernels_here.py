"""Which of vLLM's experts on SM90 moectl's runners stand for, and why the others cannot be run or timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....dtypes import MODEL_DTYPES
from ....problem.moe_problem import MoEProblem
from ....problem.schemes import FP8_BLOCK

RUNNERS_OF: Mapping[str, tuple[str, ...]] = {
    "BatchedDeepGemmExperts": ("batched_deep_gemm",),
    "BatchedHummingGroupedExperts": ("humming_grouped", "humming"),
    "BatchedMarlinExperts": ("marlin",),
    "BatchedTritonExperts": ("triton",),
    "CutlassBatchedExpertsFp8": ("cutlass",),
    "DeepGemmExperts": ("deep_gemm",),
    "FlashInferExperts": ("flashinfer_cutlass",),
    "HummingGroupedExperts": ("humming_grouped",),
    "HummingIndexedExperts": ("humming",),
    "Int4EmulationTritonExperts": ("emulation",),
    "MarlinExperts": ("marlin",),
    "Mxfp8EmulationTritonExperts": ("emulation",),
    "Nvfp4QuantizationEmulationTritonExperts": ("emulation",),
    "OAITritonExperts": ("triton_kernels",),
    "OAITritonMxfp4ExpertsMonolithic": ("triton_kernels",),
    "OCP_MXQuantizationEmulationTritonExperts": ("emulation",),
    "TritonExperts": ("triton",),
    "TritonOrCutlassExperts": ("cutlass", "triton"),
    "TritonOrDeepGemmExperts": ("deep_gemm", "triton"),
    "UnfusedOAITritonExperts": ("triton_kernels",),
}
"""Runners with the same GEMMs, by the engine's class; their rows may lie otherwise than in batches."""


@dataclass(frozen=True, slots=True)
class KernelGap:
    """What of a class of experts no runner computes.

    Attributes:
        experts: the engine's class.
        why: the reason, as a sentence.
        weights: names of weight formats; empty for all.
        acts: names of activation formats; empty for all.
    """

    experts: str
    why: str
    weights: tuple[str, ...] = ()
    acts: tuple[str, ...] = ()

    def covers(self, weight: str, act: str) -> bool:
        """True for a pair of formats that it is about."""
        return (not self.weights or weight in self.weights) and (not self.acts or act in self.acts)


_HUMMING = ("BatchedHummingGroupedExperts", "HummingGroupedExperts", "HummingIndexedExperts")
_CHANGED = "The engine quantizes tokens that the checkpoint does not declare so; moectl's runner does not."
_MARLIN = ("BatchedMarlinExperts", "MarlinExperts")
_QUANTIZED = ("fp8", "int8", "mxfp4", "mxfp8", "nvfp4")
_WIDE = "The engine multiplies 16-bit tokens whatever is declared; moectl's runner only where they are."
_HALVES = "moectl's layout of Humming cannot hold gate and up with different scales per tensor."
_INT8 = "moectl has no runner for INT8 tokens in vLLM's Triton experts."

GAPS: tuple[KernelGap, ...] = (
    KernelGap("CutlassExpertsW4A8Fp8", "moectl has no layout for CUTLASS with INT4 weights and FP8 tokens."),
    KernelGap("HPCExperts", "HPC-Ops has no wheel to fetch or to test with; it is built from its source."),
    KernelGap("MoonEPExperts", "It needs an exchange between ranks that moectl does not have."),
    KernelGap("TritonWNA16Experts", "moectl has no runner for vLLM's Triton kernel of integer weights."),
    KernelGap("FlashInferExperts", "moectl's runner has CUTLASS for FP8 in blocks only.", ("fp8",), ("fp8",)),
    KernelGap("TritonExperts", _INT8, ("int8",), ("int8",)),
    *(KernelGap(experts, _WIDE, ("mxfp4", "int4", "int8"), _QUANTIZED) for experts in _MARLIN),
    *(
        KernelGap(experts, _CHANGED, weights, acts)
        for experts in _HUMMING
        for weights, acts in (
            (("mxfp4",), ("mxfp4", "mxfp8", "fp8")),
            (("int4", "int8"), ("fp8",)),
            (("fp8",), ("fp8",)),
        )
    ),
    *(KernelGap(experts, _HALVES, ("fp8",), ("a16",)) for experts in _HUMMING),
    KernelGap(
        "HummingGroupedExperts", "moectl's rows are quantized to FP8 only.", ("int4", "int8"), ("int8",)
    ),
)
"""Pairs of formats that an engine's class takes on SM90 and no runner does."""


@dataclass(frozen=True, slots=True)
class LayerGap:
    """What else than its formats keeps a layer from the runners of a class of experts.

    Attributes:
        experts: the engine's classes.
        why: the reason, as a sentence.
        of: whether a layer is such a one.
    """

    experts: tuple[str, ...]
    why: str
    of: Callable[[MoEProblem], bool]


def _sizes(problem: MoEProblem) -> tuple[int, int]:
    return problem.dims.hidden, problem.dims.intermediate


LAYER_GAPS: tuple[LayerGap, ...] = (
    LayerGap(
        ("TritonExperts",),
        "The engine makes blocks of FP8 smaller until they fit a rank; moectl's runner does not.",
        lambda problem: problem.scheme.weight == FP8_BLOCK and any(size % 128 for size in _sizes(problem)),
    ),
    LayerGap(
        _HUMMING,
        "moectl's layout of Humming is in tiles of 32; the engine pads what a rank has in part.",
        lambda problem: any(size % 32 for size in _sizes(problem)),
    ),
    LayerGap(
        _HUMMING,
        "moectl's runner of Humming applies the router's weight at the end.",
        lambda problem: problem.routing.weight_on_input,
    ),
    LayerGap(
        _HUMMING,
        "The engine rounds integers' scales to the model's dtype; moectl keeps the stored ones.",
        lambda problem: (
            problem.scheme.weight.name.startswith("int")
            and problem.scheme.weight.scale_dtype not in ("", MODEL_DTYPES.get(problem.dtype))
        ),
    ),
)
"""Layers of published models that an engine's class takes on SM90 and no runner does."""
