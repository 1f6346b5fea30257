"""One inference engine in one version, as everything that commands ask about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..environment.package_probes import Probe
from ..environment.variables import VariableFinding, judge_variables
from ..problem.schemes import WeightFormat
from .backend import PackageNeed
from .policy import Policy
from .tuned_files import TunedFiles


@dataclass(frozen=True, slots=True)
class Profile:
    """Packages and environment variables that are assumed of an installation, under one name."""

    packages: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def no_profiles() -> Mapping[str, Profile]:
    """The profiles of an engine that names none."""
    return {}


def no_names() -> frozenset[str]:
    """The further variables of an engine that has none."""
    return frozenset()


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """What a package needs before any of its kernels runs: compiled kernels, or the tools to compile them.

    Attributes:
        package: the package, by the name under which `Packages` lists it; `title` is how its makers spell it.
        need: what must be there.
        kernels: how compiled kernels are called, with the package that has them.
        get: what to do, with ``{version}`` for the installed version of `package`.
    """

    package: str
    title: str
    need: PackageNeed
    kernels: str
    get: str


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A cache of compiled kernels: the variable that moves it, and where it is without one.

    `default` may begin with ``~`` (the home folder), ``@cache`` (the user's caches) or ``@inductor``.
    `below` is where it is in the folder that the variable names.
    """

    name: str
    variable: str
    default: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class Repacking:
    """How many further copies of w13 and of w2 live at the peak of an engine's repacking of one layer.

    Counted are tensors as large as a layer's weights with their scales; scratch of single experts is
    small beside them and left out. `why` says what the copies are.
    """

    w13: int
    w2: int
    why: str


AS_LOADED = Repacking(0, 0, "weights are used as loaded")
ASSUMED = Repacking(1, 1, "assumed: one temporary copy")


@dataclass(frozen=True, slots=True)
class Recordings:
    """How to read an engine's recorded answers, for `conformance`.

    Attributes:
        grid: the JSON file of the inputs behind the names in them.
        gates: words of a recorded refusal, with the kind of our `Gate`.
        rounded: weight formats whose sizes the engine rounds, by the name in recorded roundings.
        without_meaning: platform and exchange of a cell that says nothing.
    """

    grid: Path
    gates: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, WeightFormat] = field(default_factory=dict)
    without_meaning: Callable[[str, str], bool] = lambda platform, exchange: False


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One engine in one version; parts that it does not have stay empty.

    Attributes:
        policy: which backend it chooses; its name is the engine's, as `--policy` takes it.
        title: how its makers spell it.
        family: what `--policy` takes for the newest version.
        package: its own package; empty where there is none to install.
        env_prefix: what its environment variables begin with; empty where it has none.
        env_example: one of them with a value, for a usage error.
        other_variables: further variables that it reads, which do not concern experts.
        packages: optional packages that its rules ask for, and how each is found.
        compiled_kernels: packages that are of no use without something else.
        profiles: installations by name; `default_profiles` names the usual one of each platform.
        caches: where it keeps what it has compiled.
        repacking: by the beginning of a layout's name, the first that fits: how it makes the layout after
            loading.
        tuned_files: files of launch choices that its experts look up.
        recordings: how its recorded answers are read.
    """

    policy: Policy
    title: str
    family: str
    package: str = ""
    env_prefix: str = ""
    env_example: str = "NAME=1"
    other_variables: Callable[[], frozenset[str]] = no_names
    packages: Mapping[str, Probe] = field(default_factory=dict)
    compiled_kernels: tuple[CompiledKernels, ...] = ()
    profiles: Callable[[], Mapping[str, Profile]] = no_profiles
    default_profiles: Mapping[str, str] = field(default_factory=dict)
    caches: tuple[CacheFolder, ...] = ()
    repacking: tuple[tuple[str, Repacking], ...] = ()
    tuned_files: TunedFiles | None = None
    recordings: Recordings | None = None

    @property
    def name(self) -> str:
        """Its name with the version."""
        return self.policy.name

    def reads(self, variable: str) -> bool:
        """True for the name of an environment variable that is this engine's."""
        return bool(self.env_prefix) and variable.startswith(self.env_prefix)

    def judge(self, env: Mapping[str, str]) -> tuple[VariableFinding, ...]:
        """What the engine makes of its variables in `env`; nothing where no variable of it is known."""
        if not self.policy.variables:
            return ()
        return judge_variables(
            env, self.policy.variables, self.name, prefix=self.env_prefix, others=self.other_variables()
        )

    def repacked(self, layout: str) -> Repacking:
        """How `layout` is made after loading; a backend that names no layout takes weights as they are."""
        if not layout:
            return AS_LOADED
        return next((row for prefix, row in self.repacking if layout.startswith(prefix)), ASSUMED)


def newest(engines: Iterable[Engine]) -> tuple[Engine, ...]:
    """The first engine of each family, in the order given."""
    found: dict[str, Engine] = {}
    for engine in engines:
        found.setdefault(engine.family, engine)
    return tuple(found.values())
