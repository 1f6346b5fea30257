"""What is to be served, and what of it is asked in more than one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..environment import Device
from ..errors import MoectlError
from ..kernels.registry import RUNNERS
from .model_experts import BACKEND
from .serve_report import REFUSED, ServeFinding
from .served_engines import ServedEngine


@dataclass(frozen=True)
class ServeRequest:
    """What is to be served, where and how.

    Attributes:
        checkpoint: a directory or Hub id.
        device: the GPU of each rank.
        tp, ep: sizes of tensor and expert parallelism, as the engine counts.
        options: of the engine's command line, ``--name`` to value; True and False for flags.
        release: of the engine, to be assumed; None for what is installed.
        verify: hash all files of a converted directory.
        offline: do not contact the Hub.
        stated: whether `device` was stated, not found on this machine.
    """

    checkpoint: str
    engine: ServedEngine
    device: Device
    tp: int = 1
    ep: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    release: str | None = None
    verify: bool = False
    offline: bool = False
    stated: bool = False


def refusal_of(about: str, error: MoectlError) -> ServeFinding:
    """The finding that an error is."""
    says = ". ".join(filter(None, (error.what, error.reason.removesuffix("."))))
    return ServeFinding(about, REFUSED, says, error.hint)


def asked_backend(request: ServeRequest) -> str:
    """The backend of every layer that `BACKEND` names, or the engine's word for its own; else empty."""
    name = named_backend(request)
    return name if name in RUNNERS or name == request.engine.own_kernels else ""


def named_backend(request: ServeRequest) -> str:
    """What `BACKEND` says; engines alone read it, a program that imports moectl names its backend itself."""
    return os.environ.get(BACKEND, "") if request.engine.group else ""


def left_to_engine(request: ServeRequest) -> bool:
    """Whether `BACKEND` leaves all experts to the engine's own kernels."""
    return bool(request.engine.own_kernels) and asked_backend(request) == request.engine.own_kernels
