"""moectl's experts in Hugging Face transformers.

Importing this module registers a quantizer. Directories that `moectl convert` has written then load like any
other, and `moectl_config` does it for checkpoints as published:

    import moectl.integrations.transformers as moectl_experts
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("./prepared", device_map="cuda")

    config = moectl_experts.moectl_config("openai/gpt-oss-20b")
    model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", config=config, device_map="cuda")

Routed experts are loaded and computed by moectl, all other modules by transformers. Generation and
``torch.compile`` work; training, saving, and tensor or expert parallelism are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import CheckpointError, NoBackend, UsageError
from ..kernels.prepared_layer import PreparedMoE
from .compile_at_load import begin, take
from .limits import ONE_RANK
from .model_experts import DTYPES, ModelExperts, open_experts

if TYPE_CHECKING:
    from ..layer.background_compile import KernelLoad

METHOD = "moectl"

logger = logging.get_logger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:[^.]+\.)*experts$")


@register_quantization_config(METHOD)
class MoectlConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of converted directories, and of checkpoints that `moectl_config` opens.

    Attributes:
        backend: a name of ``moectl list backends``; empty for the fastest that supports a layer here.
        warm_tokens: compile the kernels for up to this many tokens in a call while weights are loaded; 0:
            each is compiled when it is first used.
    """

    def __init__(self, backend: str = "", warm_tokens: int = 0, **stated: Any) -> None:
        self.quant_method: Any = METHOD
        self.backend, self.warm_tokens = backend, warm_tokens
        for key, value in stated.items():
            if key != "quant_method":
                setattr(self, key, value)


def moectl_config(name: str, backend: str = "", warm_tokens: int = 0, **options: Any) -> PreTrainedConfig:
    """The config of the checkpoint `name`, changed so that moectl loads and computes its experts.

    Args:
        name: a checkpoint's directory or Hub id, or a converted directory.
        backend, warm_tokens: see `MoectlConfig`.
        options: of ``AutoConfig.from_pretrained``.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(name, **options)
    config.quantization_config = {"quant_method": METHOD, "backend": backend, "warm_tokens": warm_tokens}
    inner = config.get_text_config(decoder=True)
    if inner is not config and getattr(inner, "quantization_config", None) is not None:
        del inner.quantization_config
    return config


class MoectlExperts(nn.Module):
    """Stands in a model where its experts were."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer: PreparedMoE | None = None

    def put(self, layer: PreparedMoE) -> None:
        """Give the module its weights, which stay on their device."""
        self.layer = layer
        for role, tensor in layer.weights.items():
            self.register_buffer(role, tensor, persistent=False)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum, of the shape and dtype of `hidden_states` ``[..., hidden]``."""
        layer = self.layer
        if layer is None:
            raise UsageError(f"{self.name} has no weights yet", hint="load the model with from_pretrained")
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = top_k_index.reshape(len(tokens), -1).to(torch.int32)
        out = layer(tokens, ids, top_k_weights.reshape(ids.shape).float())
        return out.view(hidden_states.shape)

    def _apply(self, fn: Any, recurse: bool = True) -> MoectlExperts:
        layer = self.layer
        if layer is not None and fn(torch.empty(0, device=layer.device)).device != layer.device:
            raise UsageError(
                f"the experts of {self.name} are on {layer.device} and stay there",
                hint="give from_pretrained the device_map that the model is to be on",
            )
        return self

    def extra_repr(self) -> str:
        return "no weights" if self.layer is None else repr(self.layer)


def refuse_offloading(places: Iterable[str], device_map: Mapping[str, Any]) -> None:
    """UsageError if `device_map` offloads the layer of one of the experts `places`.

    That is: puts it on disk or on ``meta``, or on the CPU beside layers that are on a GPU.
    """
    away = {"disk", "meta"}
    if not {str(place) for place in device_map.values()} <= {"cpu", *away}:
        away.add("cpu")
    for name in places:
        parts = name.split(".")
        above = (".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
        place = str(next((device_map[prefix] for prefix in above if prefix in device_map), ""))
        if place in away:
            raise UsageError(
                f"device_map offloads {name} to {place}, and moectl's experts are computed where they are",
                hint="give every layer with experts a device of those that compute",
            )


def device_beside(model: nn.Module, name: str) -> torch.device:
    """The device of the module that holds the experts `name`, or of the nearest above it with parameters.

    Raises UsageError for one without a device.
    """
    above = name.rpartition(".")[0]
    found = next(model.get_submodule(above).parameters(), None)
    if found is None and above:
        return device_beside(model, above)
    if found is None or found.is_meta:
        raise UsageError(
            f"the layer of {name} has no weights on any device",
            hint="load the model with from_pretrained, without offloading",
        )
    return found.device


@register_quantizer(METHOD)
class MoectlQuantizer(HfQuantizer):
    """Replaces experts before weights are loaded, and gives them moectl's afterwards.

    What else is quantized in the checkpoint is left to the quantizer of its published config, `inner`.
    """

    requires_calibration = True

    quantization_config: MoectlConfig

    def __init__(self, quantization_config: MoectlConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.inner: HfQuantizer | None = None
        self.experts: ModelExperts | None = None
        self.places: dict[str, int] = {}
        self.dtype = torch.bfloat16

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self.options = kwargs

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in DTYPES:
            logger.warning_once(
                f"moectl's experts take 16-bit tokens: the model is loaded in bfloat16, not {dtype}"
            )
            return torch.bfloat16
        return dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if getattr(model, "_tp_size", None) not in (None, 1):
            raise NoBackend(ONE_RANK, hint="leave tp_plan out")
        self.dtype = model.dtype
        self.experts = experts = open_experts(self._reference(model.config))
        experts.refuse_weight_on_input("transformers")
        self._delegate(model, experts, kwargs)
        for name, module in list(model.named_modules()):
            found = _LAYER.search(name)
            if found and int(found[1]) in experts.layers and not isinstance(module, MoectlExperts):
                self.places[name] = int(found[1])
                model.set_submodule(name, MoectlExperts(name))
        given = self.options.get("device_map")
        if isinstance(given, Mapping):
            refuse_offloading(self.places, given)
        missing = experts.layers - set(self.places.values())
        if missing:
            raise CheckpointError(
                f"{type(model).__name__} has no experts in layers {sorted(missing)}, the checkpoint has",
                hint="load it with the model class that its config names",
            )
        ours = [f"^{name}$" for name in experts.expert_names]
        ours += [rf"^{re.escape(name)}\." for name in self.places]
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *ours}
        return model

    @staticmethod
    def _reference(config: PreTrainedConfig) -> str:
        name, commit = str(config.name_or_path), getattr(config, "_commit_hash", None)
        return f"{name}@{commit}" if commit else name

    def _delegate(self, model: Any, experts: ModelExperts, kwargs: Mapping[str, Any]) -> None:
        """Hand the other quantized modules of `model` to the quantizer of the published config."""
        if not experts.others_quantized or not experts.published:
            return
        self.inner = AutoHfQuantizer.from_config(dict(experts.published), pre_quantized=True)
        self.inner.validate_environment(**self.options)
        self.inner.preprocess_model(model, **kwargs)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            self.inner.postprocess_model(model, **kwargs)
            model.config.quantization_config = self.quantization_config
        assert self.experts is not None
        asked = self.quantization_config.backend
        loads: list[tuple[KernelLoad, PreparedMoE]] = []
        # What "auto" came to is known once the model is on its devices.
        refuse_offloading(self.places, getattr(model, "hf_device_map", {}))
        devices = {name: device_beside(model, name) for name in self.places}
        for name, layer in self.places.items():
            self.experts.expect(layer, devices[name], DTYPES[self.dtype], asked)
        for name, layer in self.places.items():
            module, device = model.get_submodule(name), devices[name]
            load = self._compiling(layer, device)
            module.put(prepared := self.experts.prepared(layer, device, DTYPES[self.dtype], asked))
            if load is not None:
                loads.append((load, prepared))
        for load, prepared in loads:
            take(load, prepared, logger.info)
        return model

    def _compiling(self, layer: int, device: torch.device) -> KernelLoad | None:
        """The kernels of a layer, being compiled if the config asks for it."""
        tokens = self.quantization_config.warm_tokens
        if not tokens or device.type != "cuda":
            return None
        assert self.experts is not None
        problem, dtype = self.experts.problem_of(layer), DTYPES[self.dtype]
        backend = self.quantization_config.backend or self.experts.backends(problem, device)[0]
        return begin(problem, dtype, backend, device, tokens)

    def update_device_map(self, device_map: Any) -> Any:
        return device_map

    def get_weight_conversions(self) -> list[Any]:
        asked: Any = self.inner
        return [] if asked is None else list(asked.get_weight_conversions())

    def update_weight_conversions(self, weight_conversions: Any, *args: Any) -> Any:
        asked: Any = self.inner if self.inner is not None else super()
        return asked.update_weight_conversions(weight_conversions, *args)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.inner is not None and self.inner.param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> Any:
        asked: Any = self.inner if self.inner is not None else super()
        return asked.get_quantize_ops()

    @property
    def is_compileable(self) -> bool:
        return self.inner is None or self.inner.is_compileable

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        logger.error(
            "the weights of moectl's experts are in a kernel's layout, which save_pretrained does not write; "
            "copy the converted directory, or restore the original with moectl unconvert"
        )
        return False

    @property
    def is_trainable(self) -> bool:
        return False
