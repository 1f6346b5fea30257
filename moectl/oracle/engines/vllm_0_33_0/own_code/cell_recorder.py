"""Decisions of the imported vLLM release about cells of a grid, on one device with one set of packages.

Each cell goes vLLM's own way: the checkpoint's quantization config chooses a quantization class, its quant
method asks the oracle, sizes are rounded, weights are created on the meta device. Only the platform's
properties, the ranks and the packages are given as values. What passes by is recorded, not recomputed.

Runs in the process of the release that is asked, without moectl.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import traceback
import types
from typing import Any

_WATCHED: Any = importlib.import_module("watched_selection")


class _Finished(Exception):
    """Weights are created: what follows is no decision."""


class _Asked(Exception):
    """The layer's config is known: what follows is asked without the layer."""


def _function(path: str) -> Any:
    """The function at ``module:Class.name``; without a path some function, which is never called."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module)) if names else print


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
        self.passing = _WATCHED.Passing()
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
        if (
            model["activation"].endswith("_no_mul")
            and "ckpt_names" in inspect.signature(self.factory).parameters
        ):
            routing["ckpt_names"] = ("up_proj", "down_proj", None)
        if "custom_routing_function" in routing:
            routing["custom_routing_function"] = _function(routing["custom_routing_function"])
        bias = self.torch.zeros(model["E"], dtype=self.torch.float32) if routing.pop("e_bias", 0) else None
        if routing.pop("router_dtype", None) == "fp32":
            routing["router_logits_dtype"] = self.torch.float32
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
        passing: Any,
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
            "rejected": [{**found, "code": _WATCHED.code_of(found["reason"])} for found in passing.rejected],
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
