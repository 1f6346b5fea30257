"""Names of the engines and libraries that load moectl's experts, for command lines. Imports nothing."""

ENGINE_NAMES = ("vllm", "sglang", "transformers")

SWITCH = "MOECTL_EXPERTS"
"""Environment variable: ``kernels`` takes experts over in published checkpoints without --quantization."""
