"""An engine that nobody has written, as a folder of its own: what a new engine brings, and no more."""

from pathlib import Path

from moectl.environment.package_probes import Probe
from moectl.oracle.decision import NAME
from moectl.oracle.engine import CacheFolder, CompiledKernels, Engine, Profile, Recordings, Repacking
from moectl.problem.schemes import MXFP4

from .backends import KERNELS
from .policy import POLICY

ACME = Engine(
    policy=POLICY,
    title="Acme",
    family="acme",
    package="acme_serve",
    env_prefix="ACME_",
    env_example="ACME_QUICK=1",
    other_variables=lambda: frozenset({"ACME_PORT"}),
    packages={
        "acme_kernels": Probe(("acme_kernels",), symbols=("moe.quick",), get="pip install acme-kernels"),
        "acme_cubin": Probe(("acme_cubin",)),
    },
    compiled_kernels=(
        CompiledKernels(
            "acme_kernels", "Acme's library", KERNELS, "kernels (acme-cubin)", "install {version}"
        ),
    ),
    profiles=lambda: {"acme_full": Profile(("acme_kernels", "acme_cubin"), {"ACME_QUICK": "1"})},
    default_profiles={"cuda": "acme_full"},
    caches=(CacheFolder("Acme", "ACME_CACHE", "~/.acme"),),
    repacking=(("acme-rows", Repacking(0, 2, "w2 is turned over twice")),),
    recordings=Recordings(
        Path(__file__).with_name("grid.json"),
        gates={"no such runner": NAME},
        rounded={"four bits": MXFP4},
        without_meaning=lambda platform, exchange: platform == "rocm",
    ),
)
