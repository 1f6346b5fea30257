"""The machine that transformers sees while it is asked: device, packages, variables, kernels of the Hub.

All of them are values; without moectl, and imported before transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

StandIns: Any = importlib.import_module("stand_ins").StandIns

MANAGED = {
    "kernels", "accelerate", "triton", "compressed_tensors", "gptqmodel", "optimum", "quark",
}  # fmt: skip
"""Packages whose presence and version a cell states; others are as they are here."""
DISTRIBUTIONS = {
    "nvidia-cutlass-dsl": "nvidia_cutlass_dsl", "apache-tvm-ffi": "apache_tvm_ffi",
    "gptqmodel": "gptqmodel", "optimum": "optimum",
}  # fmt: skip
"""Packages that are looked up by their distribution's name."""


class Reached(BaseException):
    """The first matrix product: `kernel` computes it."""

    def __init__(self, kernel: str) -> None:
        super().__init__(kernel)
        self.kernel = kernel


class HubKernel:
    """A kernel of the Hub: anything in it can be looked up, and a call says that it was reached."""

    def __init__(self, repository: str, name: str = "") -> None:
        self._repository, self._name = repository, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return HubKernel(self._repository, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "get_mk_alignment_for_contiguous_layout":
            return 128
        found = self._repository.removeprefix("kernels-community/")
        raise Reached(f"{found} {self._name}" if found == "finegrained-fp8" else found)


class Device:
    """A device as the package `kernels` has it; `properties` narrow its capability."""

    def __init__(self, type: str, properties: Any = None) -> None:
        self.type, self.properties = type, properties


class Kernels(types.ModuleType):
    """The package `kernels`: layers by the name under which their class was declared, and the mapping."""

    Device = Device

    def __init__(self) -> None:
        super().__init__("kernels")
        self.__path__: list[str] = []
        self.layers: dict[type, str] = {}
        self.mapping: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        anything: Any = importlib.import_module("stand_ins")._Anything
        made = type(name, (anything,), {})
        setattr(self, name, made)
        return made

    def use_kernel_forward_from_hub(self, layer: str) -> Any:
        """The decorator of classes whose forward may be replaced."""

        def declare(cls: type) -> type:
            self.layers[cls] = layer
            return cls

        return declare

    def register_kernel_mapping(self, mapping: dict[str, Any], **kwargs: Any) -> None:
        """Keep the mapping."""
        self.mapping = mapping

    def kernelize(self, model: Any, device: Any = "cuda", **kwargs: Any) -> None:
        """Mark the modules that have a kernel for the device."""
        kind = device if isinstance(device, str) else device.type
        for module in model.modules():
            layer = self.layers.get(type(module), "")
            if any(key == kind for key in self.mapping.get(layer, ()) if isinstance(key, str)):
                module.replaced_by = layer

    @staticmethod
    def get_kernel(repository: str, *args: Any, **kwargs: Any) -> HubKernel:
        """The kernel of a repository."""
        return HubKernel(repository)


class Machine:
    """The device, packages and variables that transformers sees; changed from cell to cell."""

    def __init__(self) -> None:
        self.device: dict[str, Any] = {"kind": "cpu"}
        self.packages: dict[str, str] = {}
        self.folder = Path(tempfile.mkdtemp())
        self.enabled = True

    @property
    def type(self) -> str:
        """The device's type as torch spells it."""
        kind = str(self.device["kind"])
        return "cuda" if kind == "rocm" else kind

    def install(self) -> None:
        """Let torch and package lookups answer from this machine."""
        torch: Any = importlib.import_module("torch")
        torch.cuda.is_available = lambda: self.type == "cuda"
        torch.cuda.device_count = lambda: int(self.type == "cuda")
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_capability = self._capability
        torch.cuda.empty_cache = lambda: None
        torch.cuda.device = torch.xpu.device = lambda *args: contextlib.nullcontext()
        torch.xpu.is_available = lambda: self.type == "xpu"
        torch.xpu.empty_cache = lambda: None
        torch.accelerator.is_available = lambda: self.type != "cpu"
        torch.accelerator.current_accelerator = lambda *args, **kwargs: (
            None if self.type == "cpu" else torch.device(self.type)
        )
        fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
        for name in ("init_gpu_context", "init_cuda_context"):
            if hasattr(fake, name):
                setattr(fake, name, lambda *args: None)
        real = importlib.metadata.version

        def version(distribution_name: str) -> str:
            key = DISTRIBUTIONS.get(distribution_name)
            if key is None:
                return real(distribution_name)
            if key not in self.packages:
                raise importlib.metadata.PackageNotFoundError(distribution_name)
            return self.packages[key]

        importlib.metadata.version = version
        utils: Any = importlib.import_module("transformers.utils.import_utils")
        look = utils._is_package_available

        def available(name: str, return_version: bool = False) -> Any:
            if name not in MANAGED:
                return look(name, return_version)
            found = self.packages.get(name)
            return found is not None, (found or "N/A") if return_version else None

        utils._is_package_available = available

    def _capability(self, *args: Any) -> tuple[int, int]:
        if self.type != "cuda":
            raise AssertionError("Torch not compiled with CUDA enabled")
        return tuple(self.device["cc"])

    def become(self, cell: dict[str, Any]) -> None:
        """Be the machine of `cell`."""
        torch: Any = importlib.import_module("torch")
        self.device, self.packages = cell["device"], cell["packages"]
        torch.version.cuda = "13.0" if self.device["kind"] == "cuda" else None
        torch.version.hip = "7.2.0" if self.device["kind"] == "rocm" else None
        for name in ("CUDA_HOME", "CUDA_PATH", "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"):
            os.environ.pop(name, None)
        os.environ["CUDA_HOME"] = str(self._toolkit(self.packages.get("nvcc")))
        os.environ.update({k: v for k, v in cell["env"].items() if k != "USE_HUB_KERNELS"})
        hub: Any = importlib.import_module("transformers.integrations.hub_kernels")
        utils: Any = importlib.import_module("transformers.utils.import_utils")
        wanted = cell["env"].get("USE_HUB_KERNELS", "YES").upper()
        hub._kernels_enabled = wanted in utils.ENV_VARS_TRUE_VALUES
        hub._KERNEL_MODULE_MAPPING.clear()
        kernels: Any = sys.modules["kernels"]
        kernels.mapping = {}
        for name in ("_DEEPGEMM", "_SONICMOE", "_FINEGRAINED_FP8"):
            for module in ("deepgemm", "sonicmoe", "finegrained_fp8"):
                found: Any = importlib.import_module(f"transformers.integrations.{module}")
                if hasattr(found, name):
                    setattr(found, name, None)
        _forget()

    def _toolkit(self, version: str | None) -> Path:
        """A CUDA toolkit's folder with an nvcc of `version`; one without any for None."""
        folder = self.folder / f"cuda-{version}"
        if not folder.exists():
            (folder / "bin").mkdir(parents=True)
            if version is not None:
                (folder / "bin" / "nvcc").touch()
                (folder / "version.json").write_text(json.dumps({"cuda_nvcc": {"version": f"{version}.0"}}))
        return folder


def _forget() -> None:
    """Drop what transformers remembers of the machine before."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.integrations", "transformers.utils", "transformers.quantizers")):
            for value in list(vars(module).values()):
                if type(value).__name__ == "_lru_cache_wrapper":
                    value.cache_clear()


def _stand_in_for_linear() -> None:
    """A quantized linear layer of GPTQModel, of which only its being one matters."""
    import torch

    class QuantizedLinear(torch.nn.Module):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()

    importer: Any = importlib.import_module("gptqmodel.utils.importer")
    importer.hf_select_quant_linear_v2 = lambda **kwargs: QuantizedLinear


def import_transformers(packages: dict[str, str]) -> Machine:
    """Import transformers on a machine with `packages`, and return the machine."""
    sys.modules["kernels"] = kernels = Kernels()
    kernels.__spec__ = importlib.machinery.ModuleSpec("kernels", None, is_package=True)
    StandIns({"gptqmodel", "optimum", "quark"}, r"(?!)").install()
    machine = Machine()
    machine.packages = packages
    machine.install()
    importlib.import_module("transformers")
    _stand_in_for_linear()
    _forget()
    return machine
