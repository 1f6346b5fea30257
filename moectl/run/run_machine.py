"""The machine that layers run on, and the backends that support a layer on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..cache import backend_times_file
from ..cache.cache_file import CacheWarning
from ..environment import Device, Packages, detect_cpu, detect_device
from ..environment.named_devices import bandwidth_by_torch
from ..environment.nvidia import DriverFailure, cuda_device
from ..errors import MoectlError, NoBackend, Unavailable, UsageError
from ..oracle.decision import Decision
from ..oracle.machine_packages import packages_from, packages_of_rules
from ..oracle.registry import engine_named, policy_named
from ..oracle.select import select
from ..oracle.verdict_sentences import sentence
from ..problem.moe_problem import MoEProblem
from .run_plan import POLICY


@dataclass(frozen=True)
class RunMachine:
    """Where a layer runs: torch's device, and the same machine in the oracle's terms."""

    torch: torch.device
    device: Device
    packages: Packages


def this_machine(device: str | None = None) -> RunMachine:
    """This machine with `device` (``cpu`` or ``cuda``; default: a GPU if there is one).

    Raises Unavailable if torch has no such device, or by default if it cannot use a GPU that is there, and
    DriverFailure if the GPU's driver fails.

    Example:
        >>> machine = this_machine("cpu")
        >>> machine.torch.type, machine.device.platform
        ('cpu', 'cpu')
    """
    usable, packages = torch.cuda.is_available(), packages_from(None)
    if not device and not usable:
        refuse_unusable_gpu(detect_device())
    if device == "cpu" or not (device or usable):
        return RunMachine(torch.device("cpu"), detect_cpu(), packages)
    if not usable:
        refuse_unusable_gpu(detect_device())
        raise Unavailable("torch sees no CUDA device", hint="run on the CPU with --device cpu")
    return RunMachine(torch.device("cuda"), _gpu(), packages)


def machine_of(device: torch.device) -> RunMachine:
    """The machine of a process that uses `device` already, to choose among moectl's backends in.

    torch says which GPU it is. Neither the driver's tools are asked nor are the rules of engines made, which
    would take a good part of a server's start.

    Raises as `this_machine` for a device that torch cannot use, or that is neither a CPU nor a GPU.

    Example:
        >>> machine_of(torch.device("cpu")).device.platform
        'cpu'
    """
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        return this_machine(device.type)
    found = detect_cpu() if device.type == "cpu" else _used_gpu(device)
    return RunMachine(device, found, packages_of_rules(engine_named(POLICY)))


def refuse_unusable_gpu(device: Device) -> None:
    """Raises Unavailable if `device` is a GPU on which moectl could run, since torch sees none."""
    if device.platform not in ("cuda", "rocm"):
        return
    built = torch.version.cuda or torch.version.hip
    platform = "CUDA" if device.platform == "cuda" else "ROCm"
    why = f"is built for {built} and sees no GPU" if built else f"is built without {platform}"
    advice = "update the driver or torch" if built else f"install a build of torch for {platform}"
    raise Unavailable(
        f"this machine has {device.name}, but torch {torch.__version__} {why}",
        hint=f"{advice}, or run on the CPU with --device cpu",
    )


def _gpu() -> Device:
    """The first visible GPU, by torch's own account if the driver's tools are not there."""
    try:
        return detect_device()
    except DriverFailure:
        if torch.version.cuda is None:
            raise
    return _by_torch(torch.device("cuda", 0))


def _used_gpu(device: torch.device) -> Device:
    """The GPU `device`; slices of GPUs, whose rates nobody publishes, are for the driver to describe."""
    sliced = torch.version.cuda is None or " MIG " in torch.cuda.get_device_name(device)
    return _gpu() if sliced else _by_torch(device)


def _by_torch(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    return cuda_device(
        properties.name,
        f"sm{properties.major}{properties.minor}",
        properties.total_memory >> 20 << 20,
        properties.multi_processor_count,
        bandwidth_by_torch(properties),
    )


@dataclass(frozen=True)
class BackendChoice:
    """The backends that support a layer on a machine, and the decision that they come from.

    Attributes:
        names: runners that support it: the requested ones in that order, then the others, best first.
        refused: requested backends that do not support it, each with the reason.
        decision: the policy's decision without a request; None if only requested backends were considered.
    """

    names: tuple[str, ...]
    refused: Mapping[str, MoectlError] = field(default_factory=dict)
    decision: Decision | None = None

    def require(self) -> BackendChoice:
        """`self`; raises `unsupported_error` if backends were requested and none supports the layer."""
        if self.refused and not self.names:
            raise unsupported_error(tuple(self.refused.values()))
        return self

    @property
    def by_measurement(self) -> str:
        """Why measured times choose the first backend, as a sentence; empty if they do not."""
        decision = self.decision
        if decision is None or decision.ranking is None or decision.chosen is None:
            return ""
        if self.names[:1] != (decision.chosen.backend.runner,):
            return ""
        return f"{decision.ranking.best}: {decision.ranking}"

    @property
    def left_out(self) -> Mapping[str, str]:
        """Backends of the policy that do not support the layer, each with its first reason."""
        candidates = self.decision.candidates if self.decision else ()
        usable = {c.backend.name for c in candidates if c.usable}
        reasons: dict[str, str] = {}
        for c in candidates:
            if c.failed and c.backend.name not in usable:
                reasons.setdefault(c.backend.name, sentence(c.failed[0]))
        return reasons


Decide = Callable[[str | None], Decision]
"""The policy's decision if the named backend is requested, or none is."""


def choose_backends(
    problem: MoEProblem,
    machine: RunMachine,
    names: Sequence[str] = (),
    stored: str = "",
    *,
    fallback: bool = False,
) -> BackendChoice:
    """Runners that support `problem` on `machine`, best first; only `names` if any are given.

    The policy decides once for each of `names`, and once without a request if there are none or with
    `fallback`, which appends all other backends that support the problem. Backends that read the layout
    `stored` come first, since its weights need no repacking; then the fastest of those that
    `moectl bench --save` has measured on such a layer here (`BackendChoice.by_measurement`).

    Raises:
        NoBackend: no backend supports the problem; the reasons are in the text.
        UsageError: one of `names` is not a backend.

    Example:
        >>> from moectl.problem.published_layers import named_problem
        >>> _, problem = named_problem("gpt-oss-20b")
        >>> choose_backends(problem, this_machine("cpu"), ["torch"]).names
        ('torch',)
    """
    times = backend_times_file.known(machine.device, problem, machine.packages.versions)
    for note in times.notes:
        warnings.warn(note, CacheWarning, stacklevel=2)

    def decide(name: str | None) -> Decision:
        policy = policy_named(POLICY)
        return select(problem, machine.device, machine.packages, policy, name, measured=times.measured)

    supporting: list[str] = []
    refused: dict[str, MoectlError] = {}
    for name in dict.fromkeys(names):
        try:
            supporting.append(_requested(name, decide))
        except (NoBackend, Unavailable) as error:
            refused[name] = error
    decision = decide(None) if fallback or not names else None
    if decision is not None:
        if not decision.best_first:
            raise NoBackend(decision.error)
        ranked = sorted(decision.best_first, key=lambda c: not stored or c.layout != stored)
        supporting += [c.backend.runner for c in ranked]
    return BackendChoice(tuple(dict.fromkeys(supporting)), refused, decision)


def unsupported_error(refused: Sequence[MoectlError]) -> MoectlError:
    """The error if no requested backend supports a layer: the only one, or one that lists them all."""
    if len(refused) == 1:
        return refused[0]
    unavailable = next((error for error in refused if isinstance(error, Unavailable)), None)
    listed = "; ".join(error.what for error in refused)
    text = f"none of the requested backends supports this layer: {listed}"
    return Unavailable(text, hint=unavailable.hint) if unavailable else NoBackend(text, hint=refused[0].hint)


def _requested(name: str, decide: Decide) -> str:
    """The runner of the backend `name`; Unavailable or NoBackend if it does not support the problem."""
    decision = decide(name)
    if not decision.candidates:
        names = [c.backend.name for c in decide(None).candidates]
        raise UsageError(f"no backend that runs here is called {name!r}; there are {', '.join(names)}")
    if decision.chosen is not None:
        return decision.chosen.backend.runner
    wrong_device = any(v.group == "arch" for c in decision.candidates for v in c.failed)
    kind = Unavailable if wrong_device else NoBackend
    raise kind(decision.error, hint=f"moectl explain CKPT --policy {POLICY} lists every reason")
