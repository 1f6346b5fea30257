"""Which backend `moe_config.backend` AUTO stands for, and which implementations a backend considers.

Preferences only: what cannot serve a layer is rejected by the implementations themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...backend import SupportQuery
from ...gpu_archs import Archs, sm
from .terms import SM100F

KIMI_K3 = frozenset({"KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"})
DEEPSEEK_V4 = frozenset({"DeepseekV4ForCausalLM"})
GPT_OSS = frozenset({"GptOssForCausalLM"})
QWEN35 = frozenset({"Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"})


@dataclass(frozen=True, slots=True)
class Preference:
    """The backend for some models (None: all) and formats (empty: all) on some devices."""

    backend: str
    models: frozenset[str] | None = None
    algorithm: str = ""
    where: Archs | None = None

    def fits(self, ask: SupportQuery, algorithm: str) -> bool:
        """True when it applies to a layer of the format `algorithm`."""
        return (
            (self.models is None or ask.model.architecture in self.models)
            and (not self.algorithm or self.algorithm == algorithm)
            and (self.where is None or any(arch.fits(ask.device) for arch in self.where))
        )


PREFERENCES = (
    Preference("marlin", QWEN35, "NVFP4", (sm(89, 99),)),
    Preference("marlin", QWEN35, "W4A16_NVFP4", (sm(89, 99),)),
    Preference("cutlass", QWEN35, "W4A16_NVFP4"),
    Preference("trtllm", KIMI_K3),
    Preference("trtllm", DEEPSEEK_V4, where=(sm(100, 119),)),
    Preference("cutedsl", algorithm="W4A16_NVFP4", where=(sm(120, 121),)),
    Preference("marlin", algorithm="W4A16_NVFP4", where=(sm(90, 99),)),
    Preference("trtllm", GPT_OSS, where=(sm(100, 119),)),
    Preference("triton", GPT_OSS, where=(sm(90, 99),)),
    Preference("cutlass", GPT_OSS),
    Preference("trtllm", algorithm="FP8_BLOCK_SCALES", where=SM100F),
    Preference("cutlass"),
)
"""AUTO, by the first row that fits: defaults of Qwen3.5's class, then `ModelConfig.resolve_moe_backend`.

The latter looks at the format of the whole checkpoint; Qwen3.5 with W4A16_NVFP4 experts is mixed precision.
"""

STRICT = frozenset({"vanilla"})
"""Backends that nothing replaces if they cannot serve a layer."""
STRICT_KIMI_K3 = frozenset({"megamoe_deepgemm", "megamoe_cutedsl", "cutedsl"})
"""Further ones for Kimi-K3, whose model forbids the replacement."""


def preferred(ask: SupportQuery, algorithm: str) -> str:
    """The requested backend, or the one that AUTO stands for; without `algorithm`, by the model alone."""
    return ask.request or next(row.backend for row in PREFERENCES if row.fits(ask, algorithm))


def falls_back(ask: SupportQuery, backend: str) -> bool:
    """True if CUTLASS may run a layer that `backend` cannot serve."""
    strict = STRICT | STRICT_KIMI_K3 if ask.model.architecture in KIMI_K3 else STRICT
    return backend not in strict
