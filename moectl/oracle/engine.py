"""One version of an inference engine: everything that commands need to know about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, LayerGroup
from ..environment.package_probes import Probe
from ..environment.variables import VariableFinding, judge_variables
from ..problem.model_shape import pipeline_stages, stated_stages
from ..problem.schemes import WeightFormat
from .backend import PackageNeed
from .name_history import NameHistory, ReleaseNames
from .policy import Policy
from .reported_effects import ReportedEffect
from .selection_inputs import SelectionInputs
from .tuned_files import TunedFiles


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of packages and environment variables that an installation is assumed to have."""

    packages: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def no_profiles() -> Mapping[str, Profile]:
    """No profiles."""
    return {}


def no_names() -> frozenset[str]:
    """No further variables."""
    return frozenset()


NO_HISTORY = NameHistory({})
"""Of an engine whose earlier releases were not read."""


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """What a package needs to run its kernels: precompiled kernels, or the tools to compile them.

    Attributes:
        package: its name in `Packages`; `title`: its official spelling.
        need: what must be available.
        kernels: what the precompiled kernels are called, with the package that has them.
        get: what to do, with ``{version}`` for the installed version of `package`.
    """

    package: str
    title: str
    need: PackageNeed
    kernels: str
    get: str


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A cache directory of compiled kernels: the variable that sets it, and its default.

    `default` may begin with ``~`` (home), ``@cache`` (the user's caches) or ``@inductor``. `below` is the
    path inside the directory that the variable names.
    """

    name: str
    variable: str
    default: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class Repacking:
    """Temporary copies of w13 and of w2 at the peak of an engine's repacking of one layer.

    Only tensors as large as a layer's weights with their scales count; scratch space of single experts
    is ignored. `why` describes the copies.
    """

    w13: int
    w2: int
    why: str


AS_LOADED = Repacking(0, 0, "weights are used as loaded")
ASSUMED = Repacking(1, 1, "assumed: one temporary copy")


@dataclass(frozen=True, slots=True)
class Recordings:
    """How to read decisions recorded from an engine, for `scripts/conformance`.

    Attributes:
        grid: the JSON file with the inputs behind recorded names.
        gates: words in a recorded refusal, with the kind of `Gate`.
        rounded: weight formats whose sizes the engine pads, by the name in recorded paddings.
        without_meaning: True for the platform and exchange of a recorded case that is meaningless.
    """

    grid: Path
    gates: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, WeightFormat] = field(default_factory=dict)
    without_meaning: Callable[[str, str], bool] = lambda platform, exchange: False


@dataclass(frozen=True, slots=True)
class OwnCode:
    """How an engine's own selection code is asked, in a process of a Python that has the engine.

    Attributes:
        script: what that Python runs. It reads a question as JSON from stdin and writes its answer to
            the question's `out`: `version`, `own_device`, and `rows` like recorded decisions; or `absent`, or
            `failed` with an exception.
        question: what it is asked about layer groups of a checkpoint; UsageError for what it cannot be.
        compiled: files in the engine's package that only a complete installation has.
    """

    script: Path
    question: Callable[[Checkpoint, list[tuple[LayerGroup, SelectionInputs]]], dict[str, Any]]
    compiled: str = "*.so"


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One version of an engine; what it does not have stays empty.

    Attributes:
        policy: which backend it chooses; its name is the engine's, as for `--policy`.
        title: its official spelling.
        family: the name for the newest version, as for `--policy`.
        package: its Python package; empty if there is none to install.
        env_prefix: prefix of its environment variables; empty if it has none.
        env_example: one of them with a value, for usage errors.
        other_variables: its variables that are unrelated to experts; with a `history`, those are read there.
        history: which releases knew which names.
        reports: what changes of backends between its releases did, as users measured it.
        packages: optional packages that its rules check, with the probe for each.
        compiled_kernels: packages that need precompiled kernels or compilers.
        profiles: installations by name; `default_profiles` names the usual one of each platform.
        caches: its caches of compiled kernels.
        repacking: by layout name prefix, first match: how it makes the layout after loading.
        tuned_files: kernel config files that its experts look up.
        kernel_names: by prefix of an experts class, first match: what the field calls its kernels.
        memory_share: the share of a GPU's memory that it uses by default, for weights and all else;
            `memory_option` changes it.
        stages_variable: the environment variable with the number of layers of each pipeline stage, as a
            comma-separated list; empty if it has none.
        own_code: how its own selection code is asked; None if it cannot be.
        recordings: how decisions recorded from it are read.
        beside: it answers beside the engine that was asked for, without being named.
    """

    policy: Policy
    title: str
    family: str
    package: str = ""
    env_prefix: str = ""
    env_example: str = "NAME=1"
    other_variables: Callable[[], frozenset[str]] = no_names
    history: ReleaseNames | None = None
    reports: tuple[ReportedEffect, ...] = ()
    packages: Mapping[str, Probe] = field(default_factory=dict)
    compiled_kernels: tuple[CompiledKernels, ...] = ()
    profiles: Callable[[], Mapping[str, Profile]] = no_profiles
    default_profiles: Mapping[str, str] = field(default_factory=dict)
    caches: tuple[CacheFolder, ...] = ()
    repacking: tuple[tuple[str, Repacking], ...] = ()
    tuned_files: TunedFiles | None = None
    kernel_names: tuple[tuple[str, str], ...] = ()
    memory_share: float = 1.0
    memory_option: str = ""
    stages_variable: str = ""
    own_code: OwnCode | None = None
    recordings: Recordings | None = None
    beside: bool = True

    @property
    def name(self) -> str:
        """Its name with the version."""
        return self.policy.name

    @property
    def version(self) -> str:
        """The version that its rules are of; empty for an engine without a package."""
        return self.name.removeprefix(f"{self.family}-") if self.package else ""

    @property
    def versioned(self) -> str:
        """Its official spelling with the version, for sentences."""
        return f"{self.title} {self.version}".rstrip()

    def other_version(self, installed: str) -> str:
        """The warning that the `installed` version is not the one of the rules; empty if it is.

        Local and post-release parts of a version do not count. An empty version is unknown.
        """
        if re.split(r"\+|\.?post", installed)[0] == self.version:
            return ""
        found = f"{self.title} {installed} is" if installed else f"{self.title} of unknown version is"
        return f"{found} installed, these rules are {self.versioned}'s; its choice may differ"

    def reads(self, variable: str) -> bool:
        """True if `variable` is an environment variable of this engine."""
        prefixed = bool(self.env_prefix) and variable.startswith(self.env_prefix)
        return prefixed or variable in self.policy.variables

    def judge(self, env: Mapping[str, str]) -> tuple[VariableFinding, ...]:
        """Findings about the engine's variables in `env`; empty if the policy lists no variables."""
        if not self.policy.variables:
            return ()
        if self.history is None:
            others, variables = self.other_variables(), NO_HISTORY
        else:
            others, variables = self.history.variables.at(self.version), self.history.variables
        return judge_variables(
            env,
            self.policy.variables,
            self.versioned,
            prefix=self.env_prefix,
            others=others,
            dropped=lambda name: self._called(variables.dropped(name, self.version)),
            added=lambda name: self._called(variables.added(name, self.version)),
        )

    def _called(self, release: str) -> str:
        return f"{self.title} {release}" if release else ""

    def kernel_name(self, experts: str) -> str:
        """What the field calls the kernels of an experts class; empty if the class says it itself."""
        return next((name for prefix, name in self.kernel_names if experts.startswith(prefix)), "")

    def stages(self, layers: int, stages: int, env: Mapping[str, str]) -> tuple[int, ...]:
        """Layers of each of the pipeline `stages`: as `stages_variable` in `env` says, else equal shares.

        A list for another number of layers or stages is not followed; whether the engine refuses it is for
        its deployment checks to say. Raises UsageError for more equal stages than layers.
        """
        stated = stated_stages(env[self.stages_variable]) if self.stages_variable in env else None
        if stated is not None and len(stated) == stages and sum(stated) == layers and min(stated) >= 0:
            return stated
        return pipeline_stages(layers, stages)

    def repacked(self, layout: str) -> Repacking:
        """How `layout` is made after loading; without a layout, weights are used as loaded."""
        if not layout:
            return AS_LOADED
        return next((row for prefix, row in self.repacking if layout.startswith(prefix)), ASSUMED)
