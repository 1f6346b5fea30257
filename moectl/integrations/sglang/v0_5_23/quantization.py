"""SGLang's `QuantizationConfig` of a checkpoint whose routed experts moectl loads and computes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from ....errors import NoBackend
from ....kernels.prepared_layer import PreparedMoE
from ...compile_at_load import take
from ...engine_names import kernels_asked
from ...model_experts import ModelExperts
from .. import METHOD
from .experts import SglangMoEMethod

if TYPE_CHECKING:
    from ....layer.background_compile import KernelLoad

logger = logging.getLogger(__name__)


class SglangQuantization(QuantizationConfig):
    """Routed experts are moectl's; all other layers are left to the config that the checkpoint came with.

    Attributes that it does not have are those of `inner`.

    Attributes:
        experts: the checkpoint's experts.
        inner: SGLang's config of the other layers, and of experts that moectl has no kernel for.
        backends: moectl's backends of the layers that it computes, by number.
        dtype: of tokens, ``bf16`` or ``fp16``.
        placed: numbers of the layers that the model has built with moectl's experts.
        filtered: whether the model's loader no longer sees the experts' tensors.
        loaded: numbers of the layers that have their weights.
    """

    _silent: ClassVar[bool] = False

    def __init__(
        self,
        experts: ModelExperts,
        inner: QuantizationConfig | None,
        backends: Mapping[int, str],
        dtype: str,
    ) -> None:
        super().__init__()
        self.experts, self.inner, self.backends, self.dtype = experts, inner, dict(backends), dtype
        self.placed: set[int] = set()
        self.loaded: set[int] = set()
        self.filtered = False
        self._loads: list[tuple[KernelLoad, PreparedMoE]] = []
        if inner is not None:
            self.packed_modules_mapping = inner.packed_modules_mapping
            self.weight_block_size = inner.weight_block_size
            self.convert_mxfp8_to_block_fp8 = inner.convert_mxfp8_to_block_fp8

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(inner, name)

    def get_name(self) -> str:
        """The published method's name where SGLang loads experts, for its models ask for it."""
        left = self.experts.layers - set(self.backends)
        return self.inner.get_name() if left and self.inner is not None else METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        # Without a file's name SGLang makes a config without arguments, which says less.
        return ["/config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SglangQuantization:
        """Raises NoBackend: `loading.quantization_of` is to be called instead."""
        raise NoBackend(
            "SGLang did not apply moectl's hooks, so experts cannot be loaded",
            hint="see its log for `Failed to apply hooks`, and SGLANG_PLUGINS",
        )

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Claims converted directories, and on request published checkpoints; asked before SGLang's own."""
        if cls._silent or not isinstance(hf_quant_cfg, Mapping):
            return None
        asked = user_quant == METHOD or (user_quant is None and kernels_asked())
        return METHOD if asked or hf_quant_cfg.get("quant_method") == METHOD else None

    @classmethod
    @contextmanager
    def silent(cls) -> Iterator[None]:
        """Claim nothing, so that SGLang says what it would do itself."""
        cls._silent = True
        try:
            yield
        finally:
            cls._silent = False

    def get_scaled_act_names(self) -> list[str]:
        return [] if self.inner is None else self.inner.get_scaled_act_names()

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        super().update_packed_modules_mapping(mapping)
        if self.inner is not None:
            self.inner.update_packed_modules_mapping(mapping)

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        if self.inner is not None:
            self.inner.apply_weight_name_mapper(hf_to_sglang_mapper)

    def is_linear_unquantized(self, prefix: str) -> bool:
        return self.inner is None or self.inner.is_linear_unquantized(prefix)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        routed = isinstance(layer, FusedMoE) and not layer.is_shared_fused_moe
        if routed and layer.layer_id in self.backends:
            number = int(layer.layer_id)
            self.placed.add(number)
            return SglangMoEMethod(self, layer, number)
        if self.inner is not None:
            return self.inner.get_quant_method(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def has_loaded(self, number: int, layer: PreparedMoE, load: KernelLoad | None) -> None:
        """Takes note of a layer's weights; with those of the last, waits for the kernels of all.

        That is before SGLang measures its memory, and before it captures graphs.
        """
        self.loaded.add(number)
        if load is not None:
            self._loads.append((load, layer))
        if self.loaded >= self.placed:
            for waiting, prepared in self._loads:
                take(waiting, prepared, logger.info)
            self._loads.clear()
