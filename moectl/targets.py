"""Kernel layouts by the name a user asks for, and who reads each: a table that needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reader:
    """An engine and its backends that read a layout."""

    engine: str
    backends: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.engine} {', '.join(self.backends)}"


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """What is known of a layout without building it.

    Attributes:
        target: what a user asks for; the scheme then picks the layout.
        archs: device architectures whose kernels read it.
        readers: engines and backends that read it.
    """

    target: str
    archs: tuple[str, ...]
    readers: tuple[Reader, ...]


_SM80_UP = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")

_MARLIN = LayoutFacts(
    "marlin",
    ("sm75", *_SM80_UP),
    (Reader("vLLM", ("marlin", "batched_marlin")),),
)

LAYOUTS: Mapping[str, LayoutFacts] = {
    "marlin-int4": _MARLIN,
    "marlin-int8": _MARLIN,
    "marlin-mxfp4": _MARLIN,
    "trtllm-mxfp4": LayoutFacts(
        "trtllm",
        ("sm100", "sm103"),
        (
            Reader("vLLM", ("flashinfer_trtllm", "flashinfer_trtllm_afp8")),
            Reader("FlashInfer", ("trtllm_fp4_block_scale_moe",)),
        ),
    ),
    "trtllm-mxint4": LayoutFacts(
        "trtllm",
        ("sm100", "sm103"),
        (Reader("vLLM", ("flashinfer_trtllm",)), Reader("FlashInfer", ("trtllm_mxint4_block_scale_moe",))),
    ),
    "triton-hopper": LayoutFacts(
        "triton-hopper",
        ("sm90",),
        (Reader("vLLM", ("triton", "triton_unfused")), Reader("triton_kernels", ("matmul_ogs",))),
    ),
    "cutlass-sm90": LayoutFacts(
        "cutlass-sm90",
        ("sm90",),
        (Reader("vLLM", ("flashinfer_cutlass",)), Reader("FlashInfer", ("cutlass_fused_moe",))),
    ),
    "moectl-mtile64": LayoutFacts("moectl", _SM80_UP, (Reader("moectl", ("triton",)),)),
}
"""Facts by the name of the layout."""

TARGETS: Mapping[str, tuple[Reader, ...]] = {
    facts.target: tuple(
        dict.fromkeys(r for other in LAYOUTS.values() if other.target == facts.target for r in other.readers)
    )
    for facts in LAYOUTS.values()
}
"""Readers by what a user asks for: the closed list of ``moectl convert --to``."""
