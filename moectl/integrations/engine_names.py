"""Names of the engines and libraries that load moectl's experts, for command lines. Imports nothing."""

ENGINE_NAMES = ("vllm", "sglang", "transformers")
