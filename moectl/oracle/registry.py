"""Policies by name."""

from __future__ import annotations

from ..errors import UsageError
from .policies.native import MOECTL
from .policies.vllm_0_33_0 import VLLM_0_33_0
from .policy import Policy

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (VLLM_0_33_0, MOECTL)}
DEFAULT = VLLM_0_33_0.name
NEWEST = "vllm"
"""Stands for the newest version of vLLM's policy."""


def policy_named(name: str = DEFAULT) -> Policy:
    """The policy called `name`; ``vllm`` is its newest version. UsageError lists what there is."""
    found = POLICIES.get(DEFAULT if name == NEWEST else name)
    if found is None:
        raise UsageError(f"there is no policy {name!r}; known are {', '.join(POLICIES)}")
    return found
