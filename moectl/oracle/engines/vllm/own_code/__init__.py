"""vLLM's own selection code, run in a process that has vLLM and not moectl."""

from pathlib import Path

WORKER = Path(__file__).with_name("vllm_worker.py")
"""Records decisions of a release, as a script."""
