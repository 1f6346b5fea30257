"""The number format of each layer's experts: exclusions, per-layer lists and module patterns of a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...errors import CheckpointError
from ...problem.schemes import BF16, Scheme
from .module_patterns import REGEX, Patterns
from .quantization import Quantization, auto_round_scheme, listed_algorithms
from .quantization_formats import Config, group_scheme, is_expert_rule, modelopt_scheme, quark_scheme

_IGNORE_KEYS = (
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "modules_to_not_convert",
    "exclude",
    "dynamic",
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d{1,5})\.")
_NAME = re.compile(r"[\w.]+", re.ASCII)

_PREFIXES = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "transformer.",
    "",
)
_BLOCKS = ("mlp.", "block_sparse_moe.", "feed_forward.", "mixer.", "ffn.", "moe.", "")
_LEAVES = ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.w1", "experts.gate_up_proj")


@dataclass(frozen=True)
class _PrecisionRule:
    """Modules that match `patterns` have `scheme`, according to `key` of the quantization config."""

    patterns: Patterns
    scheme: Scheme
    key: str


@dataclass(frozen=True)
class Precision:
    """The format of each layer's experts, as a quantization config declares it.

    Attributes:
        main: the format of most layers.
        excluded: modules that stay unquantized, listed under the key `excluded_by`.
        rules: formats of some modules instead of `main`; the first rule that matches applies.
        listed: format by layer, for configs that list the quantized modules; all other layers then stay
            unquantized. Empty without such a list.
    """

    main: Quantization
    excluded: Patterns
    excluded_by: str = ""
    rules: tuple[_PrecisionRule, ...] = ()
    listed: Mapping[int, Scheme] = field(default_factory=dict)

    def of_layer(self, layer: int, modules: Iterable[str]) -> Quantization:
        """The format of one layer's experts; `modules` are the names of its expert matrices."""
        names = tuple(modules)
        if self.excluded and any(map(self.excluded.matches, names)):
            return self._unquantized(self.excluded_by)
        for rule in self.rules:
            if any(map(rule.patterns.matches, names)):
                unquantized = rule.scheme == Scheme(BF16)
                return self._unquantized(rule.key) if unquantized else self._with(rule.scheme, rule.key)
        if not self.listed:
            return self.main
        if layer in self.listed:
            return self._with(self.listed[layer], "quantized_layers")
        return self._unquantized("quantized_layers")

    def likely(self) -> Precision:
        """A copy without the patterns that cannot match `likely_modules`, so that `guess` is cheap."""
        return replace(
            self,
            excluded=self.excluded.restricted_to(_LIKELY_NAMES),
            rules=tuple(rule for rule in self.rules if rule.patterns.restricted_to(_LIKELY_NAMES)),
        )

    def guess(self, layer: int) -> Quantization:
        """The format of one layer's experts, judged by the usual module names when no header was read."""
        return self.of_layer(layer, likely_modules(layer) if self.excluded or self.rules else ())

    def _unquantized(self, key: str) -> Quantization:
        if self.main.storage == "plain":
            return self.main
        source = f"config:quantization_config.{key}"
        return replace(
            self.main,
            storage="plain",
            scheme=Scheme(BF16),
            act_order="",
            sources={"scheme": source, "storage": source},
        )

    def _with(self, scheme: Scheme, key: str) -> Quantization:
        if scheme == self.main.scheme:
            return self.main
        sources = {**self.main.sources, "scheme": f"config:quantization_config.{key}"}
        return replace(self.main, scheme=scheme, sources=sources)


def read_precision(main: Quantization, config: Config | None) -> Precision:
    """The `Precision` of a quantization config, whose result of `parse_quantization` is `main`.

    Raises CheckpointError when a pattern or a rule's format is not understood, or the experts of one layer
    have several formats.
    """
    if not config:
        return Precision(main, Patterns((), ""))
    inner = config.get("quantization")
    inner = inner if isinstance(inner, Mapping) else config
    key = next((key for key in _IGNORE_KEYS if inner.get(key)), "")
    excluded = Patterns(map(str, main.ignore), key, regex=key == "dynamic")
    rules = (
        (*_quark_rules(inner), *_group_rules(inner), *_auto_round_rules(inner))
        if main.storage != "modelopt"
        else ()
    )
    listed = _listed_schemes(inner) if main.storage == "modelopt" else {}
    return Precision(main, excluded, key, rules, listed)


def _listed_schemes(config: Config) -> dict[int, Scheme]:
    """The scheme of each layer whose expert modules the config lists (ModelOpt's mixed precision)."""
    names: dict[int, set[str]] = {}
    for module, name in listed_algorithms(config).items():
        match = _LAYER.search(module)
        if match is not None:
            names.setdefault(int(match[1]), set()).add(name)
    for layer, algorithms in names.items():
        if len(algorithms) > 1:
            raise CheckpointError(
                f"quantization_config.quantized_layers must have one quant_algo for all routed experts of "
                f"layer {layer}, got {', '.join(sorted(algorithms))}.",
                hint="Check config.json, or ask for experts of several formats to be added.",
            )
    schemes = {name: modelopt_scheme(name, "quantized_layers") for (name,) in map(tuple, names.values())}
    return {layer: schemes[next(iter(algorithms))] for layer, algorithms in names.items()}


def _quark_rules(config: Config) -> Iterable[_PrecisionRule]:
    rules = config.get("layer_quant_config")
    for name, rule in rules.items() if isinstance(rules, Mapping) else ():
        if isinstance(rule, Mapping) and (is_expert_rule(name) or name.startswith(REGEX)):
            key = f"layer_quant_config.{name}"
            yield _PrecisionRule(Patterns((name,), "layer_quant_config"), quark_scheme(rule, key), key)


def _group_rules(config: Config) -> Iterable[_PrecisionRule]:
    """One rule for each compressed-tensors group that names modules, if there are several groups."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) < 2 or config.get("quant_algo"):
        return
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        modules = [target for target in targets or () if isinstance(target, str) and is_module(target)]
        if modules:
            key = f"config_groups.{name}"
            yield _PrecisionRule(
                Patterns(modules, f"{key}.targets"), group_scheme(group, key), f"{key}.weights"
            )


def _auto_round_rules(config: Config) -> Iterable[_PrecisionRule]:
    """One rule for each format in AutoRound's exceptions, which are names or regular expressions."""
    entries = config.get("extra_config")
    patterns: dict[Scheme, list[str]] = {}
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping) and is_expert_rule(name):
            text = name if _NAME.fullmatch(name) else REGEX + name
            patterns.setdefault(auto_round_scheme(config, entry), []).append(text)
    for scheme, texts in patterns.items():
        yield _PrecisionRule(Patterns(texts, "extra_config"), scheme, "extra_config")


def is_module(target: str) -> bool:
    """True for a target that is a module name or pattern, and not a class such as ``Linear``."""
    return target.startswith(REGEX) or "." in target


def likely_modules(layer: int) -> tuple[str, ...]:
    """Names that a layer's expert matrices have in published checkpoints, for configs without headers."""
    return tuple(
        f"{prefix}{word}.{layer}.{block}{leaf}"
        for prefix, word in (*((prefix, "layers") for prefix in _PREFIXES), ("transformer.", "blocks"))
        for block in _BLOCKS
        for leaf in _LEAVES
    )


_LIKELY_NAMES = " ".join(likely_modules(0))
