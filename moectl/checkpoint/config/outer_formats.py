"""The number formats of modules outside the routed experts, as a quantization config declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from ...problem.schemes import BF16, WeightFormat
from .declared_layers import DeclaredLayers
from .layer_precision import MODULE_PREFIXES
from .module_patterns import REGEX, PatternLists, Patterns, few_expressions
from .quantization import MIXED_PRECISION, compressed_group, listed_modules, quantization_method
from .quantization_formats import mapping, modelopt_scheme, names, quark_scheme
from .stated_sizes import Untold


class OuterFormats:
    """The format of any module outside the experts, as the quantization config declares it.

    Raises `Untold` for a config that does not tell: one of a trimmed copy, which lists no exception, or of
    a method whose rules are not followed here.
    """

    def __init__(self, declared: DeclaredLayers) -> None:
        self.main, self.config = declared.precision.main, declared.quantization or {}
        self.excluded, self.method = declared.precision.excluded, quantization_method(self.config)
        inner = self.config.get("quantization")
        self.inner = inner if isinstance(inner, Mapping) else self.config
        self.rules = tuple(few_expressions(self._rules(), lambda rule: rule[0]))
        self.rule_lists = PatternLists([patterns for patterns, _ in self.rules])
        self.listed = listed_modules(self.inner) if self.method.startswith("modelopt") else {}
        mixed = str(self.inner.get("quant_algo")).upper() == MIXED_PRECISION
        lists = self.method in ("compressed-tensors", "quark") or self.method.startswith("modelopt")
        if self.method not in _METHODS or (lists and not (self.excluded or self.listed)):
            raise Untold(self.method)
        if mixed and not self.listed:
            raise Untold("quantized_layers")
        texts = [*self.excluded.texts, *self.listed, *(text for rule, _ in self.rules for text in rule.texts)]
        layers = [prefix for prefix in MODULE_PREFIXES if any(prefix in text for text in texts)]
        self.prefixes = [prefix.removesuffix("layers").removesuffix("blocks") for prefix in layers]

    def of(self, prefix: str, module: str) -> WeightFormat:
        """The format of `module` in the layer with the `prefix`."""
        names = [f"{before}{prefix}{module}" for before in (*self.prefixes, "model.", "")]
        if self.listed:
            entry = next((self.listed[name] for name in names if name in self.listed), None)
            return BF16 if entry is None else _listed(str(entry.get("quant_algo")))
        if not prefix or self.method in ("", "mxfp4", "gpt_oss_mxfp4"):
            return BF16
        if any(map(self.excluded.matches, names)):
            return BF16
        rule = self.rule_lists.first(names)
        if rule is not None:
            return self.rules[rule][1]()
        if self.method == "compressed-tensors":
            return BF16
        return self.main.scheme.weight

    def _rules(self) -> Iterator[tuple[Patterns, Callable[[], WeightFormat]]]:
        """Patterns of modules with a format of their own; the first that matches applies."""
        if self.method == "compressed-tensors":
            for name, group in mapping(self.config, "config_groups").items():
                if not isinstance(group, Mapping):
                    continue
                targets = [f"{REGEX}.*" if it == "Linear" else it for it in names(group, "targets")]
                read = cache(partial(_of_group, self.config, name, group))
                yield Patterns(targets, f"config_groups.{name}.targets", exact=True), read
        for name, rule in mapping(self.inner, "layer_quant_config").items():
            if isinstance(rule, Mapping):
                key = f"layer_quant_config.{name}"
                yield Patterns((name,), key), cache(partial(_of_quark, rule, key))
        for name in mapping(self.config, "dynamic"):
            if not name.startswith("-:"):
                raise Untold("dynamic")
            yield Patterns((name.removeprefix("-:"),), "dynamic", regex=True), lambda: BF16


_METHODS = (
    "",
    "awq",
    "awq_marlin",
    "compressed-tensors",
    "fp8",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "mxfp4",
    "gpt_oss_mxfp4",
    "mxfp8",
    "quark",
)
"""Methods whose rules for modules outside the experts are followed."""


def _of_group(config: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> WeightFormat:
    return compressed_group(config, name, group)[1].weight


def _of_quark(rule: Mapping[str, Any], key: str) -> WeightFormat:
    return quark_scheme(rule, key).weight


@cache
def _listed(algorithm: str) -> WeightFormat:
    return modelopt_scheme(algorithm, "quantized_layers").weight
