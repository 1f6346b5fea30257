"""Decisions of one vLLM release, made by its own code on a machine without a GPU.

Runs in a process of its own, with the release's modules on the path and without moectl. As a script it
records: standard input is a JSON document (`grid`, `cells`, `jobs`, `out`); a JSON-lines file of decisions is
written for each device and package profile. `ask.py` asks it about one checkpoint.

Each cell goes vLLM's own way: the checkpoint's quantization config chooses a quantization class, its quant
method asks the oracle, sizes are rounded, weights are created on the meta device. Only the platform's
properties, the ranks and the packages are given as values. What passes by is recorded, not recomputed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

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


class _Finished(Exception):
    """Weights are created: what follows is no decision."""


class _Asked(Exception):
    """The layer's config is known: what follows is asked without the layer."""


# ------------------------------------------------------------------------------------ the machine


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


# ------------------------------------------------------------------------------- what passes by


class Passing:
    """What one cell's path through vLLM shows: questions, refusals, the choice, sizes, errors."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the previous cell."""
        self.asked: list[Any] = []
        self.rejected: list[dict[str, Any]] = []
        self.priority: list[str] | None = None
        self.candidates: list[str] | None = None
        self.selected: str | None = None
        self.experts: Any = None
        self.functions: list[str] = []
        self.method: Any = None
        self.eplb: bool | None = None
        self.padded: tuple[int, int] | None = None
        self.stage = "select"
        self.depth = 0
        self.lists = 0

    # Hooks: each calls the original and keeps what went in and out.

    def selection(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that selects a backend and its experts class."""

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.functions.append(original.__name__)
            self.rejected, self.priority, self.candidates = [], None, None
            found = original(*args, **kwargs)
            # Before 0.20 the class was made later, after the weights are loaded.
            backend, self.experts = found if isinstance(found, tuple) else (found, None)
            self.selected = backend.value
            return found

        return hook

    def ranking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns backends in priority order; the outermost counts."""

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.lists += 1
            try:
                found = original(*args, **kwargs)
            finally:
                self.lists -= 1
            if not self.lists:
                self.priority = [backend.value for backend in found]
            return found

        return hook

    def filtering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that drops backends with other activation formats."""

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self.candidates = [backend.value for backend in found]
            return found

        return hook

    def classes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns the experts classes of a backend, which are asked next."""

        @functools.wraps(original)
        def hook(backend: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(backend, *args, **kwargs)
            self.asked = [backend]
            for experts in found if isinstance(found, list) else [found]:
                for owner in experts.__mro__:
                    if "is_supported_config" in owner.__dict__:
                        self._watch(owner)
            return found

        return hook

    def incompatibility(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that refuses a backend before its classes are asked."""

        @functools.wraps(original)
        def hook(backend: Any, *args: Any, **kwargs: Any) -> Any:
            reason = original(backend, *args, **kwargs)
            if reason is not None:
                self.rejected.append({"backend": backend.value, "experts_cls": None, "reason": reason})
            return reason

        return hook

    def _watch(self, owner: type) -> None:
        original = inspect.getattr_static(owner, "is_supported_config")
        function = getattr(original, "__func__", original)
        if getattr(function, "watched", False):
            return

        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                supported, reason = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if not self.depth and not supported:
                experts = args[0] if args else kwargs["cls"]
                row = {"backend": self.asked[0].value, "experts_cls": experts.__name__, "reason": reason}
                self.rejected.append(row)
            return supported, reason

        hook.watched = True  # type: ignore[attr-defined]
        kind = classmethod if isinstance(original, classmethod) else staticmethod
        owner.is_supported_config = kind(hook)  # type: ignore[attr-defined]

    def install(self) -> None:
        """Hook the oracles' functions, wherever a module has them by name."""
        package = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle")
        oracles = [
            importlib.import_module(f"{package.__name__}.{found.name}")
            for found in pkgutil.iter_modules(package.__path__)
        ]
        hooks: dict[Any, Any] = {}
        for module in oracles:
            for name, value in list(vars(module).items()):
                make = self._hook_for(name)
                if make and inspect.isfunction(value):
                    hooks.setdefault(value, make(value))
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm."):
                for name, value in list(vars(module).items()):
                    if inspect.isfunction(value) and value in hooks:
                        setattr(module, name, hooks[value])

    def _hook_for(self, name: str) -> Callable[..., Any] | None:
        if re.fullmatch(r"select_\w+_moe_backend", name):
            return self.selection
        if name.startswith("_get_priority_backends") or name == "prioritize_humming":
            return self.ranking
        if name == "_filter_by_activation":
            return self.filtering
        if name.endswith("backend_to_kernel_cls"):
            return self.classes
        if name == "_backend_incompatibility_reason":
            return self.incompatibility
        return None


CODES = (
    (r"current device", "device"),
    (r"activation format", "activation_format"),
    (r"quantization scheme", "quant_scheme"),
    (r"gemm type", "gemm_type"),
    (r"package", "package"),
    (r"Marlin not supported", "marlin_shape"),
    (r"only compressed-tensors|layout is not supported|asymmetric|group-wise scales", "layout"),
    (r"zero points and bias", "zero_points_or_bias"),
    (r"bias", "bias"),
    (r"zero points", "zero_points"),
    (r"activation ordering", "act_order"),
    (r"parallel config", "parallel"),
    (r"routing method", "routing_method"),
    (r"dimensions|number of experts|hidden dim", "shape"),
    (r"MoEActivation|no act_and_mul| activation$", "activation"),
)
"""Words of a refusal, with the code that it is recorded under; the first that matches."""


def code_of(reason: str | None) -> str:
    """The code of a refusal in vLLM's words."""
    return next((code for words, code in CODES if re.search(words, reason or "")), "other")


def _function(path: str) -> Any:
    """The function at ``module:Class.name``; without a path some function, which is never called."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module)) if names else print


# ------------------------------------------------------------------------------------- one cell


class Recorder:
    """Asks the imported release about cells of the grid, on one device with one package profile."""

    def __init__(self, grid: dict[str, Any], device: dict[str, Any]) -> None:
        import vllm.config as config
        import vllm.distributed.parallel_state as parallel_state
        from vllm.platforms import current_platform

        torch: Any = importlib.import_module("torch")
        self.grid, self.device, self.torch = grid, device, torch
        self.config, self.parallel_state, self.platform = config, parallel_state, current_platform
        self.layer = importlib.import_module("vllm.model_executor.layers.fused_moe.layer")
        self.quantization = importlib.import_module("vllm.model_executor.layers.quantization")
        self.factory = getattr(self.layer, "FusedMoEFactory", None) or self.layer.FusedMoE
        for name in ("fp8", "mxfp4", "modelopt", "moe_wna16", "auto_gptq", "auto_awq", "quark.quark_moe"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{self.quantization.__name__}.{name}")
        importlib.import_module(f"{self.quantization.__name__}.compressed_tensors.compressed_tensors_moe")
        self.passing = Passing()
        self.passing.install()
        self.kept: list[dict[str, Any]] = []
        self.asking = False
        self._record_layer()

    def _record_layer(self) -> None:
        """Keep each layer's config as it is before sizes are padded, and its quant method."""
        try:
            owner = importlib.import_module("vllm.model_executor.layers.fused_moe.routed_experts")
        except ImportError:
            self._record_whole_layer()
            return
        routed = owner.RoutedExperts
        start, choose = routed.__init__, routed._get_quant_method

        @functools.wraps(start)
        def init(
            experts: Any, layer_name: Any, params_dtype: Any, moe_config: Any, *args: Any, **kw: Any
        ) -> None:
            self._keep(moe_config)
            start(experts, layer_name, params_dtype, moe_config, *args, **kw)

        @functools.wraps(choose)
        def get(experts: Any, *args: Any, **kwargs: Any) -> Any:
            if self.asking:
                raise _Asked
            method = choose(experts, *args, **kwargs)
            self._follow(method)
            return method

        routed.__init__, routed._get_quant_method = init, get

    def _record_whole_layer(self) -> None:
        """The same for releases before 0.24, whose layers set both as attributes."""
        original = self.layer.FusedMoE.__setattr__

        def set_attribute(layer: Any, name: str, value: Any) -> None:
            original(layer, name, value)
            if name == "moe_config":
                self._keep(value)
                if self.asking:
                    raise _Asked
            elif name == "quant_method":
                self._follow(value)

        self.layer.FusedMoE.__setattr__ = set_attribute

    def _keep(self, moe_config: Any) -> None:
        self.kept.append(
            {
                "routing": moe_config.routing_method.name,
                "hidden": moe_config.hidden_dim,
                "intermediate_per_partition": moe_config.intermediate_size_per_partition,
                "local_experts": moe_config.num_local_experts,
                "config": moe_config,
            }
        )

    def _follow(self, method: Any) -> None:
        """Keep the quant method and its sizes, and stop after it creates weights."""
        passing, torch = self.passing, self.torch
        passing.method, passing.stage = method, "round"
        passing.eplb = bool(getattr(method, "supports_eplb", False))
        rounds, creates = method.maybe_roundup_sizes, method.create_weights

        def maybe_roundup_sizes(*args: Any, **kwargs: Any) -> Any:
            passing.padded = rounds(*args, **kwargs)
            passing.stage = "create"
            return passing.padded

        def create_weights(*args: Any, **kwargs: Any) -> Any:
            with torch.device("meta"):
                creates(*args, **kwargs)
            raise _Finished

        method.maybe_roundup_sizes, method.create_weights = maybe_roundup_sizes, create_weights
        # Whether a method balances experts is asked after the decision; it must not end it.
        if not passing.eplb:
            type(method).supports_eplb = property(lambda self: True)

    def _dtype(self) -> Any:
        if "dtype" in self.device:
            return getattr(self.torch, self.device["dtype"])
        old = self.device["kind"] == "cuda" and tuple(self.device["cc"]) < (8, 0)
        return self.torch.float16 if old else self.torch.bfloat16

    def _vllm_config(self, cell: dict[str, Any], gates: list[str]) -> Any:
        parallel = self.grid["PARALLEL"][cell["parallel"]]
        found = self.config.VllmConfig()
        settings = {
            "tensor_parallel_size": parallel["tp"],
            "data_parallel_size": parallel["dp"],
            "enable_expert_parallel": parallel["ep"],
            "all2all_backend": parallel["a2a"],
            "enable_eplb": parallel.get("eplb", False),
        }
        for name, value in settings.items():
            object.__setattr__(found.parallel_config, name, value)
        if cell["forced"]:
            try:
                type(found.kernel_config)(moe_backend=cell["forced"])
            except Exception:  # pydantic's error, whatever its class
                gates.append("moe_backend value not accepted by KernelConfig")
            object.__setattr__(found.kernel_config, "moe_backend", cell["forced"])
        ranks = {"_TP": parallel["tp"], "_DP": parallel["dp"], "_PCP": 1, "_PP": 1, "_DCP": 1}
        ranks["_EP"] = ranks["_EPLB"] = parallel["tp"] * parallel["dp"]
        for name, size in ranks.items():
            group = types.SimpleNamespace(world_size=size, rank_in_group=0, rank=0, ranks=list(range(size)))
            setattr(self.parallel_state, name, group)
        return found

    def _model_config(self, cell: dict[str, Any], quantization: Any) -> Any:
        pretrained: Any = importlib.import_module("transformers").PretrainedConfig
        model = self.grid["MODELS"][cell["model"]]
        hf = pretrained(
            architectures=["Model"], num_hidden_layers=4, hidden_size=model["hidden"], vocab_size=32000
        )
        hf.model_type = model["model_type"]
        if quantization is not None:
            hf.quantization_config = quantization
        return types.SimpleNamespace(
            dtype=self._dtype(),
            hf_config=hf,
            hf_text_config=hf,
            model="model",
            revision=None,
            quantization=None,
            quantization_config=None,
            allow_deprecated_quantization=True,
            model_arch_config=types.SimpleNamespace(quantization_config=quantization),
            _parse_quant_hf_config=lambda hf_config=None: quantization,
            is_moe=True,
            enforce_eager=True,
            max_model_len=4096,
            is_encoder_decoder=False,
        )

    def _quant_config(self, model_config: Any, gates: list[str]) -> Any:
        """The quantization config as vLLM finds it, with its refusals before any layer."""
        quantization = model_config.model_arch_config.quantization_config
        if quantization is None:
            return None
        model_config.quantization = None
        try:
            self.config.ModelConfig._verify_quantization(model_config)
        except ValueError as error:
            if model_config.quantization is None:
                raise
            gates.append(f"ValueError: {error}")
        name = model_config.quantization
        found = self.quantization.get_quantization_config(name).from_config(dict(quantization))
        capability = self.platform.get_device_capability()
        if capability is not None and capability.to_int() < found.get_min_capability():
            gates.append(
                f"min capability of {name} is {found.get_min_capability()}, device has {capability.to_int()}"
            )
        if model_config.dtype not in found.get_supported_act_dtypes():
            known = [str(dtype) for dtype in found.get_supported_act_dtypes()]
            gates.append(f"{model_config.dtype} not in supported act dtypes {known} of {name}")
        found.packed_modules_mapping = {}
        return found

    def _layer(self, cell: dict[str, Any], quant_config: Any, vllm_config: Any) -> None:
        model = self.grid["MODELS"][cell["model"]]
        routing = dict(model["routing"])
        if not model.get("gated", True) and "ckpt_names" in inspect.signature(self.factory).parameters:
            routing["ckpt_names"] = ("up_proj", "down_proj", None)
        if "custom_routing_function" in routing:
            routing["custom_routing_function"] = _function(routing["custom_routing_function"])
        bias = self.torch.zeros(model["E"], dtype=self.torch.float32) if routing.pop("e_bias", 0) else None
        arguments = {
            "num_experts": model["E"],
            "top_k": model["topk"],
            "hidden_size": model["hidden"],
            "intermediate_size": model["inter"],
            "params_dtype": self._dtype(),
            "quant_config": quant_config,
            "prefix": model.get("prefix", "model.layers.1.mlp.experts"),
            "activation": model["activation"],
            "has_bias": model["has_bias"],
            "e_score_correction_bias": bias,
            "enable_eplb": vllm_config.parallel_config.enable_eplb,
            "is_sequence_parallel": vllm_config.parallel_config.use_sequence_parallel_moe,
            **routing,
        }
        if "is_act_and_mul" in inspect.signature(self.factory).parameters:
            arguments["is_act_and_mul"] = not model["activation"].endswith("_no_mul")
        parallel = self.grid["PARALLEL"][cell["parallel"]]
        self.factory(**arguments, tp_size=parallel["tp"], dp_size=parallel["dp"], pcp_size=1)

    def record(self, cell: dict[str, Any]) -> dict[str, Any]:
        """The decision for one cell."""
        passing = self.passing
        passing.reset()
        scheme = self.grid["SCHEMES"][cell["scheme"]][0]
        direct = isinstance(scheme, str)
        gates: list[str] = []
        vllm_config = self._vllm_config(cell, gates)
        row: dict[str, Any] = {**cell, "in_dtype": str(self._dtype()).removeprefix("torch.")}
        error = later = None
        self.kept.clear()
        try:
            model_config = self._model_config(cell, None if direct else scheme)
            object.__setattr__(vllm_config, "model_config", model_config)
            with self.config.set_current_vllm_config(vllm_config):
                quant_config = None if direct else self._quant_config(model_config, gates)
                if direct:
                    self._direct(cell, scheme, vllm_config)
                else:
                    row["quant_method_name"] = model_config.quantization
                    self._layer(cell, quant_config, vllm_config)
        except _Finished:
            pass
        except Exception as raised:  # refusals are of many classes
            text = f"{type(raised).__name__}: {raised}"
            if isinstance(raised, (ImportError, AttributeError, TypeError)):
                row["not_run"] = text
                row["trace"] = traceback.format_exc()
            elif passing.stage == "create":
                later = text
            else:
                error = text
        self._state(row, passing, error, later, gates, direct)
        return row

    def _direct(self, cell: dict[str, Any], scheme: str, vllm_config: Any) -> None:
        """A question put to a select function itself, with a layer's config."""
        self.asking = True
        try:
            self._layer(cell, None, vllm_config)
        except _Asked:
            pass
        finally:
            self.asking = False
        config = self.kept[-1]["config"]
        oracle = "vllm.model_executor.layers.fused_moe.oracle"
        keys = importlib.import_module(f"{self.quantization.__name__}.utils.quant_utils")
        if scheme == "direct:int8_w8a16_channel":
            select = importlib.import_module(f"{oracle}.int8").select_int8_moe_backend
            select(config=config, weight_key=keys.kInt8StaticChannelSym, activation_key=None)
            return
        arguments: Any = importlib.import_module("compressed_tensors.quantization").QuantizationArgs
        select = importlib.import_module(f"{oracle}.int_wna16").select_wna16_moe_backend
        asked: dict[str, Any] = {
            "config": config,
            "may_have_bias": False,
            "may_have_zp": False,
            "allow_tile_padding": True,
        }
        if scheme == "direct:gptq_desc_act":
            gptq = importlib.import_module(f"{self.quantization.__name__}.auto_gptq")
            asked["quant_config"] = gptq.AutoGPTQConfig(4, 128, False, True, False, {}, {})
            asked["quant_config"].desc_act = True  # The constructor refuses it.
            asked |= {"weight_key": keys.kInt4Static, "may_have_bias": True}
        else:
            plain = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
            if scheme == "direct:ct_actorder_group":
                asked["quant_config"] = arguments(**plain, symmetric=True, actorder="group")
                asked["weight_key"] = keys.kInt4Static32
            else:
                asked["quant_config"] = arguments(**plain, symmetric=False)
                asked |= {"weight_key": keys.kInt4Static32Asym, "may_have_zp": True}
        known = inspect.signature(select).parameters
        select(**{name: value for name, value in asked.items() if name in known})

    def _state(
        self,
        row: dict[str, Any],
        passing: Passing,
        error: str | None,
        later: str | None,
        gates: list[str],
        direct: bool,
    ) -> None:
        method, kept = passing.method, self.kept
        experts, selected = passing.experts, passing.selected
        if method is not None and not passing.functions:
            # A method that assigns its kernels without asking.
            experts = getattr(method, "experts_cls", None)
            named = [v for k, v in vars(method).items() if isinstance(v, enum.Enum) and "backend" in k]
            selected = named[0].value if named else None
        if kept:
            row["routing_method"] = kept[-1]["routing"]
            row["dims"] = {
                name: kept[-1][name] for name in ("hidden", "intermediate_per_partition", "local_experts")
            }
        row |= {
            "gates": gates,
            "method_cls": type(method).__name__ if method is not None else None,
            "selected": selected,
            "experts_cls": experts.__name__ if experts is not None else None,
            "monolithic": experts.is_monolithic() if experts is not None else None,
            "rejected": [{**found, "code": code_of(found["reason"])} for found in passing.rejected],
            "priority": passing.priority,
            "select_calls": passing.functions,
            "error": error,
            "padded": None,
        }
        if passing.padded is not None and not direct:
            hidden, intermediate = passing.padded
            row["padded"] = {"hidden": hidden, "intermediate_per_partition": intermediate}
        if passing.candidates is not None and not row["forced"]:
            row["candidates"] = passing.candidates
        if later is not None:
            row["create_weights_error"] = later
        if passing.eplb is not None:
            row["balances"] = passing.eplb
        if method is not None and selected is None and error is None:
            row.setdefault("not_run", f"{type(method).__name__} names no backend")


# ----------------------------------------------------------------------------------------- runs


def set_machine(packages: set[str], env: dict[str, str], row: dict[str, Any]) -> None:
    """Have vLLM find these packages, environment variables and the device of a row of the grid."""
    _set_packages(packages, _STAND_INS)
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


def _run(grid: dict[str, Any], device: str, profile: str, cells: list[dict[str, Any]], out: Path) -> None:
    row, assumed = grid["DEVICES"][device], grid["PROFILES"][profile]
    set_machine(set(assumed["packages"]), assumed["env"], row)
    recorder = Recorder(grid, row)
    partial = out.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as lines:
        for cell in cells:
            lines.write(json.dumps(recorder.record(cell), separators=(",", ":")) + "\n")
    partial.rename(out)


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


def main() -> int:
    """Record every run, `jobs` at a time, each in a process of its own."""
    document = json.load(sys.stdin)
    stand_in()
    grid, out = document["grid"], Path(document["out"])
    grid["PARALLEL"] |= grid.get("PARALLEL_EXTRA", {})
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        runs.setdefault((cell["device"], cell["profile"]), []).append(cell)
    waiting, running, failed = list(runs.items()), dict[int, str](), 0
    while waiting or running:
        while waiting and len(running) < document["jobs"]:
            (device, profile), cells = waiting.pop(0)
            child = os.fork()
            if not child:
                code = 1
                try:
                    _run(grid, device, profile, cells, out / f"{device}.{profile}.jsonl")
                    code = 0
                except BaseException:  # a child must not return into the parent's loop
                    traceback.print_exc()
                os._exit(code)
            running[child] = f"{device} {profile}"
        child, status = os.wait()
        if child not in running:
            continue  # Started by an imported package.
        name = running.pop(child)
        print(f"{name}: {'failed' if status else 'recorded'}", file=sys.stderr, flush=True)
        failed += bool(status)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
