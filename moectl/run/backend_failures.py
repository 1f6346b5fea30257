"""A backend's failure while it prepares or runs a layer, as an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import BackendFailed, MoectlError


@contextmanager
def guarded(backend: str, layer: int) -> Iterator[None]:
    """What `backend` raises in here as a BackendFailed with its name, the layer and the reason.

    Errors that explain themselves already, and those of files, pass through.
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


def lost(device: torch.device) -> str:
    """Why nothing more can run on `device` in this process, in a sentence; empty when it can."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the GPU cannot be used by this process any more: {str(error).splitlines()[0]}"
    return ""
