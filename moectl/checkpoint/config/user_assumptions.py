"""Activation and routing as a user states them: the syntax of ``--activation`` and ``--routing``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import UsageError
from ...problem.moe_problem import Activation
from .families import ACTIVATION_PARAMETERS, ACTIVATIONS, SCORINGS

ACTIVATION_EXAMPLE = "swigluoai:alpha=1.702,limit=7"
ROUTING_EXAMPLE = "sigmoid,bias,groups=8/4,scale=2.5"


@dataclass(frozen=True)
class UserAssumptions:
    """What a user states about a model, which overrides its config and headers.

    `routing` has the value of each field of `Routing` that was stated.
    """

    activation: Activation | None = None
    routing: Mapping[str, Any] = field(default_factory=dict)


def parse_assumptions(activation: str | None = None, routing: str | None = None) -> UserAssumptions:
    """The assumptions that the two options spell. UsageError names the part that is not understood.

    Example:
        >>> assumptions = parse_assumptions("swigluoai:limit=7", "sigmoid,groups=8/4")
        >>> assumptions.activation.limit
        7.0
        >>> assumptions.routing
        {'scoring': 'sigmoid', 'groups': 8, 'topk_groups': 4}
    """
    return UserAssumptions(
        None if activation is None else parse_activation(activation),
        {} if routing is None else parse_routing(routing),
    )


def parse_activation(text: str) -> Activation:
    """The activation spelled as ``NAME[:PARAMETER=NUMBER,...]``, such as `ACTIVATION_EXAMPLE`."""
    name, _, parameters = text.strip().partition(":")
    if name not in ACTIVATIONS:
        raise _refuse("activation", name, ", ".join(ACTIVATIONS), ACTIVATION_EXAMPLE)
    activation = ACTIVATIONS[name]
    known = ACTIVATION_PARAMETERS.get(activation.name, ())
    values: dict[str, Any] = {}
    for part in _parts(parameters):
        key, equals, number = part.partition("=")
        if key not in known or not equals:
            takes = f"{name} takes {', '.join(known)}" if known else f"{name} takes no parameter"
            raise _refuse("activation", part, takes, ACTIVATION_EXAMPLE)
        values[key] = _number("activation", key, number, ACTIVATION_EXAMPLE)
    return replace(activation, **values)


def parse_routing(text: str) -> dict[str, Any]:
    """The fields of `Routing` spelled as a comma-separated list of ``WORD`` and ``WORD=VALUE``."""
    fields: dict[str, Any] = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        if not equals and key in ROUTING_WORDS:
            fields |= ROUTING_WORDS[key]
        elif equals and key in _ROUTING_VALUES:
            fields |= _ROUTING_VALUES[key](value)
        else:
            known = (*ROUTING_WORDS, *(f"{word}=..." for word in _ROUTING_VALUES))
            raise _refuse("routing", part, ", ".join(known), ROUTING_EXAMPLE)
    if not fields:
        raise _refuse("routing", text, ", ".join(ROUTING_WORDS), ROUTING_EXAMPLE)
    return fields


ROUTING_WORDS: Mapping[str, Mapping[str, Any]] = {
    **{word: {"scoring": scoring} for word, scoring in SCORINGS.items()},
    "renormalize": {"renormalize": True},
    "no-renormalize": {"renormalize": False},
    "after-topk": {"after_topk": True},
    "bias": {"correction_bias": True},
    "no-bias": {"correction_bias": False},
    "router-bias": {"router_bias": True},
    "on-input": {"weight_on_input": True},
    "expert-scale": {"expert_scale": True},
}
"""Fields of `Routing` by each word of ``--routing`` that takes no value."""


def _groups(value: str) -> dict[str, Any]:
    counts = value.split("/")
    if len(counts) != 2 or not all(n.isascii() and n.isdigit() and 0 < len(n) < 6 for n in counts):
        raise _refuse("routing", f"groups={value}", "groups=ALL/CHOSEN, two whole numbers", ROUTING_EXAMPLE)
    groups, chosen = map(int, counts)
    if not 1 <= chosen <= groups:
        raise _refuse("routing", f"groups={value}", "at least one and at most all groups", ROUTING_EXAMPLE)
    return {"groups": groups, "topk_groups": chosen}


_ROUTING_VALUES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "groups": _groups,
    "scale": lambda value: {"scale": _number("routing", "scale", value, ROUTING_EXAMPLE)},
}


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(option: str, key: str, text: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise _refuse(option, f"{key}={text}", "a positive number", example)
    return value


def _refuse(option: str, got: str, known: str, example: str) -> UsageError:
    return UsageError(
        f"--{option}: {got!r} is not understood, expected {known}.",
        hint=f"for example `--{option} {example}`",
    )
