"""Decisions of one transformers release, made by its own code on a machine without a GPU.

Runs in a process of its own, with the release's modules on the path and without moectl. Standard input is
a JSON document (`checkpoints`, `cells`, `out`); a JSON-lines file of decisions is written.

Each cell goes the way of `from_pretrained`: the config, the quantizer with its check of the environment, the
model without weights, the quantizer's modules in it. Then one layer's experts run on fake tensors of the
device until the first matrix product, before and after `generate` prepares for decoding. Only the device's
properties, the packages and the environment variables are given as values; kernels of the Hub are stand-ins
that say that they were reached.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from .machine import Machine, Reached, import_transformers
else:
    from machine import Machine, Reached, import_transformers

TOKENS = 8


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep its text."""
        with contextlib.suppress(Exception):
            self.said.append(record.getMessage()[:200])


def _failure(error: BaseException) -> dict[str, str]:
    own = [f for f in traceback.extract_tb(error.__traceback__) if "/transformers/" in f.filename]
    last = own[-1] if own else traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename.rpartition('/transformers/')[2]}:{last.name}"
    return {"kind": type(error).__name__, "says": str(error)[:300], "where": where}


def _loading_config(declared: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """The argument `quantization_config` that asks for dequantization; None if it is not asked for."""
    if not arguments["dequantize"]:
        return None
    auto: Any = importlib.import_module("transformers.quantizers.auto")
    made: Any = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[declared["quant_method"]]
    return made(dequantize=True)


def _model_class(config: Any) -> Any:
    """The class that a config names, or that the auto classes find for it. ValueError if there is none."""
    import transformers

    named: Any = getattr(transformers, (config.architectures or [""])[0] or "none", None)
    if named is not None:
        return named
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        auto: Any = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            found: Any = auto._model_mapping[type(config)]
            return found
    raise ValueError(f"no auto class has a model for {type(config).__name__}")


def _shorten(config: Any, layers: int) -> None:
    """Keep the first `layers` decoder layers, the last of which has experts."""
    total = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def _load(cell: dict[str, Any], checkpoint: dict[str, Any], folder: str, row: dict[str, Any]) -> Any:
    """The model without weights, as `from_pretrained` makes it; what was decided is in `row`."""
    import torch
    import transformers

    auto: Any = importlib.import_module("transformers.quantizers.auto")
    arguments: dict[str, Any] = cell["arguments"]
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    cls = _model_class(config)
    _shorten(config.get_text_config(), checkpoint["layer"]["index"] + 1)
    if arguments["implementation"]:
        config._experts_implementation = arguments["implementation"]
    text = config.get_text_config()
    declared = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    wanted = _loading_config(declared or {}, arguments)
    quantizer, config, _ = auto.get_hf_quantizer(config, wanted, None, True, {})
    row["quantizer"] = type(quantizer).__name__ if quantizer else None
    dtype: Any = getattr(torch, arguments["dtype"])
    if quantizer is not None:
        dtype = quantizer.update_dtype(dtype)
    row["dtype"] = str(dtype).removeprefix("torch.")
    config.dtype = text.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = cls(config)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model, dtype=dtype, device_map=None, checkpoint_files=[],
                use_kernels=arguments["use_kernels"],
            )  # fmt: skip
            row["dequantized"] = bool(getattr(quantizer.quantization_config, "dequantize", False))
    finally:
        torch.set_default_dtype(before)
    model.eval()
    model.set_use_kernels(arguments["use_kernels"])
    return model


@contextlib.contextmanager
def _until_a_product(kind: str) -> Iterator[None]:
    """Fake tensors that say that they are on a device; the first matrix product raises `Reached`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.overrides import TorchFunctionMode

    watching: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    products = {
        "aten::_grouped_mm": "torch.grouped_mm",
        "transformers::grouped_mm_fallback": "loop",
        "aten::bmm": "torch.bmm",
        "aten::baddbmm": "torch.bmm",
        "aten::mm": "torch.linear",
        "aten::addmm": "torch.linear",
    }

    class Watch(watching):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().partition(".")[0]
            if name in products:
                raise Reached(products[name])
            if name == "aten::histc":  # a CPU has it for floating point alone
                return torch.empty(args[1], dtype=args[0].dtype)
            if name == "aten::nonzero":  # one entry, so that loops over experts run once
                return torch.zeros(1, args[0].dim(), dtype=torch.int64)
            if name == "aten::_local_scalar_dense":
                return 0
            return func(*args, **(kwargs or {}))

    where: Any = FakeTensor.device
    there = torch.device(kind)

    def device(tensor: Any) -> Any:
        """The device, as transformers sees it: this torch has none but the CPU."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return there if caller.startswith("transformers.") else where.fget(tensor)

    class OnDevice(TorchFunctionMode):
        """Tensors are made on the CPU whatever device is asked for."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if given.get("device") is not None:
                given["device"] = "cpu"
            return func(*args, **given)

    fake: Any = FakeTensor
    fake.device = property(device)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Watch(), OnDevice(), torch.no_grad():
            yield
    finally:
        fake.device = where


def _kernel(experts: Any, cell: dict[str, Any], layer: dict[str, Any], machine: Machine, dtype: Any) -> Any:
    """The kernel of the experts' first matrix product, or the failure before it."""
    import torch

    tokens, top_k, hidden = TOKENS, layer["top_k"], layer["hidden"]
    compiling = torch.compiler.is_compiling
    try:
        with _until_a_product(machine.type):
            for module in experts.modules():
                for name, value in list(module._parameters.items()):
                    if value is not None:
                        fake = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                        module._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
                for name, value in list(module._buffers.items()):
                    if value is not None:
                        module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            parameters = len(inspect.signature(type(experts).forward).parameters) - 1
            few = parameters == 1
            rows = layer["experts"] * tokens if few else tokens
            given: list[Any] = [torch.empty(rows, hidden, dtype=dtype)]
            if not few:
                given.append(torch.zeros(tokens, top_k, dtype=torch.int64))
                given.append(torch.empty(tokens, top_k, dtype=dtype))
            given += [None] * (parameters - len(given))  # routing that is already prepared for a kernel
            torch.compiler.is_compiling = lambda: bool(cell["arguments"]["compile"])
            experts(*given)
    except Reached as found:
        return {"kernel": found.kernel}
    except Exception as error:
        return {"error": _failure(error)}
    finally:
        torch.compiler.is_compiling = compiling
    return {"error": {"kind": "", "says": "no matrix product", "where": ""}}


def _ask(
    cell: dict[str, Any], checkpoint: dict[str, Any], folder: str, machine: Machine, devices: dict[str, Any]
) -> dict[str, Any]:
    """The row of one cell."""
    import torch

    machine.become({**cell, "device": devices[cell["device"]]})
    row: dict[str, Any] = dict(cell)
    heard = _Warnings()
    logger = logging.getLogger("transformers")
    logger.addHandler(heard)
    try:
        model = _load(cell, checkpoint, folder, row)
    except Exception as error:
        row["error"] = _failure(error)
        return row
    finally:
        logger.removeHandler(heard)
        row["warnings"] = [text for text in heard.said if "uantiz" in text][:4]
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.endswith(".experts") and "shared" not in name
    ]
    if not found:
        row["error"] = {"kind": "", "says": "the model has no module of experts", "where": ""}
        return row
    name, experts = found[0]
    parent = model.get_submodule(name.rpartition(".")[0])
    row["experts"] = type(experts).__name__
    row["implementation"] = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if replaced := getattr(parent, "replaced_by", ""):
        row["prefill"] = row["decode"] = {"kernel": replaced}
        return row
    dtype = getattr(torch, row["dtype"])
    row["prefill"] = _kernel(experts, cell, checkpoint["layer"], machine, dtype)
    generation: Any = importlib.import_module("transformers.generation").GenerationMixin
    prepare: Any = getattr(generation, "_optimize_model_for_decode", None)
    with prepare(model) if prepare else contextlib.nullcontext():
        row["decode"] = _kernel(experts, cell, checkpoint["layer"], machine, dtype)
    return row


def main() -> None:
    """Answer every cell of standard input."""
    document = json.load(sys.stdin)
    warnings.filterwarnings("ignore")
    machine = import_transformers(document["imported"])
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    transformers.PreTrainedModel.device = property(lambda self: torch.device(machine.type))
    folders = {}
    base = tempfile.mkdtemp()
    for name, row in document["checkpoints"].items():
        folder = Path(base, name.replace("/", "--"))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
        folders[name] = str(folder)
    with Path(document["out"]).open("w", encoding="utf-8") as out:
        for cell in document["cells"]:
            checkpoint = document["checkpoints"][cell["checkpoint"]]
            row = _ask(
                copy.deepcopy(cell), checkpoint, folders[cell["checkpoint"]], machine, document["devices"]
            )
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
