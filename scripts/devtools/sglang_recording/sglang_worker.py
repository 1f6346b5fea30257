"""Decisions of one SGLang release, made by its own code on a machine without a GPU.

Runs in a process of its own, with the release's modules on the path and without moectl. Standard input is
a JSON document (`device`, `checkpoints`, `cells`, `out`); a JSON-lines file of decisions is written.

Each cell goes SGLang's own way: server arguments are resolved by the whole pipeline of the release, with a
config.json as the checkpoint; the resolved arguments are published, the quantization class is made from the
config, and one layer of experts is constructed on the meta device. Only the device's properties, the ranks
and the packages are given as values.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

StandIns: Any = importlib.import_module("stand_ins").StandIns

PACKAGES = {
    "aiohttp", "anthropic", "cuda", "cutlass", "decord", "deep_ep", "deep_gemm", "dill", "einops",
    "fastapi", "flash_attn", "flashinfer", "gguf", "humming", "interegular", "IPython", "llguidance",
    "mistral_common", "modelscope", "msgpack", "multipart", "nvshmem", "openai", "openai_harmony", "orjson",
    "outlines", "partial_json_parser", "prometheus_client", "pybase64", "pynvml", "quack", "sentencepiece",
    "setproctitle", "sgl_kernel", "soundfile", "starlette", "tiktoken", "tilelang", "torch_memory_saver",
    "torchao", "torchvision", "triton_kernels", "tvm_ffi", "uvicorn", "uvloop", "watchfiles", "xgrammar",
    "zmq",
}  # fmt: skip
"""Packages that SGLang needs and this machine lacks: stand-ins, as every installation of it has them."""
ROCM_PACKAGES = {"aiter", "mori", "quark"}
VERSION = "99.0"
BUDGETS = {
    "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "65536",
    "SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "65536",
    "SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "65536",
    "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "65536",
    "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK": "65536",
}
"""Sizes of the exchanges' buffers: large, so that no refusal is about a batch."""


# ------------------------------------------------------------------------------------ the machine


def _set_packages(row: dict[str, Any]) -> None:
    packages = set(PACKAGES)
    if row["kind"] == "rocm":
        packages = (
            (packages - {"flashinfer", "deep_gemm", "humming", "sgl_kernel"}) | ROCM_PACKAGES | {"sgl_kernel"}
        )
    for name in {"flashinfer", "deep_gemm", "humming", "triton_kernels", *ROCM_PACKAGES} - packages | set(
        row.get("without", ())
    ):
        sys.modules[name] = None  # type: ignore[assignment]
    StandIns(packages, r"(?!)").install()
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name.replace("-", "_") not in {
                *packages,
                "sglang_kernel",
                "flashinfer_python",
                "kernels",
            }:
                raise
            return VERSION

    importlib.metadata.version = version
    _tolerate_transformers()
    dill: Any = importlib.import_module("dill")
    dill.dumps = lambda *args, **kwargs: b""


def _tolerate_transformers() -> None:
    """Names that transformers cannot import here (they need torchvision) become stand-ins."""
    lazy: Any = importlib.import_module("transformers.utils.import_utils")._LazyModule
    real = lazy.__getattr__
    anything: Any = importlib.import_module("stand_ins")._Anything

    def get(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except (ImportError, AttributeError, RuntimeError):
            if name.startswith("_") or not name[0].isupper():
                raise
            made = type(name, (anything,), {})
            setattr(self, name, made)
            return made

    lazy.__getattr__ = get


def _set_device(row: dict[str, Any]) -> None:
    """What torch says of the device: the row's properties instead of a driver's."""
    torch: Any = importlib.import_module("torch")
    kind = row["kind"]
    os.environ.update({**BUDGETS, **row.get("env", {})})
    gpu = kind in ("cuda", "rocm")
    capability = tuple(row.get("cc", (0, 0)))
    found = types.SimpleNamespace(
        name=row["name"],
        major=capability[0],
        minor=capability[1],
        total_memory=row["mem"] << 30,
        multi_processor_count=132,
        gcnArchName=row.get("gfx", ""),
    )
    torch.version.cuda = "13.0" if kind == "cuda" else None
    torch.version.hip = "7.2.0" if kind == "rocm" else None
    torch.cuda.is_available = lambda: gpu
    torch.cuda.device_count = lambda: 8 if gpu else 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *args: capability
    torch.cuda.get_device_name = lambda *args: row["name"]
    torch.cuda.get_device_properties = lambda *args: found
    torch.cuda.mem_get_info = lambda *args: (row["mem"] << 30, row["mem"] << 30)
    torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda *args: None
    if gpu:
        _set_triton_target(row)
    if kind == "rocm":
        common: Any = importlib.import_module("sglang.srt.utils.common")
        common.get_amdgpu_memory_capacity = lambda: row["mem"] << 10
    if kind == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        torch._C._cpu._is_amx_tile_supported = lambda: bool(row.get("amx"))
        torch.cpu._is_amx_tile_supported = lambda: bool(row.get("amx"))


def _set_triton_target(row: dict[str, Any]) -> None:
    """What Triton compiles for, which modules ask on import: Triton's own drivers need a GPU's libraries."""
    driver: Any = importlib.import_module("triton.runtime").driver
    compiler: Any = importlib.import_module("triton.backends.compiler")
    major, minor = row["cc"]
    rocm = row["kind"] == "rocm"
    target = (
        compiler.GPUTarget("hip", row["gfx"], 64)
        if rocm
        else compiler.GPUTarget("cuda", major * 10 + minor, 32)
    )
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


# ------------------------------------------------------------------------------------- one cell


def _refusal(error: BaseException) -> dict[str, str]:
    where = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in where if "/sglang/" in frame.filename]
    last = (own or where)[-1]
    return {
        "kind": type(error).__name__,
        "says": str(error)[:400],
        "where": f"{last.filename.partition('/sglang/')[2]}:{last.name}",
    }


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep its text."""
        with contextlib.suppress(Exception):
            self.said.append(record.getMessage())


def _arguments(cell: dict[str, Any], folder: str, device: dict[str, Any]) -> dict[str, Any]:
    ranks = cell["tp"] * cell["dp"]
    given: dict[str, Any] = {
        "model_path": folder,
        "skip_tokenizer_init": True,
        "tp_size": ranks,
        "moe_runner_backend": cell["forced"] or "auto",
        "moe_a2a_backend": cell["a2a"] or "none",
        "mem_fraction_static": 0.8,
        "device": {"rocm": "cuda"}.get(device["kind"], device["kind"]),
    }
    if cell["dp"] > 1:
        given |= {"attn_dp_size": cell["dp"]}
    if cell["ep"]:
        given |= {"ep_size": ranks}
    if cell.get("eplb"):
        given |= {"enable_eplb": True}
    return given


def _ask(
    cell: dict[str, Any], checkpoint: dict[str, Any], folder: str, device: dict[str, Any]
) -> dict[str, Any]:
    """The row of one cell."""
    import sglang.srt.runtime_context as runtime_context
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    row: dict[str, Any] = dict(cell)
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    runtime_context.reset_context()
    envs.SGLANG_MOE_NVFP4_DISPATCH.clear()
    try:
        try:
            arguments = ServerArgs(**_arguments(cell, folder, device))
            arguments.resolve_once()
        except Exception as error:
            row["arguments"] = {"error": _refusal(error)}
            return row
        view = resolved_view(arguments)
        row["arguments"] = {
            "runner": view.moe_runner_backend,
            "a2a": view.moe_a2a_backend,
            "ep": view.ep_size,
            "quantization": view.quantization,
            "warnings": [text for text in warnings.said if "oe" in text or "xpert" in text][:8],
        }
        row["layer"] = _layer(cell, checkpoint, arguments, model_config_of(arguments))
    finally:
        logging.getLogger().removeHandler(warnings)
    return row


def _layer(
    cell: dict[str, Any], checkpoint: dict[str, Any], arguments: Any, model_config: Any
) -> dict[str, Any]:
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.moe.utils import RoutingMethodType
    from sglang.srt.model_loader import loader

    found: dict[str, Any] = {}
    layer: dict[str, Any] = checkpoint["layer"]
    methods: list[Any] = []
    try:
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        utils.initialize_moe_config()
        _require_own_model(loader.get_model_architecture(model_config)[0])
        quant_config = loader._get_quantization_config(model_config, LoadConfig())
        found["config"] = type(quant_config).__name__ if quant_config else None
        cls = get_moe_impl_class(quant_config)
        dispatched: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
        dispatched.create_moe_dispatcher = lambda *args, **kwargs: types.SimpleNamespace(
            set_quant_config=lambda *a: None
        )
        method = layer.get("routing")
        torch.set_default_dtype(getattr(torch, layer["dtype"]))
        with torch.device("meta"), _watch_methods(methods):
            experts = cls(
                num_experts=layer["experts"],
                top_k=layer["top_k"],
                hidden_size=layer["hidden"],
                intermediate_size=layer["intermediate"],
                layer_id=layer["index"],
                quant_config=quant_config,
                prefix=layer["prefix"],
                activation=layer["activation"],
                with_bias=layer["bias"],
                gemm1_alpha=layer.get("alpha"),
                gemm1_clamp_limit=layer.get("limit"),
                is_gated=layer["gated"],
                routing_method_type=None if method is None else RoutingMethodType[method],
            )
        backend = experts.runner_backend
        found["runner"] = None if backend is None else backend.value
        found["method"] = type(experts.quant_method).__name__
        found["scheme"] = type(experts.scheme).__name__ if experts.scheme is not None else None
        found["class"] = cls.__name__
        runner = getattr(experts.quant_method, "runner", None)
        found["fused"] = getattr(runner, "fused_func", None) is not None
    except Exception as error:
        found["error"] = _refusal(error)
        if methods:
            found["method"] = type(methods[-1]).__name__
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def _require_own_model(model: type) -> None:
    """Stop where SGLang takes transformers' model, as it does for modules that cannot be imported here."""
    if model.__name__.startswith("Transformers"):
        raise SystemExit(f"SGLang's own module of a model could not be imported: it takes {model.__name__}")


@contextlib.contextmanager
def _watch_methods(made: list[Any]) -> Iterator[None]:
    """The quantization methods that layers get, in `made`."""
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

    classes: list[Any] = [FusedMoEMethodBase]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    originals = {}
    for cls in classes:
        if "create_weights" in cls.__dict__:
            originals[cls] = cls.__dict__["create_weights"]

            def hook(self: Any, *args: Any, _original: Any = originals[cls], **kwargs: Any) -> Any:
                made.append(self)
                return _original(self, *args, **kwargs)

            cls.create_weights = hook
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.create_weights = original


def main() -> None:
    """Answer every cell of standard input."""
    document = json.load(sys.stdin)
    device = document["device"]
    _set_packages(device)
    _set_device(device)
    logging.disable(logging.INFO)
    folders = {}
    base = tempfile.mkdtemp()
    for name, row in document["checkpoints"].items():
        folder = Path(base, name.replace("/", "--"))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
        for file, text in row.get("files", {}).items():
            (folder / file).write_text(json.dumps(text), encoding="utf-8")
        folders[name] = str(folder)
    with Path(document["out"]).open("w", encoding="utf-8") as out:
        for cell in document["cells"]:
            checkpoint = document["checkpoints"][cell["checkpoint"]]
            with contextlib.redirect_stdout(io.StringIO()):
                row = _ask(cell, checkpoint, folders[cell["checkpoint"]], device)
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
