"""Configs of quantized checkpoints as publishers write them: families x methods x exclusions x dialects.

Each says what was put in, so that a reader of configs can be held to it: the format of every layer's experts,
or words of the refusal. Nothing here reads a config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .written_families import EXPERTS, FAMILIES, PLAIN, WrittenFamily
from .written_methods import METHODS, Spelling, WrittenMethod, bare_regexes, full_names, regexes


@dataclass(frozen=True)
class WrittenConfig:
    """One config, and what it says.

    Attributes:
        quantization: the quantization config alone, in its usual spelling.
        documents: separate files by name.
        answers: storage, weight and activation format by MoE layer; empty for a refusal.
        refusal: words of the error that the config deserves.
    """

    name: str
    family: WrittenFamily
    method: str
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any]]
    answers: Mapping[int, str] = field(default_factory=dict)
    refusal: str = ""


def _exclusions(
    family: WrittenFamily, spell: Spelling
) -> Iterator[tuple[str, list[str], Callable[[int], bool] | str]]:
    """What is left out: a name, the patterns, and the layers whose experts they mean, or a refusal."""
    last = family.moe[-1]
    around = family.around()
    yield "nothing", [], lambda layer: False
    yield "all around", spell(around), lambda layer: False
    yield "one layer's experts", spell([*around, *family.experts(last)]), lambda layer: layer == last
    first = family.moe[0]
    mtp = [f"mtp.layers.{first}.{matrix.format(e=e)}" for e in range(EXPERTS) for matrix in family.matrices]
    yield (
        "those of the MTP layer",
        spell(["lm_head", *mtp]) if spell is not bare_regexes and spell is not regexes else [],
        lambda layer: False,
    )
    if spell in (full_names,):
        down = [
            name for name in family.experts(last) if name.endswith(family.matrices[-1].rpartition(".")[2])
        ]
        yield "down alone", spell(down), "must all have one format"


def _merge(config: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `more`; objects at the same key are joined, those of `more` first."""
    return {
        **config,
        **{
            key: {**value, **config[key]} if isinstance(value, dict) and key in config else value
            for key, value in more.items()
        },
    }


def _placed(
    family: WrittenFamily, method: WrittenMethod, quantization: dict[str, Any], dialect: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole config, with the quantization where `dialect` puts it, and separate files."""
    text: dict[str, Any] = dict(family.config)
    key = "compression_config" if dialect == "compression_config" else "quantization_config"
    documents: dict[str, Any] = {}
    if dialect in ("file", "file, empty beside"):
        assert method.file is not None
        documents[method.file[0]] = method.file[1](quantization)
        outer: dict[str, Any] = {key: {}} if dialect != "file" else {}
    elif dialect == "inner":
        text[key], outer = quantization, {}
    else:
        outer = {key: quantization}
    for name in reversed(family.nested):
        text = {name: text}
        if dialect == "middle" and name == family.nested[-1]:
            text, outer = {**text, **outer}, {}
    return {**({"architectures": ["Model"]} if family.nested else {}), **text, **outer}, documents


def _respelled(quantization: dict[str, Any], dialect: str) -> dict[str, Any]:
    changed = dict(quantization)
    if dialect == "upper case":
        changed["quant_method"] = changed["quant_method"].upper()
        for key in ("quant_algo", "activation_scheme", "data_type"):
            if key in changed:
                changed[key] = changed[key].swapcase()
    if dialect == "underscores":
        changed["quant_method"] = changed["quant_method"].replace("-", "_")
    if dialect == "strings":
        changed |= {key: str(changed[key]) for key in ("bits", "group_size") if key in changed}
    if dialect == "compression_config":
        return {"quantization_config": changed} if "format" in changed else changed
    return changed


def _dialects(family: WrittenFamily, method: WrittenMethod) -> list[str]:
    found = ["plain", "upper case", "underscores", "strings"]
    found += ["inner"] if family.nested else []
    found += ["middle"] if len(family.nested) > 1 else []
    found += ["file", "file, empty beside"] if method.file else []
    found += ["compression_config"] if "config_groups" in method.config else []
    return found


def written_configs() -> Iterator[WrittenConfig]:
    """Every family with every method: each exclusion in each language, in dialects that take turns."""
    turn = 0
    for family_name, family in FAMILIES.items():
        for method_name, method in METHODS.items():
            dialects = _dialects(family, method)
            for spell in method.spellings:
                for what, patterns, excluded in _exclusions(family, spell):
                    for overridden in (
                        (False, True) if method.override and what in ("nothing", "all around") else (False,)
                    ):
                        turn += 1
                        dialect = dialects[turn % len(dialects)]
                        quantization: dict[str, Any] = dict(method.config)
                        answers = dict.fromkeys(family.moe, method.answer)
                        if patterns:
                            method.exclude(quantization, patterns)
                        if overridden:
                            assert method.override is not None
                            more, answer = method.override(family, family.moe[-1])
                            quantization = _merge(quantization, more)
                            answers[family.moe[-1]] = answer
                        refusal = excluded if isinstance(excluded, str) else ""
                        if not isinstance(excluded, str):
                            answers |= {layer: PLAIN for layer in family.moe if excluded(layer)}
                        config, documents = _placed(
                            family, method, _respelled(quantization, dialect), dialect
                        )
                        spelled = spell.__name__.strip("_").replace("_", " ")
                        kind = f"{what}{', one layer apart' if overridden else ''}"
                        yield WrittenConfig(
                            f"{family_name}, {method_name}, {kind} as {spelled}, {dialect}",
                            family,
                            method_name,
                            config,
                            quantization,
                            documents,
                            {} if refusal else answers,
                            refusal,
                        )
