"""vLLM's releases: the newest in full, each older one as its difference from the next."""

from dataclasses import replace

from ..vllm_0_33_0 import VLLM_0_33_0
from .reports import REPORTS
from .v0_19_0 import VLLM_0_19_0
from .v0_20_0 import VLLM_0_20_0
from .v0_22_0 import VLLM_0_22_0
from .v0_23_0 import VLLM_0_23_0
from .v0_24_0 import VLLM_0_24_0
from .v0_26_0 import VLLM_0_26_0
from .v0_28_0 import VLLM_0_28_0
from .v0_30_0 import VLLM_0_30_0
from .v0_31_0 import VLLM_0_31_0
from .v0_32_0 import VLLM_0_32_0

RELEASES = tuple(
    replace(engine, reports=REPORTS)
    for engine in (
        VLLM_0_33_0,
        VLLM_0_32_0,
        VLLM_0_31_0,
        VLLM_0_30_0,
        VLLM_0_28_0,
        VLLM_0_26_0,
        VLLM_0_24_0,
        VLLM_0_23_0,
        VLLM_0_22_0,
        VLLM_0_20_0,
        VLLM_0_19_0,
    )
)
"""The newest first."""
