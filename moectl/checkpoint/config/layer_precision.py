"""The number format of each layer's experts: exclusions, per-layer lists and module patterns of a config."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain

from ...errors import CheckpointError
from ...problem.schemes import BF16, Scheme
from .families import UNKNOWN, Family
from .module_patterns import REGEX, PatternLists, Patterns, few_expressions
from .quantization import (
    MIXED_PRECISION,
    Parsed,
    Quantization,
    compressed_group,
    is_class_of_experts,
    listed_modules,
    overridden,
    quantization_method,
)
from .quantization_formats import Config, is_expert_rule, mapping, modelopt_scheme, names, quark_scheme

_IGNORE_KEYS = (
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "modules_to_not_convert",
    "exclude",
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d{1,5})\.")
_NAME = re.compile(r"[\w.]+", re.ASCII)

MODULE_PREFIXES = (
    "model.layers",
    "language_model.model.layers",
    "model.language_model.layers",
    "backbone.layers",
    "transformer.layers",
    "thinker.model.layers",
    "transformer.blocks",
    "layers",
)
"""What precedes a layer's number in the names of its modules."""

_LEAVES = (
    ("0.gate_proj", "0.w1", "gate_up_proj", "gate_proj"),
    ("0.up_proj", "0.w3", "gate_up_proj", "up_proj"),
    ("0.down_proj", "0.w2", "down_proj"),
)
"""Names of gate, up and down in a module of experts, whether each has a number or all share one tensor."""

_BARE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "moe": (("gate_proj",), ("up_proj",), ("down_proj",)),
    "block_sparse_moe": (("input_linear",), ("input_linear",), ("output_linear",)),
    "ffn.experts.mlp": (("w1",), ("v1",), ("w2",)),
}
"""The same of modules that hold the matrices directly."""

_ELSEWHERE = ("shared", "mtp", "attn", "attention", "visual", "vision", "lm_head", "embed")
"""Words in the names of modules that are not the main model's routed experts."""


@dataclass(frozen=True)
class _PrecisionRule:
    """Modules that match `patterns` have the format that `read` returns, as `key` of the config says.

    A format is read when a module first matches, so that one which is not understood is no error elsewhere.
    """

    patterns: Patterns
    read: Callable[[], Parsed]
    key: str


@dataclass(frozen=True)
class Precision:
    """The format of each layer's experts, as a quantization config declares it.

    Attributes:
        main: the format of most layers.
        family: the architecture, which says how the modules of the experts are called.
        gated: False when experts have no gate matrix.
        excluded: modules that stay unquantized, listed under the key `excluded_by`.
        rules: formats of some modules instead of `main`; the first rule that matches applies.
        rest: the rule of modules that no other one names; None when they have the format `main`.
        rest_key: the key that names all quantized modules, so that others stay unquantized; ``""`` if none.
        listed: format by layer, for configs that list the quantized modules; all other layers then stay
            unquantized. Empty without such a list.
    """

    main: Quantization
    excluded: Patterns
    excluded_by: str = ""
    rules: tuple[_PrecisionRule, ...] = ()
    rest: _PrecisionRule | None = None
    rest_key: str = ""
    listed: Mapping[int, Scheme] = field(default_factory=dict)
    family: Family = UNKNOWN
    gated: bool = True

    @cached_property
    def _rule_lists(self) -> PatternLists:
        return PatternLists([rule.patterns for rule in self.rules])

    def of_layer(self, layer: int, modules: Iterable[str]) -> Quantization:
        """The format of one layer's experts; `modules` are the names of its expert matrices."""
        names = tuple(modules)
        if self.excluded and any(map(self.excluded.matches, names)):
            return self._unquantized(self.excluded_by)
        rule = self._rule_lists.first(names)
        if rule is not None:
            return self._of_rule(self.rules[rule])
        if self.rest is not None:
            return self._of_rule(self.rest)
        if self.rest_key:
            return self._unquantized(self.rest_key)
        if not self.listed:
            return self.main
        if layer in self.listed:
            return self._with(("modelopt", self.listed[layer], "", {}, ()), "quantized_layers")
        return self._unquantized("quantized_layers")

    def likely(self) -> Precision:
        """A copy without the patterns that cannot match the family's modules, so that `guess` is cheap."""
        words = " ".join(name for role in self._modules(0) for name in role)
        return replace(
            self,
            excluded=self.excluded.restricted_to(words),
            rules=tuple(
                replace(rule, patterns=patterns)
                for rule in self.rules
                if (patterns := rule.patterns.restricted_to(words))
            ),
        )

    def guess(self, layer: int) -> Quantization:
        """The format of one layer's experts, judged by the family's module names when no header was read.

        Raises CheckpointError when the config gives an expert's matrices different formats.
        """
        if not (self.excluded or self.rules):
            return self.of_layer(layer, ())
        found = [self.of_layer(layer, modules) for modules in self._modules(layer)]
        kinds = {(item.storage, item.scheme, item.act_order) for item in found}
        if len(kinds) > 1:
            roles = ("gate", "up", "down")[-len(found) :]
            said = ", ".join(f"{role} {item.scheme}" for role, item in zip(roles, found, strict=True))
            raise mixed_matrices(layer, said)
        return found[0]

    def _modules(self, layer: int) -> Sequence[tuple[str, ...]]:
        return expert_modules(self.family.experts, layer, self.gated)

    def _of_rule(self, rule: _PrecisionRule) -> Quantization:
        parsed = rule.read()
        return self._unquantized(rule.key) if parsed[0] == "plain" else self._with(parsed, rule.key)

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

    def _with(self, parsed: Parsed, key: str) -> Quantization:
        storage, scheme, order, _, _ = parsed
        if (storage, scheme, order) == (self.main.storage, self.main.scheme, self.main.act_order):
            return self.main
        sources = {**self.main.sources, "scheme": f"config:quantization_config.{key}"}
        return replace(self.main, storage=storage, scheme=scheme, act_order=order, sources=sources)


def mixed_matrices(layer: int, said: str) -> CheckpointError:
    """The error for experts whose matrices have different formats; `said` names those of each."""
    return CheckpointError(
        f"layer {layer}: an expert's matrices must all have one format, got {said}.",
        reason="Fused kernels take gate, up and down in one format, and engines refuse such checkpoints.",
        hint="Quantize all matrices of the experts in one format, or leave all of them unquantized.",
    )


def read_precision(
    main: Quantization, config: Config | None, family: Family = UNKNOWN, gated: bool = True
) -> Precision:
    """The `Precision` of a quantization config, whose result of `parse_quantization` is `main`.

    Raises CheckpointError when a pattern or a rule's format is not understood, or the experts of one layer
    have several formats.
    """
    if not config:
        return Precision(main, Patterns((), ""))
    inner = config.get("quantization")
    inner = inner if isinstance(inner, Mapping) else config
    key = next((key for key in _IGNORE_KEYS if inner.get(key)), "")
    method = quantization_method(config)
    excluded = Patterns(map(str, main.ignore), key, exact=method == "compressed-tensors")
    precision = Precision(main, excluded, key, family=family, gated=gated)
    if method == "compressed-tensors":
        return _with_groups(precision, config)
    if main.storage == "modelopt":
        return _with_listed(precision, inner)
    rules = chain(_quark_rules(inner), _dynamic_rules(inner), _auto_round_rules(inner))
    return replace(precision, rules=_few(rules))


def _few(rules: Iterable[_PrecisionRule]) -> tuple[_PrecisionRule, ...]:
    return tuple(few_expressions(rules, lambda rule: rule.patterns))


def _with_listed(precision: Precision, config: Config) -> Precision:
    """`precision` with the modules that the config lists as quantized (ModelOpt's mixed precision)."""
    entries = {
        module: entry
        for module, entry in listed_modules(config).items()
        if _names_experts(module, precision.family)
    }
    wide = _few(
        _PrecisionRule(
            Patterns((module,), "quantized_layers"),
            cache(partial(_listed_format, entry)),
            "quantized_layers",
        )
        for module, entry in entries.items()
        if "*" in module
    )
    listed = _listed_schemes(entries, precision.gated)
    mixed = str(config.get("quant_algo")).upper() == MIXED_PRECISION
    return replace(
        precision, rules=wide, listed=listed, rest_key="quantized_layers" if mixed and not listed else ""
    )


def _listed_format(entry: Config) -> Parsed:
    return "modelopt", modelopt_scheme(entry.get("quant_algo"), "quantized_layers", entry), "", {}, ()


def _names_experts(module: str, family: Family) -> bool:
    """True for a module of the main model's routed experts, by its name or by the family's."""
    if is_expert_rule(module):
        return True
    match = _LAYER.search(module)
    known = "shared" not in module and "mtp" not in module
    return (
        known
        and match is not None
        and f"{module[match.end() :]}.".startswith(tuple(f"{block}." for block in family.experts))
    )


def _listed_schemes(entries: Mapping[str, Config], gated: bool) -> dict[int, Scheme]:
    """The scheme of each layer whose expert modules are listed one by one."""
    found: dict[int, dict[str, set[str]]] = {}
    schemes: dict[str, Scheme] = {}
    for module, entry in entries.items():
        match = _LAYER.search(module)
        if match is None or "*" in module:
            continue
        name = str(entry.get("quant_algo"))
        if name not in schemes or entry.get("group_size") is not None:
            schemes[name] = modelopt_scheme(name, "quantized_layers", entry)
        found.setdefault(int(match[1]), {}).setdefault(name, set()).update(_roles(module))
    for layer, algorithms in found.items():
        if len(algorithms) > 1:
            raise CheckpointError(
                f"quantization_config.quantized_layers must have one quant_algo for all routed experts of "
                f"layer {layer}, got {', '.join(sorted(algorithms))}.",
                reason="Fused kernels take all of a layer's experts in one format.",
                hint="Quantize all experts of the layer in one format, or check config.json.",
            )
        ((name, roles),) = algorithms.items()
        absent = {"up", "down"} | ({"gate"} if gated and "gate" in roles else set())
        if absent := absent - roles:
            raise mixed_matrices(
                layer, f"{', '.join(sorted(roles))} {name}, {', '.join(sorted(absent))} unlisted"
            )
    return {layer: schemes[next(iter(algorithms))] for layer, algorithms in found.items()}


def _roles(module: str) -> set[str]:
    """The matrices among gate, up and down for which a listed module stands."""
    leaf = module.rpartition(".")[2]
    block = next((block for block in _BARE if f".{block}.{leaf}" in module), "")
    named = zip(("gate", "up", "down"), _BARE.get(block, _LEAVES), strict=True)
    roles = {role for role, leaves in named if leaf in {name.removeprefix("0.") for name in leaves}}
    return roles or {"gate", "up", "down"}


def _quark_rules(config: Config) -> Iterable[_PrecisionRule]:
    rules = config.get("layer_quant_config")
    for name, rule in rules.items() if isinstance(rules, Mapping) else ():
        if isinstance(rule, Mapping) and _may_be_experts(name):
            key = f"layer_quant_config.{name}"
            read = cache(partial(_quark_format, rule, key))
            yield _PrecisionRule(Patterns((name,), "layer_quant_config"), read, key)


def _quark_format(rule: Config, key: str) -> Parsed:
    return "quark", quark_scheme(rule, key), "", {}, ()


def _with_groups(precision: Precision, config: Config) -> Precision:
    """`precision` with compressed-tensors' groups: full names first, then expressions, then classes."""
    groups = mapping(config, "config_groups").items()
    rules = (
        rule
        for regex in (False, True)
        for name, group in groups
        for rule in _of_group(config, name, group, regex)
    )
    rest = next(
        (
            _group_rule(config, name, group, ())
            for name, group in groups
            if any(map(is_class_of_experts, names(group, "targets")))
        ),
        None,
    )
    return replace(precision, rules=_few(rules), rest=rest, rest_key="" if rest else "config_groups")


def _of_group(config: Config, name: str, group: Config, regex: bool) -> Iterator[_PrecisionRule]:
    """A rule of the group's targets that are expressions, or of those that are full names; or none."""
    kept = [it for it in names(group, "targets") if it.startswith(REGEX) is regex and (regex or "." in it)]
    if kept:
        yield _group_rule(config, name, group, kept)


def _group_rule(config: Config, name: str, group: Config, targets: Iterable[str]) -> _PrecisionRule:
    key = f"config_groups.{name}"
    patterns = Patterns(targets, f"{key}.targets", exact=True)
    return _PrecisionRule(patterns, cache(partial(compressed_group, config, name, group)), f"{key}.weights")


def _dynamic_rules(config: Config) -> Iterable[_PrecisionRule]:
    """One rule for each of GPTQ's `dynamic` expressions, of which the first that matches applies."""
    for name, rule in mapping(config, "dynamic").items():
        pattern = Patterns((name.removeprefix("+:").removeprefix("-:"),), "dynamic", regex=True)
        if name.startswith("-:"):
            yield _PrecisionRule(pattern, _unquantized, "dynamic")
        elif isinstance(rule, Mapping):
            yield _PrecisionRule(pattern, cache(partial(overridden, config, rule)), "dynamic")


def _unquantized() -> Parsed:
    return "plain", Scheme(BF16), "", {}, ()


def _auto_round_rules(config: Config) -> Iterable[_PrecisionRule]:
    """Rules for AutoRound's exceptions, which are names or regular expressions; equal ones share a rule."""
    entries = config.get("extra_config")
    patterns: dict[str, tuple[Config, list[str]]] = {}
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping) and _may_be_experts(name):
            text = name if _NAME.fullmatch(name) else REGEX + name.removeprefix(REGEX)
            patterns.setdefault(json.dumps(entry, sort_keys=True), (entry, []))[1].append(text)
    for entry, texts in patterns.values():
        read = cache(partial(overridden, config, entry))
        yield _PrecisionRule(Patterns(texts, "extra_config"), read, "extra_config")


def _may_be_experts(name: str) -> bool:
    text = name.lower()
    return not any(word in text for word in _ELSEWHERE)


def expert_modules(blocks: Sequence[str], layer: int, gated: bool = True) -> Sequence[tuple[str, ...]]:
    """Names that gate, up and down of a layer's first expert may have, each with the modules around it.

    `blocks` are the modules of a layer that hold the experts. Without `gated` there are only up and down.
    """
    prefixes = [f"{prefix}.{layer}." for prefix in MODULE_PREFIXES]
    stems = tuple(prefix + block for prefix in prefixes for block in blocks)

    def role(index: int) -> tuple[str, ...]:
        leaves = (f"{block}.{leaf}" for block in blocks for leaf in _BARE.get(block, _LEAVES)[index])
        return (*stems, *(prefix + leaf for leaf in leaves for prefix in prefixes))

    return [role(index) for index in range(0 if gated else 1, 3)]
