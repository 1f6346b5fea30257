"""Module patterns: what each language covers, and what costs too much to ask."""

from __future__ import annotations

import time

import pytest

from moectl.checkpoint.config.module_patterns import LENGTH_LIMIT, REPEAT_LIMIT, Patterns
from moectl.errors import CheckpointError

GATE = "model.layers.10.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [
        (GATE, True),
        ("model.layers.10.mlp.experts", True),
        ("model.layers.1.mlp.experts", False),
        ("gate", False),
        ("gate_proj", True),
        ("mlp.gate", False),
        ("layers.1.", False),
        ("layers.10.", True),
        ("experts", True),
        ("expert", False),
        ("*.mlp.*", True),
        ("model.layers.*.mlp", True),
        ("model.layers.1*", True),
        ("mtp*", False),
        ("*.gate", False),
        ("model.layers.1?.mlp*", True),
        (r"re:.*\.gate$", False),
        (r"re:.*mlp\.(gate|up)_proj.*", False),
        (r"re:.*mlp\.experts\.\d+\.(gate|up)_proj$", True),
        (r"re:layers\.10\.", False),
        (r"re:^model\.layers\.(?:[0-9]|1[0-9])\..*", True),
    ],
)
def test_languages(pattern: str, covers: bool) -> None:
    assert Patterns([pattern], "ignore").matches(GATE) is covers


def test_bare_expressions() -> None:
    assert Patterns([r".*\.experts\..*"], "dynamic", regex=True).matches(GATE)
    assert not Patterns(["experts"], "dynamic", regex=True).matches(GATE)


def test_emptiness() -> None:
    assert not Patterns([], "ignore")
    assert not Patterns(["", "."], "ignore")
    assert Patterns(["x"], "ignore")


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(a+)+b",
        "re:(?:(a|b)*c)*",
        "re:(((a*)))*",
        "re:" + ".*a" * (REPEAT_LIMIT + 1),
        "re:(",
        "re:a{99999999999}",
        "*a" * (REPEAT_LIMIT + 1),
        "x" * (LENGTH_LIMIT + 1),
    ],
)
def test_costly_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config\.ignore"):
        Patterns([pattern], "ignore")


def test_the_costliest_allowed_is_cheap() -> None:
    patterns = Patterns(["re:" + ".*a" * REPEAT_LIMIT + "$", "*a" * REPEAT_LIMIT + "b"], "ignore")
    begin = time.perf_counter()
    assert not patterns.matches("model.layers.10.mlp.experts.3." + "a" * 30 + "c")
    assert time.perf_counter() - begin < 5


def test_patterns_about_some_names() -> None:
    names = "model.layers.0.mlp.experts.0.gate_proj"
    about = Patterns(["lm_head", "*.mlp*", "re:.*", r"re:mtp\.x", "layers.7."], "ignore").restricted_to(names)
    assert about.texts == ("*.mlp*", "re:.*", "layers.7.")
