"""Module patterns: what each language covers, and what costs too much to ask."""

from __future__ import annotations

import fnmatch
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moectl.checkpoint.config import name_automaton
from moectl.checkpoint.config.module_patterns import (
    EXPRESSION_LIMIT,
    LENGTH_LIMIT,
    PatternLists,
    Patterns,
    few_expressions,
)
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
    ("pattern", "why"),
    [
        ("re:(", "invalid"),
        ("[b-a]", "invalid"),
        ("re:a{99999999999}", "too large"),
        ("re:(?:a{99}){99}", "parts"),
        ("re:(?:" + "|" * 400 + "a){4000}", "parts"),
        ("re:(?:" + "(){1}" * 100 + "a){4000}", "parts"),
        ("re:" + "(" * 60 + ")" * 60, "groups"),
        ("re:" + "(" * 400 + ")" * 400, "groups|large"),
        (r"re:(.*)\1", "group"),
        (r"re:(?<=a)b", "looks back"),
        ("x" * (LENGTH_LIMIT + 1), "characters"),
    ],
    ids=lambda text: text[:20],
)
def test_patterns_that_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"quantization_config\.ignore.*({why})"):
        Patterns([pattern], "ignore")


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(a+)+b",
        "re:(?:(a|aa)*c)*b",
        "re:(((a*)*)*)*b",
        "re:" + ".*a" * 100 + "b",
        "re:" + ".?" * 300 + "a" * 60 + "b",
        "re:" + "(?=.*a.*a.*b)" * 20,
        "*a" * 100 + "b",
        "re:" + "(a|a?)" * 100 + "b",
        "re:(){4294967294}x",
        "re:(?:a{0}){4000000000}x",
        "re:((){4000000000}()){4000000000}x",
    ],
    ids=lambda text: text[:20],
)
def test_what_takes_other_engines_minutes(pattern: str) -> None:
    begin = time.process_time()
    assert not Patterns([pattern], "ignore").matches("model.layers.10.mlp.experts.3." + "a" * 30 + "c")
    assert time.process_time() - begin < 2


def test_many_patterns_cost_little_more_than_one() -> None:
    lists = PatternLists([Patterns([rf"re:.*layers\.{layer}\.mlp.*"], "targets") for layer in range(100)])
    begin = time.process_time()
    for layer in range(100):
        assert (
            lists.first([f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for expert in range(9)])
            == layer
        )
    assert time.process_time() - begin < 4


def test_expressions_have_a_number() -> None:
    many = [f"re:.*{number}" for number in range(EXPRESSION_LIMIT + 2)]
    with pytest.raises(CheckpointError, match=rf"ignore: at most {EXPRESSION_LIMIT}"):
        Patterns(many, "ignore")
    one_by_one = (Patterns([text], "targets") for text in many)
    with pytest.raises(CheckpointError, match=rf"targets: at most {EXPRESSION_LIMIT}"):
        list(few_expressions(one_by_one, lambda patterns: patterns))
    assert Patterns([f"model.layers.{number}" for number in range(20_000)], "ignore")


def test_counted_repeats_of_all_expressions_have_a_limit() -> None:
    begin = time.process_time()
    large = [f"re:.{{3900}}{number}" for number in range(EXPRESSION_LIMIT)]
    with pytest.raises(CheckpointError, match=r"ignore: at most .* of 250000 characters in all"):
        Patterns(large, "ignore")
    with pytest.raises(CheckpointError, match=r"targets: at most .* of 250000 characters in all"):
        list(few_expressions((Patterns([text], "targets") for text in large), lambda patterns: patterns))
    assert time.process_time() - begin < 4


def test_work_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_automaton, "WORK_LIMIT", 100_000)
    slow = Patterns([f"re:.*(?=.*b){number}" for number in range(200)], "ignore")
    assert not slow.matches("model.a")
    with pytest.raises(CheckpointError, match=r"quantization_config\.ignore: its patterns cost too much"):
        for number in range(1000):
            slow.matches("model." + "a" * number)


ATOMS = [
    *("a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "(?:a|b.)", "(a|)", "x?", "a*", "(ab)+", "(a*b?)*"),
    *(r"\b", "$", "^", "a{1,3}", "(?:b{2})?", "(?=.*b)", "(?!a)", r"\Bb", ".*", ".*?", "(?i:A)", "[a-b.]+"),
    *(r"\W", r"\S", r"\Z"),
]


@given(
    st.lists(st.sampled_from(ATOMS), min_size=1, max_size=6).map("".join),
    st.lists(st.text("ab.1x_", max_size=7), min_size=1, max_size=4),
)
@settings(max_examples=200)
def test_expressions_mean_what_they_mean_in_python(text: str, names: list[str]) -> None:
    expression, patterns = re.compile(text), Patterns([text], "dynamic", regex=True)
    assert [patterns.matches(name) for name in names] == [
        expression.match(name) is not None for name in names
    ]


GLOBS = [
    "*",
    "?",
    "[ab]",
    "[!a]",
    "[]a]",
    "[a-b]",
    "[!]]",
    "a",
    "b",
    ".",
    "[",
    "]",
    "-",
    "^",
    "(",
    "\\",
    "[^a]",
]


@given(
    st.lists(st.sampled_from(GLOBS), min_size=1, max_size=5).map("".join),
    st.text("ab.^]-[(\\", min_size=1, max_size=5),
)
@settings(max_examples=200)
def test_globs_mean_what_they_mean_in_the_shell(text: str, name: str) -> None:
    assume(any(char in text for char in "*?["))
    parts = name.split(".")
    wanted = any(fnmatch.fnmatchcase(".".join(parts[:end]), text) for end in range(1, len(parts) + 1))
    try:
        assert Patterns([text], "ignore").matches(name) is wanted
    except CheckpointError:
        # A range that goes down, as in [b-a], is refused; there it matches nothing.
        assert "[" in text and "-" in text


def test_patterns_about_some_names() -> None:
    names = "model.layers.0.mlp.experts.0.gate_proj"
    about = Patterns(["lm_head", "*.mlp*", "re:.*", r"re:mtp\.x", "layers.7."], "ignore").restricted_to(names)
    assert about.texts == ("*.mlp*", "re:.*", "layers.7.")
