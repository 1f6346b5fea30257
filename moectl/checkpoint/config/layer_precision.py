"""Which layers' experts have another format than most: exclusions, lists and patterns of a config."""

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
    """Modules that `patterns` cover have `scheme`, as `key` of the quantization config says."""

    patterns: Patterns
    scheme: Scheme
    key: str


@dataclass(frozen=True)
class Precision:
    """The format of each layer's experts, as a quantization config declares it.

    Attributes:
        main: the format of most of them.
        excluded: modules that stay unquantized, as the key `excluded_by` lists them.
        rules: what some modules have instead of `main`; the first that covers one holds.
        listed: the format of each layer where the config lists modules; layers that are not listed
            then stay unquantized. Empty without such a list.
    """

    main: Quantization
    excluded: Patterns
    excluded_by: str = ""
    rules: tuple[_PrecisionRule, ...] = ()
    listed: Mapping[int, Scheme] = field(default_factory=dict)

    def at(self, layer: int, modules: Iterable[str]) -> Quantization:
        """The format of one layer's experts, `modules` being names that its expert matrices may have."""
        names = tuple(modules)
        if self.excluded and any(map(self.excluded.matches, names)):
            return self._plain(self.excluded_by)
        for rule in self.rules:
            if any(map(rule.patterns.matches, names)):
                plain = rule.scheme == Scheme(BF16)
                return self._plain(rule.key) if plain else self._other(rule.scheme, rule.key)
        if not self.listed:
            return self.main
        if layer in self.listed:
            return self._other(self.listed[layer], "quantized_layers")
        return self._plain("quantized_layers")

    def likely(self) -> Precision:
        """This, less every pattern that covers no name of `likely_modules`: cheap for all layers."""
        return replace(
            self,
            excluded=self.excluded.about(_WORDS),
            rules=tuple(rule for rule in self.rules if rule.patterns.about(_WORDS)),
        )

    def guess(self, layer: int) -> Quantization:
        """The format of one layer's experts where no tensor's name is known."""
        return self.at(layer, likely_modules(layer) if self.excluded or self.rules else ())

    def _plain(self, key: str) -> Quantization:
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

    def _other(self, scheme: Scheme, key: str) -> Quantization:
        if scheme == self.main.scheme:
            return self.main
        sources = {**self.main.sources, "scheme": f"config:quantization_config.{key}"}
        return replace(self.main, scheme=scheme, sources=sources)


def read_precision(main: Quantization, config: Config | None) -> Precision:
    """The `Precision` of a quantization config, `main` being what `parse_quantization` read from it.

    Raises CheckpointError when a pattern or a rule's format is not understood, or one layer's experts
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
    return Precision(main, excluded, key, rules, _listed(inner) if main.storage == "modelopt" else {})


def _listed(config: Config) -> dict[int, Scheme]:
    """The scheme of each layer whose expert modules the config lists."""
    names: dict[int, set[str]] = {}
    for module, name in listed_algorithms(config).items():
        match = _LAYER.search(module)
        if match is not None:
            names.setdefault(int(match[1]), set()).add(name)
    for layer, found in names.items():
        if len(found) > 1:
            raise CheckpointError(
                f"quantization_config.quantized_layers must have one quant_algo for all routed experts of "
                f"layer {layer}, got {', '.join(sorted(found))}.",
                hint="Check config.json, or ask for experts of several formats to be added.",
            )
    schemes = {name: modelopt_scheme(name, "quantized_layers") for (name,) in map(tuple, names.values())}
    return {layer: schemes[next(iter(found))] for layer, found in names.items()}


def _quark_rules(config: Config) -> Iterable[_PrecisionRule]:
    rules = config.get("layer_quant_config")
    for name, rule in rules.items() if isinstance(rules, Mapping) else ():
        if isinstance(rule, Mapping) and (is_expert_rule(name) or name.startswith(REGEX)):
            key = f"layer_quant_config.{name}"
            yield _PrecisionRule(Patterns((name,), "layer_quant_config"), quark_scheme(rule, key), key)


def _group_rules(config: Config) -> Iterable[_PrecisionRule]:
    """compressed-tensors' groups that name modules, where there are several."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) < 2 or config.get("quant_algo"):
        return
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        named = [target for target in targets or () if isinstance(target, str) and is_module(target)]
        if named:
            key = f"config_groups.{name}"
            yield _PrecisionRule(
                Patterns(named, f"{key}.targets"), group_scheme(group, key), f"{key}.weights"
            )


def _auto_round_rules(config: Config) -> Iterable[_PrecisionRule]:
    """AutoRound's exceptions, names or regular expressions, those of one format together."""
    entries = config.get("extra_config")
    named: dict[Scheme, list[str]] = {}
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping) and is_expert_rule(name):
            text = name if _NAME.fullmatch(name) else REGEX + name
            named.setdefault(auto_round_scheme(config, entry), []).append(text)
    for scheme, texts in named.items():
        yield _PrecisionRule(Patterns(texts, "extra_config"), scheme, "extra_config")


def is_module(target: str) -> bool:
    """True for a target that names modules, by a pattern or a name, and not a class such as ``Linear``."""
    return target.startswith(REGEX) or "." in target


def likely_modules(layer: int) -> tuple[str, ...]:
    """Names that the expert matrices of a layer have in published checkpoints, for when none is known."""
    return tuple(
        f"{prefix}{word}.{layer}.{block}{leaf}"
        for prefix, word in (*((prefix, "layers") for prefix in _PREFIXES), ("transformer.", "blocks"))
        for block in _BLOCKS
        for leaf in _LEAVES
    )


_WORDS = " ".join(likely_modules(0))
