"""Names of engines and releases, and rules that are made when they are asked for."""

import subprocess
import sys

import pytest

from moectl.errors import UsageError
from moectl.oracle.registry import ENGINES, Engines, KnownRelease, engine_named, known_releases
from support.invoking import moectl

UNMADE = ENGINES.known()


@pytest.mark.parametrize("name", ENGINES)
def test_a_release_is_what_the_registry_calls_it(name: str) -> None:
    (row,) = [row for row in UNMADE if row.name == name]
    engine = ENGINES[name]
    assert (engine.name, engine.family, engine.title, engine.beside) == (
        name, row.family, row.title, row.beside,
    )  # fmt: skip
    assert engine.version == row.version


def test_an_engine_is_made_once_and_when_it_is_looked_up() -> None:
    engines = Engines(
        [KnownRelease("moectl", "moectl", "moectl"), KnownRelease("absent", "acme", "Acme", "1")]
    )
    assert list(engines) == ["moectl", "acme-1"] and engines.made() == ()
    assert [row.versioned for row in engines.newest()] == ["moectl", "Acme 1"]
    assert engines["moectl"] is engines["moectl"] and engines.made() == ("moectl",)


def test_an_answer_makes_no_rules_that_it_does_not_need() -> None:
    code = (
        "import sys\n"
        "from moectl.oracle import engine_named, packages_from\n"
        "packages_from('full', engine=engine_named('vllm'))\n"
        "engines = [name for name in sys.modules if name.startswith('moectl.oracle.engines.')]\n"
        "print(sorted({name.split('.')[3] for name in engines}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['shared_repacking', 'vllm', 'vllm_0_33_0']"


def test_the_releases_are_said_in_a_sentence() -> None:
    newest, oldest = engine_named("vllm").version, list(ENGINES)[10].rpartition("-")[2]
    assert known_releases() == (
        f"vLLM {oldest} to {newest}, moectl, SGLang 0.5.23, transformers 5.17.0 and 5.23.0 "
        "and TensorRT-LLM d1fce83"
    )
    with pytest.raises(UsageError, match="there is no policy 'nope'; known are vLLM"):
        engine_named("nope")


@pytest.mark.parametrize(
    ("named", "hint"), [("sglan", "sglang"), ("transfomers", "transformers"), ("nope", "")]
)
def test_an_unknown_engine_is_refused_with_the_nearest_name(named: str, hint: str) -> None:
    asked = ("explain", "openai/gpt-oss-120b", "--offline", "--gpu", "h200", "--engine", named)
    done = moectl(*asked, code=2)
    said = " ".join(done.stderr.split())
    assert f"no rules for '{named}'; it has those of vLLM" in said
    wanted = f"Did you mean --engine {hint}?" if hint else "Name one of them, or --engine all"
    assert wanted in said
