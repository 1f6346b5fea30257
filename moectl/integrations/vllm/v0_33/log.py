"""Where moectl's lines go in vLLM's log."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger


def logger_of(module: str) -> Any:
    """vLLM's logger for a module of moectl, whose lines vLLM prints.

    Its default configuration has handlers for loggers below ``vllm`` alone: what others say of less than a
    warning is lost.
    """
    return init_logger(f"vllm.{module}")
