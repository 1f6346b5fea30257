"""transformers 5.x: quantizers, implementations of experts, packages and environment variables."""

from ....environment.package_probes import Probe
from ...engine import CacheFolder, Engine, Profile
from .policy import policy
from .releases import RELEASES, Release
from .terms import OTHER_VARIABLES

_PACKAGES = {
    "kernels": Probe(
        ("kernels",), "kernels", get="pip install kernels, in the versions that the release accepts"
    ),
    "accelerate": Probe(("accelerate",), "accelerate", get="pip install accelerate"),
    "triton": Probe(("triton",), "triton", get="comes with torch for CUDA"),
    "compressed_tensors": Probe(
        ("compressed_tensors",), "compressed-tensors", get="pip install compressed-tensors"
    ),
    "gptqmodel": Probe(("gptqmodel",), "gptqmodel", get="pip install gptqmodel"),
    "optimum": Probe(("optimum",), "optimum", get="pip install optimum"),
    "quark": Probe(("quark",), "amd-quark", get="pip install amd-quark"),
    "nvidia_cutlass_dsl": Probe(("cutlass",), "nvidia-cutlass-dsl", get="pip install nvidia-cutlass-dsl"),
    "apache_tvm_ffi": Probe(("tvm_ffi",), "apache-tvm-ffi", get="pip install apache-tvm-ffi"),
}
_QUANTIZERS = ("accelerate", "compressed_tensors", "gptqmodel", "optimum", "quark")
_HUB = ("kernels", "triton")


def _engine(release: Release) -> Engine:
    return Engine(
        policy=policy(release),
        title="transformers",
        family="transformers",
        package="transformers",
        env_prefix="TRANSFORMERS_",
        env_example="USE_HUB_KERNELS=NO",
        other_variables=lambda: OTHER_VARIABLES,
        packages=_PACKAGES,
        profiles=lambda: {
            "transformers": Profile((*_QUANTIZERS, *_HUB, "nvcc", "nvidia_cutlass_dsl", "apache_tvm_ffi")),
            "transformers_hub": Profile((*_QUANTIZERS, *_HUB)),
            "transformers_usual": Profile((*_QUANTIZERS, "triton")),
        },
        default_profiles={
            "cuda": "transformers",
            "rocm": "transformers_hub",
            "xpu": "transformers_hub",
            "cpu": "transformers_hub",
        },
        caches=(CacheFolder("Hugging Face Hub", "HF_HUB_CACHE", "~/.cache/huggingface/hub"),),
        beside=False,
    )


def engine(version: str) -> Engine:
    """transformers `version`."""
    return next(_engine(release) for release in RELEASES if release.version == version)
