"""Turns failures of a backend while it prepares or runs a layer into errors that name the backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import BackendFailed, MoectlError


@contextmanager
def guarded(backend: str, layer: int) -> Iterator[None]:
    """Turns what `backend` raises inside into a BackendFailed with its name, the layer and the reason.

    MoectlErrors and OSErrors pass through.
    """
    try:
        yield
    except BackendFailed as error:
        raise error.on(layer) from error.__cause__
    except (MoectlError, OSError):
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise BackendFailed(
            backend,
            f"{type(error).__name__}: {text}" if text else type(error).__name__,
            layer=layer,
            hint="choose another with --backend, or let the next one take over with --allow-fallback",
        ) from error


def device_failure(device: torch.device) -> str:
    """Why this process can no longer use `device`, as a sentence; empty if it can."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the GPU cannot be used by this process any more: {str(error).splitlines()[0]}"
    return ""
