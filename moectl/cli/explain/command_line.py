"""The `moectl explain` command for a question, with or without changes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...environment import INSTALLED, Device, find_device
from ...explain.assumed_machines import AssumedMachine
from ...explain.explanation import Question
from ...explain.proposed_changes import ProposedChange
from ...oracle.machine_packages import default_profile
from ...oracle.registry import engine_named
from ...problem.moe_problem import Parallel

ABSENT = "no"
"""The value of an omitted option."""


@dataclass(frozen=True)
class ExplainCommand:
    """A question as asked on the command line."""

    checkpoint: str
    machine: AssumedMachine
    question: Question
    env: tuple[tuple[str, str], ...] = ()
    policy: str = ""
    stated: tuple[tuple[str, str], ...] = ()

    def options(self) -> dict[str, str]:
        """Options by name; repeatable ones have their key after the name."""
        question, parallel = self.question, self.question.parallel
        return {
            "--gpu": self.machine.key or ABSENT,
            "--packages": self._packages(),
            "--python": self.machine.python or ABSENT,
            **{f"--env {key}": f"{key}={value}" for key, value in self.env},
            **parallel_options(parallel, question.policy.default_exchange),
            "--backend": question.backend or ABSENT,
            "--allow-fallback": "" if question.allow_fallback else ABSENT,
            **{f"--assume {key}": f"{key}={value}" for key, value in question.assumptions.items()},
            "--engine": self.policy or ABSENT,
            **dict(self.stated),
        }

    def _packages(self) -> str:
        """The stated packages; those of another environment go without saying."""
        machine = self.machine
        return ABSENT if machine.assumed or (machine.python and machine.spec == INSTALLED) else machine.spec

    def changed(self, changes: Iterable[ProposedChange]) -> str:
        """The `moectl explain` command with `changes`, applied largest first."""
        options, device = self.options(), self.machine.device
        for change in sorted(changes, key=lambda c: -c.size):
            for name, value in change.options:
                if name == "--gpu":
                    device = find_device(value)
                options |= self._changed(options, name, value, device)
        return shlex.join(["moectl", "explain", self.checkpoint, *words_of(options)])

    def besides(self) -> str:
        """The options that are neither the GPU nor the deployment's."""
        elsewhere = {"--gpu", *parallel_options(self.question.parallel, "")}
        return shlex.join(
            words_of({name: value for name, value in self.options().items() if name not in elsewhere})
        )

    def _changed(self, options: dict[str, str], name: str, value: str, device: Device) -> dict[str, str]:
        """The entries of `options` that a changed option replaces, for a command about `device`."""
        machine, policy = self.machine, self.question.policy
        if name in ("--env", "--assume"):
            return {f"{name} {value.split('=')[0]}": value}
        if name == "--packages":
            stated = not machine.assumed and device.platform == machine.device.platform
            usual = default_profile(device.platform, engine_named(policy.name))
            default = machine.spec if stated else usual
            before = default if options[name] == ABSENT else options[name]
            return {name: value if before == "none" else f"{before},{value}"}
        if name == "--gpu" and device.platform != machine.device.platform:
            # Stated packages belong to the original platform.
            return {name: value, "--packages": ABSENT}
        if name in ("--tp", "--dp") and value == "1":
            value = ABSENT
        if name == "--all2all" and value == policy.default_exchange:
            value = ABSENT
        return {name: value}


def words_of(options: Mapping[str, str]) -> list[str]:
    """Options as words of a command, without those that are absent; a flag's value is empty."""
    return [
        word
        for name, value in options.items()
        if value != ABSENT
        for word in (name.split(" ")[0], value)
        if word
    ]


def parallel_options(parallel: Parallel, usual: str) -> dict[str, str]:
    """Options of a deployment by name; `usual` is the exchange that goes without saying."""
    return {
        "--tp": str(parallel.tp) if parallel.tp > 1 else ABSENT,
        "--dp": str(parallel.dp) if parallel.dp > 1 else ABSENT,
        "--pp": str(parallel.pp) if parallel.pp > 1 else ABSENT,
        "--ep": "" if parallel.ep else ABSENT,
        "--all2all": parallel.all2all if parallel.states_exchange(usual) else ABSENT,
        "--eplb": "" if parallel.eplb else ABSENT,
    }
