"""Names of the engines and libraries that load moectl's experts, and what asks them to. Imports no engine."""

import os

from ..errors import UsageError

ENGINE_NAMES = ("vllm", "sglang", "transformers")

SWITCH = "MOECTL_EXPERTS"
"""Environment variable: takes experts over in published checkpoints without --quantization."""

SWITCH_VALUES = ("kernels",)
"""What `SWITCH` may be, if it is set."""


def kernels_asked() -> bool:
    """Whether `SWITCH` asks for moectl's kernels; UsageError if it is set to what it does not know."""
    value = os.environ.get(SWITCH, "")
    if value and value not in SWITCH_VALUES:
        raise UsageError(
            f"{SWITCH} must be {' or '.join(SWITCH_VALUES)}, got {value}",
            hint="correct it, or unset it to leave published checkpoints to the engine",
        )
    return bool(value)
