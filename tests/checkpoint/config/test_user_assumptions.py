"""What a user states with --activation and --routing, and what it does to a config that is silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moectl.checkpoint import layer_groups
from moectl.checkpoint.config.families import ACTIVATION_PARAMETERS, ACTIVATIONS, ROUTING
from moectl.checkpoint.config.user_assumptions import (
    ACTIVATION_EXAMPLE,
    ROUTING_EXAMPLE,
    ROUTING_WORDS,
    UserAssumptions,
    parse_activation,
    parse_assumptions,
    parse_routing,
)
from moectl.errors import UsageError
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Routing

CONFIG: dict[str, Any] = {
    "model_type": "motif",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def test_activations() -> None:
    assert parse_activation("silu") == SILU
    assert parse_activation(ACTIVATION_EXAMPLE) == SWIGLU_OAI
    assert parse_activation(" silu:limit=10 ") == Activation("silu", limit=10.0)
    assert parse_activation("situ:beta=4,linear_beta=25") == Activation("situ", beta=4.0, linear_beta=25.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_takes_its_parameters(name: str) -> None:
    found = ACTIVATIONS[name]
    taken = ACTIVATION_PARAMETERS.get(found.name, ())
    text = f"{name}:{','.join(f'{parameter}=3' for parameter in taken)}"
    assert all(getattr(parse_activation(text), parameter) == 3 for parameter in taken)


def test_routings() -> None:
    told = parse_routing(ROUTING_EXAMPLE)
    assert Routing(**told) == Routing("sigmoid", correction_bias=True, groups=8, topk_groups=4, scale=2.5)
    assert parse_routing("no-renormalize") == {"renormalize": False}
    assert parse_routing("softmax, after-topk") == {"scoring": "softmax", "after_topk": True}


def test_every_field_of_routing_can_be_stated() -> None:
    told = {field for fields in ROUTING_WORDS.values() for field in fields}
    told |= parse_routing("groups=8/4,scale=2").keys()
    assert told == ROUTING.keys()


@pytest.mark.parametrize("text", ["mish", "silu:alpha=1", "silu:limit", "silu:limit=x", "silu:limit=-1", ""])
def test_bad_activation(text: str) -> None:
    with pytest.raises(UsageError, match="--activation"):
        parse_activation(text)


@pytest.mark.parametrize(
    "text", ["", "entmax", "groups=8", "groups=4/8", "groups=0/0", "scale=0", "scale=nan", "bias=1", "scale"]
)
def test_bad_routing(text: str) -> None:
    with pytest.raises(UsageError, match="--routing"):
        parse_routing(text)


def test_what_is_stated_goes_first_and_is_not_assumed() -> None:
    stated = parse_assumptions("gelu_tanh", "sigmoid,bias,renormalize")
    (group,) = layer_groups({**CONFIG, "hidden_act": "mish", "scoring_func": "x"}, None, assumptions=stated)
    assert group.problem.activation == Activation("gelu_tanh")
    assert group.problem.routing == Routing("sigmoid", correction_bias=True)
    for fact in ("activation", "routing.scoring", "routing.correction_bias"):
        assert group.sources[fact] == "asked"
    assert not any("assumed" in note for note in group.notes)
    assert parse_assumptions() == UserAssumptions()


def test_the_document_lists_every_word() -> None:
    text = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text()
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    names = {found.name for found in ACTIVATIONS.values()}
    parameters = {parameter for taken in ACTIVATION_PARAMETERS.values() for parameter in taken}
    for word in {*names, *parameters, *ROUTING_WORDS}:
        assert f"`{word}`" in rows, word
    for example in re.findall(r"`((?:groups|scale)=[^`]+)`", rows):
        assert parse_routing(example)
