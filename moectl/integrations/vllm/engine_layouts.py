"""The layouts in which vLLM's own kernels take converted directories, as data: imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...environment import find_device
from ...oracle.machine_packages import packages_from
from ...oracle.registry import policy_named
from ...oracle.select import OutOfScope, select
from ...problem.layouts import LAYOUTS
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import A16, FP8_BLOCK, Scheme, WeightFormat

RULES = "vllm-0.33.0"
"""The policy that says which of vLLM's methods computes a checkpoint's experts."""


@dataclass(frozen=True)
class EngineLayout:
    """Which layers a kernel of vLLM's takes in a layout.

    Attributes:
        backend: the value of ``--moe-backend`` that selects it.
        quantizes: whether the published checkpoint may ask for quantized tokens, which it leaves in 16 bits.
        weight: the only weights of the layout that were compared with vLLM's own loading; None for all.
    """

    backend: str
    quantizes: bool = False
    weight: WeightFormat | None = None

    def takes(self, scheme: Scheme) -> bool:
        """Whether it computes layers of `scheme`."""
        return (self.quantizes or scheme.act == A16) and self.weight in (None, scheme.weight)


def _humming(
    *names: str, quantizes: bool = False, weight: WeightFormat | None = None
) -> dict[str, EngineLayout]:
    return dict.fromkeys(names, EngineLayout("humming", quantizes, weight))


ENGINE_LAYOUTS: Mapping[str, EngineLayout] = {
    **dict.fromkeys(("marlin-mxfp4", "marlin-int4", "marlin-int8"), EngineLayout("marlin")),
    **dict.fromkeys(("triton-hopper", "triton-blackwell"), EngineLayout("triton")),
    "cutlass-sm90": EngineLayout("flashinfer_cutlass"),
    "trtllm-mxfp4": EngineLayout("flashinfer_trtllm"),
    **_humming("humming-int4", "humming-int8", "humming-int4-e0m3", "humming-int8-e0m7"),
    **_humming("humming-mxfp4", "humming-mxfp4-sm100"),
    **_humming("humming-mxfp8", "humming-mxfp8-sm100", quantizes=True),
    **_humming("humming-nvfp4", "humming-nvfp4-rows", "humming-nvfp4-sm100", quantizes=True),
    **_humming("humming-fp8", "humming-fp8-sm100", quantizes=True, weight=FP8_BLOCK),
}
"""By the name of the layout."""


@dataclass(frozen=True)
class ParameterNames:
    """The names of a method's parameters, without ``w13_`` and ``w2_``.

    Attributes:
        aliased: whether the kernel reads the weights as ``w13_weight`` and ``w2_weight`` too.
    """

    weight: str = "weight"
    scale: str = "weight_scale"
    zero: str = "weight_zero_point"
    second: str = "weight_scale_2"
    aliased: bool = False

    def of(self, role: str) -> str:
        """The parameter's name for a role such as ``w13_scale``."""
        matrix, _, kind = role.partition("_")
        names = {"": self.weight, "scale": self.scale, "zero": self.zero, "global": self.second}
        return f"{matrix}_{names.get(kind, kind)}"


_OF_INTEGERS = ParameterNames("qweight", "scales", "qzeros", aliased=True)

PARAMETERS: Mapping[str, ParameterNames] = {
    "GptOssMxfp4MoEMethod": ParameterNames(),
    "Mxfp4MoEMethod": ParameterNames(),
    "CompressedTensorsWNA16MoEMethod": ParameterNames("weight_packed", aliased=True),
    "AutoGPTQMoEMethod": _OF_INTEGERS,
    "AutoAWQMoEMethod": _OF_INTEGERS,
    "CompressedTensorsW4A4Nvfp4MoEMethod": ParameterNames(),
    "Fp8MoEMethod": ParameterNames(),
    "ModelOptMxFp8FusedMoE": ParameterNames(),
}
"""By the class of vLLM's method."""


def untaken(layout: str, problem: MoEProblem) -> str:
    """Why no kernel of vLLM's takes layers such as `problem` in one of `ENGINE_LAYOUTS`; empty if it does."""
    kernel = ENGINE_LAYOUTS[layout]
    if not kernel.takes(problem.scheme):
        return f"vLLM's kernels do not take {problem.scheme.words} in the layout {layout} as it is"
    device, packages = find_device(LAYOUTS[layout].archs[-1]), packages_from("full")
    try:
        method = select(problem, device, packages, policy_named(RULES), only=kernel.backend).method
    except OutOfScope as error:
        return error.what
    if method not in PARAMETERS:
        return f"vLLM computes them with {method}, and moectl does not know how that takes {layout}"
    return ""
