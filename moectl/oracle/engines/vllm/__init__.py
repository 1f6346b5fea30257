"""vLLM's releases: the newest in full, each older one as its difference from the next."""

from ..vllm_0_33_0 import VLLM_0_33_0
from .v0_26_0 import VLLM_0_26_0
from .v0_28_0 import VLLM_0_28_0
from .v0_30_0 import VLLM_0_30_0
from .v0_31_0 import VLLM_0_31_0
from .v0_32_0 import VLLM_0_32_0

RELEASES = (VLLM_0_33_0, VLLM_0_32_0, VLLM_0_31_0, VLLM_0_30_0, VLLM_0_28_0, VLLM_0_26_0)
"""The newest first."""
