"""vLLM's `QuantizationConfig` of a checkpoint whose routed experts moectl loads and computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    QuantizationMethods,
    get_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ...engine_names import kernels_asked
from .. import METHOD
from .log import logger_of

logger = logger_of(__name__)


class MoectlQuantization(QuantizationConfig):
    """Routed experts are moectl's; all other layers are left to the config that the checkpoint came with.

    Attributes:
        stated: the ``quantization_config`` of config.json; empty without one.
        experts: the checkpoint's experts, once vLLM has named it.
        inner: the published config of the other layers, and of experts that moectl has no kernel for.
        name: the checkpoint's name or path, as vLLM gave it.
        methods: methods of the layers whose experts moectl loads, by their numbers.
        ahead: while vLLM reloads, the experts that will take these layers' place, by the checkpoint's name.
    """

    def __init__(self, stated: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.stated = dict(stated or {})
        self.experts: Any = None
        self.inner: QuantizationConfig | None = None
        self.name = ""
        self.methods: dict[int, Any] = {}
        self.ahead: dict[str, Any] = {}

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MoectlQuantization:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claims converted directories, and on request published checkpoints; asked before vLLM's own."""
        if not isinstance(hf_quant_cfg, Mapping):
            return None
        asked = user_quant == METHOD or (user_quant is None and kernels_asked())
        return METHOD if asked or hf_quant_cfg.get("quant_method") == METHOD else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Open the checkpoint: this call, right after `from_config`, is the first that names it.

        vLLM has its config.json then, and downloads weights later: headers are enough.
        """
        from ...model_experts import open_experts

        self.name = model_name
        self.experts = open_experts(model_name, revision=revision, offline=False, download=True)
        published = self.experts.published
        if published:
            name = _method_of(published, hf_config)
            self.inner = get_quantization_config(name).from_config(published)
            self.inner.packed_modules_mapping = self.packed_modules_mapping
            self.inner.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.inner is not None:
            self.inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        return (self.inner or QuantizationConfig).get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:
        """Drops the tensors of moectl's experts: no model class sees them, their bytes are not read.

        A model asks whenever it loads weights; when it loads them again, moectl's experts are read again too.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        from .reload import reload

        self.experts, self.name = reload(self.experts, self.name, self.methods, self.ahead.get)
        mapper = (self.inner or QuantizationConfig).get_checkpoint_weight_mapper()
        layers = "|".join(map(str, sorted(self.methods)))
        dropped = {
            re.compile("^" + name.replace(r"\d+", f"(?:{layers})", 1) + "$"): None
            for name in self.experts.expert_names
            if layers
        }
        return mapper | WeightsMapper(orig_to_new_regex=dropped)

    @contextmanager
    def reloading(self, config: Any, path: str | None) -> Iterator[None]:
        """Around vLLM's ``reload_weights`` of `path`, None: the same again.

        Raises what `reload.checked` does, before vLLM changes anything.
        """
        from .reload import checked

        model, now = config.model_config, path or config.model_config.model
        if any(method.moe_kernel for method in self.methods.values()) and (
            config.load_config.load_format != "dummy"
        ):
            revision = None if path else model.revision  # vLLM drops it with the name that it belongs to
            self.ahead[now] = checked(self.experts, self.name, self.methods, now, revision)
        try:
            yield
        finally:
            self.ahead.clear()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.models.utils import extract_layer_index

        number = extract_layer_index(prefix) if isinstance(layer, RoutedExperts) else None
        if number is not None and number in self.experts.layers:
            from .deployment import download_folder
            from .engine_calls import refuse_calls
            from .experts import experts_method

            self.experts = self.experts.in_cache(download_folder())
            method = experts_method(self.experts, layer, number, prefix, self.inner)
            if method is not None:
                self.methods[number] = method
                refuse_calls()
                return method
        return self._others(layer, prefix)

    def _others(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if self.inner is not None:
            self.inner.packed_modules_mapping = self.packed_modules_mapping
            return self.inner.get_quant_method(layer, prefix)
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def _method_of(published: Mapping[str, Any], hf_config: Any) -> str:
    """The name by which vLLM itself would serve a published ``quantization_config``."""
    for name in QUANTIZATION_METHODS:
        if name in get_args(QuantizationMethods):
            method = get_quantization_config(name)
            claimed = method.override_quantization_method(published, None, hf_config=hf_config)
            if claimed is not None:
                return str(claimed)
    return str(published["quant_method"])
