"""Documents that are decided again, and compared."""

import json
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.errors import MoectlError
from moectl.explain.explanation_diff import diff
from moectl.explain.replay import replay, replay_matrices
from support.invoking import moectl

GPT, KIMI = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking"


def document(*options, code=0):
    return moectl("explain", *options, "--offline", "--json", code=code).document


@pytest.fixture
def written(tmp_path):
    def write(*options, name="old.json"):
        path = tmp_path / name
        path.write_text(json.dumps(document(*options)))
        return path

    return write


@pytest.mark.parametrize(
    "options",
    [
        [GPT, "--gpu", "h200"],
        [KIMI, "--gpu", "h100", "--dp", "8", "--ep", "--all2all", "deepep_low_latency", "--eplb"],
        [KIMI, "--gpu", "b200", "--env", "VLLM_USE_FLASHINFER_MOE_INT4=1", "--packages", "full,quark"],
        [GPT, "--gpu", "h100", "--backend", "flashinfer_trtllm", "--allow-fallback"],
        [KIMI, "--gpu", "a100", "--assume", "intermediate=1024", "--policy", "moectl"],
    ],
)
def test_a_document_gives_its_verdict_without_the_checkpoint(written, options):
    path = written(*options)
    again = moectl("explain", "--replay", path, "--json").document
    assert again == json.loads(path.read_text())


def test_a_matrix_is_decided_again_too(written):
    path = written(KIMI, "--gpu", "h100,t4,mi300x", "--tp", "1,3,8")
    again = moectl("explain", "--replay", path, "--json").document
    assert again == json.loads(path.read_text())


def test_a_replayed_document_answers_why(written):
    path = written(GPT, "--gpu", "h200")
    assert "use b200 (sm100)" in moectl("explain", "--replay", path, "--why", "flashinfer_trtllm").words


def test_nothing_changed(written):
    path = written(GPT, "--gpu", "h200")
    assert "Nothing: inputs" in moectl("explain", GPT, "--gpu", "h200", "--offline", "--diff", path).words
    assert moectl("explain", "--replay", path, "--diff", path, "-q").stdout == "same\n"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            [GPT, "--gpu", "h200"],
            [GPT, "--gpu", "b200"],
            [
                "device.arch sm90 -> sm100",
                "TrtLlmMxfp4ExpertsMonolithic is now supported; it was rejected before: needs SM100-SM109",
            ],
        ),
        (
            [GPT, "--gpu", "h200"],
            [GPT, "--gpu", "h200", "--packages", "bare"],
            ["OAITritonMxfp4ExpertsMonolithic is now rejected: needs triton_kernels"],
        ),
        (
            [KIMI, "--gpu", "b200"],
            [KIMI, "--gpu", "b200", "--env", "VLLM_USE_FLASHINFER_MOE_INT4=1"],
            ["packages.env.VLLM_USE_FLASHINFER_MOE_INT4 absent -> 1", "is now supported"],
        ),
        (
            [KIMI, "--gpu", "a100"],
            [KIMI, "--gpu", "a100", "--backend", "humming"],
            ["the request is humming, was none"],
        ),
        (
            [KIMI, "--gpu", "a100"],
            [KIMI, "--gpu", "h100"],
            ["Humming has priority over Marlin on compute capability 9.0 only", "humming (BatchedHumming"],
        ),
    ],
)
def test_the_rule_that_changed_the_choice_is_named(written, before, after, words):
    path = written(*before)
    done = moectl("explain", *after, "--offline", "--diff", path, code=1)
    for text in words:
        assert text in done.words
    found = moectl("explain", *after, "--offline", "--diff", path, "--json", code=1).document["diff"]
    assert found["chosen_otherwise"]
    assert found["groups"][0]["rules"]


def test_inputs_that_change_no_choice(written):
    path = written(GPT, "--gpu", "h200")
    done = moectl("explain", GPT, "--gpu", "h100", "--offline", "--diff", path)
    assert "Every layer gets the same backend as before." in done.words
    assert "device.bandwidth 4.8 TB/s -> 3.35 TB/s" in done.words
    assert "device.memory_bytes 140 GiB -> 79.6 GiB" in done.words


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "{}", '{"groups": 3}', '{"groups": []}', '{"rows": []}', '{"groups": [{}]}']
)
def test_what_is_no_document_is_refused(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert "document" in moectl("explain", "--replay", path, code=2).stderr


def test_a_matrix_cannot_be_compared(written):
    path = written(KIMI, "--gpu", "h100,a100")
    assert (
        "got a matrix" in moectl("explain", KIMI, "--gpu", "h100", "--offline", "--diff", path, code=2).stderr
    )


def test_replay_takes_no_checkpoint(written):
    path = written(GPT, "--gpu", "h200")
    assert "Omit CKPT" in moectl("explain", GPT, "--replay", path, code=2).stderr


BASE = document(GPT, "--gpu", "h200", "--tp", "2")
GRID = document(GPT, "--gpu", "h200,t4")
JUNK = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=4), st.lists(st.integers()))


def places(value, path=()):
    """Every place in nested JSON, lists by their first item."""
    yield path
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


PLACES = [p for p in places(BASE) if p and "candidates" not in p]
GRID_PLACES = [p for p in places(GRID) if p]


def changed(document, path, value):
    copy = json.loads(json.dumps(document))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


def test_every_place_of_a_document_may_hold_anything():
    values = cycle((None, True, 0, "x", [1], {"a": 1}))
    for path in PLACES[::2]:
        # One in turn: among the many places of one kind each kind of value comes up.
        try:
            replay(changed(BASE, path, next(values)))
        except MoectlError as error:
            assert error.what


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(PLACES), JUNK)
def test_a_damaged_document_ends_in_a_sentence(path, value):
    damaged = changed(BASE, path, value)
    for work in (lambda: replay(damaged), lambda: diff(damaged, BASE)):
        try:
            work()
        except MoectlError as error:
            assert error.what


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(GRID_PLACES), JUNK)
def test_a_damaged_matrix_ends_in_a_sentence(path, value):
    try:
        replay_matrices(changed(GRID, path, value))
    except MoectlError as error:
        assert error.what


@pytest.mark.parametrize("junk", [None, 1.5, {}, ["config"]])
@pytest.mark.parametrize("name", ["experts", "router_dtype"])
def test_sources_that_are_no_words_are_refused(tmp_path, name, junk):
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(changed(BASE, ("groups", 0, "sources", name), junk)))
    done = moectl("explain", "--replay", path, "-v", code=2)
    assert f"{path}: groups[0].sources.{name} must be a string, got" in done.stderr


@pytest.mark.parametrize(
    ("place", "junk", "words"),
    [
        (("layers", 0), 10**30, "rows[0].layers[0] must be a finite number of at most 64 bits"),
        (("layers", 0), 1 << 40, "'layers' must be numbers from 0 to 16383"),
        (("layers", 0), -1, "rows[0].layers[0] must be at least 0, got -1"),
        (
            ("decision", "inputs", "problem", "top_k"),
            1 << 40,
            "top_k of inputs.problem must be a number from",
        ),
        (("decision", "inputs", "problem", "experts"), 0, "experts of inputs.problem must be a number from"),
        (
            ("decision", "inputs", "problem", "dims", "hidden"),
            -1,
            "hidden of inputs.problem must be a number",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path, place, junk, words):
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(changed(GRID, ("rows", 0, *place), junk)))
    done = moectl("explain", "--replay", path, code=2)
    assert words in " ".join(done.stderr.split())


def test_replay_takes_no_option_that_says_what_is_decided(written):
    path = written(GPT, "--gpu", "h200")
    done = moectl("explain", "--replay", path, "--gpu", "b200", "--tp", "2", code=2)
    assert "Omit --gpu, --tp" in done.stderr
    moectl("explain", "--replay", path, env={"MOECTL_EXPLAIN_GPU": "b200"})


def test_a_document_of_another_version_is_refused(written):
    path = written(GPT, "--gpu", "h200")
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 3}))
    for options in (["--replay", path], [GPT, "--gpu", "h200", "--offline", "--diff", path]):
        assert "schema version 3, this moectl reads 1 or 2" in moectl("explain", *options, code=2).stderr


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("options", [[GPT, "--gpu", "h200"], [KIMI, "--gpu", "h100,t4", "--tp", "1,8"]])
def test_documents_of_one_checkpoint_beside_its_weights_are_read(written, version, options):
    path = written(*options)
    now = json.loads(path.read_text())
    origin = {**now["checkpoints"][0]}
    old = {**now, "schema_version": version, "checkpoint": origin, "other_weight_bytes": 7 << 30}
    origin.pop("other_weights")
    del old["checkpoints"], old["errors"]
    named = ("gpu", "arch", "tp", "dp", "layers", "refusal", "decision")
    old["rows"] = [{name: row[name] for name in named} for row in now["rows"]]
    path.write_text(json.dumps(old))
    again = moectl("explain", "--replay", path, "--json").document
    (checkpoint,) = again["checkpoints"]
    others = checkpoint.pop("other_weights")
    assert checkpoint == origin and others["first"] == 7 << 30 and others["sharded"] == 0
    assert [row["backend"] for row in again["rows"]] == [row["backend"] for row in now["rows"]]
    if "groups" in now:
        assert "Nothing: inputs" in moectl("explain", *options, "--offline", "--diff", path).words


@pytest.mark.parametrize("value", [{"source": "config"}, [], 7, {"sharded": -1}])
def test_other_weights_of_a_document_are_checked(written, value):
    path = written(GPT, "--gpu", "h200")
    found = json.loads(path.read_text())
    (checkpoint,) = found["checkpoints"]
    good = checkpoint["other_weights"]
    checkpoint["other_weights"] = good | value if isinstance(value, dict) and "sharded" in value else value
    path.write_text(json.dumps(found))
    done = moectl("explain", "--replay", path, code=2)
    assert "other_weights" in done.stderr
