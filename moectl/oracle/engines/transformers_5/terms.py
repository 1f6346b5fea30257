"""transformers' names for what a checkpoint, a device and the arguments of `from_pretrained` are."""

from __future__ import annotations

from ....environment import Device, Packages
from ....environment.variables import ONE, TEXT, Variable
from ....problem.moe_problem import MoEProblem
from ...backend import PackageNeed, SupportQuery
from ...gpu_archs import CPU, CUDA, ROCM, XPU, Arch, Archs, gfx, sm
from ...route import Condition
from .releases import Release

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "deepgemm_megamoe")
"""Values of `experts_implementation`."""
DEQUANTIZE, USE_KERNELS = "dequantize", "use_kernels"
"""Other arguments that are requested like backends; `dequantize+deepgemm` has both."""

HUB_KERNELS = Variable(
    "USE_HUB_KERNELS", "fetches kernels from the Hugging Face Hub", TEXT, "YES", ("YES", "NO")
)
NO_DEEP_GEMM = Variable(
    "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "computes FP8 linear layers without DeepGEMM", ONE
)
VARIABLES = {variable.name: variable for variable in (HUB_KERNELS, NO_DEEP_GEMM)}
OTHER_VARIABLES = frozenset(
    {
        "TRANSFORMERS_CACHE", "TRANSFORMERS_DISABLE_TORCH_CHECK", "TRANSFORMERS_IS_CI",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_SDPA_FORCE_GQA",
        "TRANSFORMERS_VERBOSITY",
    }
)  # fmt: skip

GFX9 = gfx("gfx90a", "gfx942", "gfx950")
HOPPER: Archs = (sm(90, 99), GFX9)
"""Devices of capability 9; AMD's gfx9 report it, too."""
BLACKWELL = sm(100, 109)
BEFORE_SM80 = Arch("cuda", high=79)
NATIVE_FP8: Archs = (sm(89), ROCM, XPU)
EVERYWHERE: Archs = (CUDA, ROCM, XPU, CPU)
_NESTED = frozenset({"kimi_k25"})
"""Composite models whose text model has another name in config.json than in transformers."""
_ON = frozenset({"1", "ON", "YES", "TRUE"})

ACCELERATE = PackageNeed("accelerate", code="ImportError", oldest="1.1.0")
COMPRESSED_TENSORS = PackageNeed("compressed_tensors", code="ImportError", oldest="0.15.0")
GPTQMODEL = PackageNeed("gptqmodel", code="ImportError")
GPTQMODEL_FOR_GPTQ = PackageNeed("gptqmodel", code="ImportError", oldest="1.4.3")
OPTIMUM = PackageNeed("optimum", code="ImportError")
OPTIMUM_FOR_GPTQ = PackageNeed("optimum", code="ImportError", oldest="1.24.0")
QUARK = PackageNeed("quark", code="ImportError")


def kernels(release: Release) -> PackageNeed:
    """The package that loads kernels from the Hub, in the versions that the release accepts."""
    oldest, below = release.kernels
    return PackageNeed("kernels", code="ImportError", oldest=oldest, below=below)


def hub_kernels(packages: Packages) -> bool:
    """True unless the environment forbids kernels of the Hub."""
    return packages.env.get(HUB_KERNELS.name, HUB_KERNELS.default).upper() in _ON


def on(device: Device, *archs: Arch) -> bool:
    """True when `device` is in one of the sets."""
    return any(arch.fits(device) for arch in archs)


def gpu(device: Device) -> bool:
    """True for what torch calls CUDA."""
    return device.platform in ("cuda", "rocm")


def has_interface(problem: MoEProblem, release: Release) -> bool:
    """True when the model's experts follow `experts_implementation`."""
    return problem.model_type not in release.models.own


def asks(ask: SupportQuery, argument: str) -> bool:
    """True when `argument` is one of those requested."""
    return argument in ask.request.split("+")


def without(need: PackageNeed, what: str, spared: str = "") -> Condition:
    """What fails without a package; with the argument `spared` it is not looked for."""
    return Condition(
        need.package,
        lambda ask: not need.met(ask.packages) and not (spared and asks(ask, spared)),
        lambda ask: f"{what} needs {need}; {found(ask, need.package)}",
        kind=need.code,
    )


def found(ask: SupportQuery, package: str) -> str:
    """Which version of a package there is, as half a sentence."""
    version = ask.packages.versions.get(package)
    return "it is not installed" if version is None else f"found {version or 'an unknown version'}"


def unknown_model(release: Release) -> Condition:
    """Models that only code from their own repository can load."""
    known = release.models.known | _NESTED

    def unknown(ask: SupportQuery) -> bool:
        name = ask.model.model_type or ask.problem.model_type
        return bool(name) and name not in known

    return Condition(
        "model",
        unknown,
        lambda ask: (
            f"transformers {release.version} does not know the model type "
            f"{ask.model.model_type or ask.problem.model_type}: it would need code from the checkpoint's "
            "repository (trust_remote_code=True)"
        ),
    )


STRICT = Condition(
    "config",
    lambda ask: ask.problem.model_type == "dbrx",
    lambda ask: "transformers refuses DBRX's published config.json: a field has a whole number for a float",
    kind="StrictDataclassFieldValidationError",
)


def dtype(problem: MoEProblem, device: Device) -> str:
    """The model's dtype; AWQ runs in float16 on GPUs."""
    return "fp16" if problem.storage == "awq" and device.platform != "cpu" else problem.dtype


def activation(problem: MoEProblem) -> str:
    """The name of the activation function; clamps and factors are the model's own."""
    return problem.activation.name


def routing(problem: MoEProblem) -> str:
    """The routing method, by how scores are computed; it is the model's own."""
    return problem.routing.scoring
