"""The machine that vLLM finds where there is none: packages, a device, what compiled libraries say.

Runs in the process of the release that is asked, without moectl.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
from typing import Any

StandIns: Any = importlib.import_module("stand_ins").StandIns

FRONT_END = {
    "openai", "openai_harmony", "xgrammar", "fastapi", "partial_json_parser", "llguidance", "mistral_common",
    "gguf", "outlines_core", "lark", "diskcache", "lmformatenforcer", "depyf", "setproctitle", "watchfiles",
    "python_json_logger", "pythonjsonlogger", "prometheus_fastapi_instrumentator", "uvloop", "uvicorn",
    "starlette", "aiohttp", "cv2", "tiktoken", "anthropic", "mcp", "model_hosting_container_standards",
    "ijson", "opentelemetry", "ray", "pycountry", "soundfile", "librosa", "tokenspeed_mla", "quack",
    "tilelang", "vllm_xpu_kernels", "fastsafetensors", "numba", "tensorizer",
}  # fmt: skip
"""Packages of the front end and of other kernels, which no decision about experts asks for."""
COMPILED = (
    r"vllm\.(_C\w*|_moe_C\w*|_rocm_C|_qutlass_C|_flashmla\w*|_deep_gemm_C|cumem_allocator"
    r"|vllm_flash_attn(\..*)?)"
)
OPTIONAL = (
    *("flashinfer", "triton_kernels", "deep_gemm", "humming", "deep_ep", "aiter", "quark", "b12x", "hpc"),
)
"""Packages that the profiles name. Any other optional package is absent."""
ALWAYS_ABSENT = ("zentorch", "mori", "moonep", "nixl_ep", "flashinfer_cubin")
REAL = ("flashinfer", "humming", "triton_kernels")
"""Those that are really imported where a profile has them; the others are answered for."""
ONCE = ("humming.utils.nvrtc", "humming.ops.utils")
"""Modules that start a compiler in the background when they are imported."""
VENDORED = {"vllm.third_party.deep_gemm": "deep_gemm", "vllm.third_party.triton_kernels": "triton_kernels"}


def _set_packages(packages: set[str], stand_ins: Any) -> None:
    for name in (*OPTIONAL, *ALWAYS_ABSENT):
        if name not in packages:
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]
        elif name not in REAL:
            stand_ins.packages.add(name)


def _answer_for_packages(packages: set[str]) -> None:
    import vllm.utils.import_utils as utils

    real = utils._has_module

    @functools.cache
    def has(name: str) -> bool:
        if name == "triton_kernels":
            return False  # Only the copy inside vLLM is there.
        wanted = VENDORED.get(name, name.split(".")[0])
        if wanted in (*OPTIONAL, *ALWAYS_ABSENT):
            return wanted in packages
        return bool(real(name))

    utils._has_module = has


def _answer_for_aiter(installed: bool) -> None:
    """Questions about signatures and files in the package, which is a stand-in."""
    from vllm._aiter_ops import rocm_aiter_ops

    for name in dir(rocm_aiter_ops):
        if name.startswith("fused_moe_supports_"):
            setattr(rocm_aiter_ops, name, classmethod(lambda cls, *args: installed))
    with contextlib.suppress(ImportError):
        mxfp8: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.aiter_mxfp8_moe")
        if hasattr(mxfp8, "is_aiter_mxfp8_moe_available"):
            mxfp8.is_aiter_mxfp8_moe_available = lambda: installed


def _set_device(row: dict[str, Any]) -> None:
    """The platform of vLLM for a row of the grid, with the properties in it instead of a driver's."""
    torch: Any = importlib.import_module("torch")
    kind = row["kind"]
    memory = row.get("memory_bytes", row.get("mem", 0) << 30)
    if kind == "rocm":
        found = types.SimpleNamespace(
            gcnArchName=row["gfx"], name=row["name"], total_memory=memory, multi_processor_count=256
        )
        torch.cuda.get_device_properties = lambda *args, **kwargs: found
        major, minor = int(row["gfx"][3:-2]), int(row["gfx"][-2])
        torch.cuda.get_device_capability = lambda *args, **kwargs: (major, minor)
    torch.cpu._is_amx_tile_supported = lambda: bool(row.get("amx"))
    torch.cuda.is_available = lambda: kind in ("cuda", "rocm")
    torch.cuda.device_count = lambda: 8
    module = importlib.import_module(f"vllm.platforms.{kind}")
    interface = importlib.import_module("vllm.platforms.interface")
    names = {
        "cuda": "NonNvmlCudaPlatform",
        "rocm": "RocmPlatform",
        "cpu": "CpuPlatform",
        "xpu": "XPUPlatform",
    }
    base = getattr(module, names[kind])
    given: dict[str, Any] = {
        "get_device_name": classmethod(lambda cls, *args: row["name"]),
        "get_device_total_memory": classmethod(lambda cls, *args: memory),
        "num_compute_units": classmethod(lambda cls, *args: row.get("sms") or 132),
        "device_count": classmethod(lambda cls: 8),
        "import_kernels": classmethod(lambda cls: None),
        "check_and_update_config": classmethod(lambda cls, config: None),
    }
    if kind == "cuda":
        capability = interface.DeviceCapability(*row["cc"])
        given["get_device_capability"] = classmethod(lambda cls, *args, **kwargs: capability)
    import vllm.platforms as platforms

    platforms._current_platform = type(base.__name__, (base,), given)()
    platforms.current_platform = platforms._current_platform


def _set_compiled_predicates(row: dict[str, Any]) -> None:
    """Host functions of the compiled library: CUDA capabilities that its kernels were built for."""
    torch: Any = importlib.import_module("torch")
    ours = (row["cc"][0] * 10 + row["cc"][1]) if "cc" in row else 0
    built = {
        "cutlass_group_gemm_supported": range(90, 120),
        "cutlass_scaled_mm_supports_fp8": range(89, 200),
        "cutlass_scaled_mm_supports_block_fp8": range(90, 200),
        "cutlass_scaled_mm_supports_fp4": range(100, 130),
        "mxfp4_experts_quant_supported": range(100, 120),
    }
    library = torch.library.Library("_C", "FRAGMENT")
    _KEPT.append(library)
    for name, capabilities in built.items():
        if hasattr(torch.ops._C, name):
            continue
        library.define(f"{name}(int capability) -> bool")
        library.impl(
            name,
            lambda capability, capabilities=capabilities: (capability or ours) in capabilities,
            "CompositeExplicitAutograd",
        )
    if not hasattr(torch.ops._C, "is_onednn_acl_supported"):
        library.define("is_onednn_acl_supported() -> bool")
        library.impl("is_onednn_acl_supported", lambda: False, "CompositeExplicitAutograd")


_KEPT: list[Any] = []


def set_machine(packages: set[str], env: dict[str, str], row: dict[str, Any]) -> None:
    """Have vLLM find these packages, environment variables and the device of a row of the grid."""
    _set_packages(packages, _STAND_INS)
    if {"nvcc", "ninja"} <= packages:  # FlashInfer compiles what it lacks; here nothing is compiled.
        env = {"VLLM_HAS_FLASHINFER_CUBIN": "1", **env}
    os.environ |= env
    _set_compiled_predicates(row)
    _answer_for_packages(packages)
    _set_device(row)
    _answer_for_aiter("aiter" in packages)


def set_device(row: dict[str, Any]) -> None:
    """Have an installed vLLM find the device of a row of the grid, whatever is in the machine."""
    torch: Any = importlib.import_module("torch")
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm._custom_ops")
    _set_compiled_predicates(row)
    _set_device(row)
    if "cc" in row:
        torch.cuda.get_device_capability = lambda *args, **kwargs: tuple(row["cc"])


_STAND_INS = StandIns(FRONT_END, COMPILED)


def stand_in() -> None:
    """Let the Python files of a release be imported where most of what they import is missing."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_TARGET_DEVICE": "empty"}
    os.environ["CUDA_HOME"] = "/nonexistent"
    _STAND_INS.install()
    first = ("torch", "transformers", "pydantic", "compressed_tensors.quantization", "triton")
    for name in (*first, *REAL, *ONCE):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
