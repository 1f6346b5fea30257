"""The JSON Schemas of commands, and documents held against them."""

import copy
import json
import re

import pytest
from jsonschema_rs import meta

from moectl.cli.main import COMMANDS
from moectl.cli.schemas import DOCUMENTS, schema_of
from moectl.problem.moe_problem import Dims
from support.invoking import moectl
from support.json_schemas import check, validator

GPT, KIMI, MIXED = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking", "QuantTrio/Qwen3.6-35B-A3B-AWQ"


def test_every_command_with_documents_has_a_schema():
    assert [name for _, name in COMMANDS if name != "schema"] == [*DOCUMENTS]


@pytest.mark.parametrize("command", DOCUMENTS)
def test_a_schema_is_printed(command):
    printed = json.loads(moectl("schema", command).stdout)
    meta.validate(printed)
    assert printed == schema_of(command)
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_an_unknown_command_is_answered_with_the_nearest():
    assert "Did you mean explain?" in moectl("schema", "explian", code=2).stderr


EXPLAINED = [
    ([GPT, "--gpu", "h200"], 0),
    ([GPT, "--gpu", "cpu", "--policy", "moectl"], 0),
    ([KIMI, "--gpu", "h200", "--tp", "8", "--pp", "2"], 0),
    ([MIXED, "--gpu", "v100"], 1),
    ([MIXED, "--gpu", "h200,t4,mi300x", "--tp", "2,3", "--pp", "1,2"], 0),
    ([GPT, KIMI, "nobody/none", "--gpu", "h200"], 3),
    ([GPT, KIMI, "--gpu", "h200,b200", "--dp", "8", "--ep", "--all2all", "deepep_low_latency"], 0),
    ([KIMI, "--gpu", "b200", "--tp", "8", "--why", "flashinfer_trtllm"], 0),
    ([GPT, "--gpu", "h200", "--why", "deep_gemm"], 1),
    (["nobody/none", "--gpu", "h200"], 3),
    ([GPT, "--gpu", "h200", "--tp", "3"], 1),
    ([GPT, "--gpu", "h200", "--tp", "7"], 2),
]


@pytest.mark.parametrize(("options", "code"), EXPLAINED, ids=lambda value: "")
def test_explain(options, code):
    assert moectl("explain", *options, "--offline", "--json", code=code).document


def test_explain_with_a_difference(tmp_path):
    old = tmp_path / "old.json"
    old.write_text(moectl("explain", KIMI, "--gpu", "a100", "--offline", "--json").stdout)
    for gpu, code in (("a100", 0), ("h100", 1)):
        done = moectl("explain", KIMI, "--gpu", gpu, "--offline", "--json", "--diff", old, code=code)
        assert done.document["diff"]["chosen_otherwise"] is bool(code)


def test_a_difference_names_the_parts_of_a_verdict(tmp_path):
    old = tmp_path / "old.json"
    old.write_text(moectl("explain", GPT, "--gpu", "h200", "--offline", "--json").stdout)
    ask = ("explain", GPT, "--gpu", "h200", "--packages", "bare", "--offline", "--json", "--diff", old)
    (group,) = moectl(*ask, code=1).document["diff"]["groups"]
    assert group["candidates"][0]["new"][0]["question"] == "package flashinfer"


def test_conversions(tiny_gpt_oss, tmp_path):
    out, restored = tmp_path / "out", tmp_path / "restored"
    assert moectl("convert", tiny_gpt_oss, out, "--to", "moectl", "--json").document["converted_layers"]
    assert moectl("verify", out, "--json").document["ok"]
    assert moectl("unconvert", out, restored, "--json").document["files"]
    plan = ("convert", tiny_gpt_oss, tmp_path / "plan", "--dry-run", "--json")
    assert moectl(*plan, "--to", "mxfp4", "--experts-only").document["layer_kinds"]
    assert len(moectl(*plan, "--to", "moectl", "--tp-size", "2").document["ranks"]) == 2
    tiny = ("--layers", "1", "--experts", "4", "--hidden", "64", "--intermediate", "64")
    assert moectl("synth", GPT, tmp_path / "synth", *tiny, "--json").document["bytes"]
    assert moectl("verify", tmp_path / "none", "--json", code=None).document["error"]["what"]


def test_measurements(tiny_gpt_oss, tmp_path):
    rows = tmp_path / "rows.jsonl"
    ask = ("bench", tiny_gpt_oss, "-m", "1", "--layer", "0", "--backend", "torch", "--repeats", "1")
    assert moectl(*ask, "-o", rows, "--json").document["rows"]
    moectl("bench", "--rows", rows, "-o", tmp_path / "rows.csv")
    for path in (rows, tmp_path / "rows.csv"):
        assert moectl("bench", "--rows", path, "--json").document["rows"]
    assert moectl("compare", rows, rows, "--json").document["counts"]
    assert moectl("tune", "--list", "--json").document["entries"] == []
    assert moectl("run", tiny_gpt_oss, "--layer", "0", "--json").document["check"]["ok"]
    several = moectl("run", tiny_gpt_oss, "--layers", "all", "--backend", "all", "--json").document
    assert len(several["layers"]) == 2


@pytest.mark.parametrize("kind", ["models", "backends", "gpus", "variables", "layouts", "formats"])
def test_lists(kind):
    assert moectl("list", kind, "--json").document[kind]


def test_the_machine():
    assert moectl("env", "--json").document["versions"]
    assert moectl("peers", "--json").document["libraries"]
    assert moectl("doctor", "--json", code=None).document["software"]


def first_items(value):
    """Nested JSON with the first item of each list of objects."""
    if isinstance(value, dict):
        return {name: first_items(item) for name, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [first_items(value[0])]
    return value


def keys(value, path=()):
    """The path of every key in nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(value, dict):
            yield (*path, key)
        yield from keys(item, (*path, key))


def without(document, path):
    changed = copy.deepcopy(document)
    at = changed
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return changed


NAMES = re.compile(
    r"(versions|env|sources|details|reasons|tensors|layer_kinds|libraries|imports|hidden_by|counts"
    r"|packages|variables|files|left_out|refused|tile)/[^/]+$"
)
"""Places whose keys are data, such as the names of packages."""


def documents(tiny_gpt_oss, tmp_path):
    """A document of most commands, and the keys of its own that may be absent."""
    yield moectl("explain", GPT, "--gpu", "h200", "--offline", "--json").document, set()
    yield (
        moectl("explain", GPT, KIMI, "x/y", "--gpu", "h200,t4", "--offline", "--json", code=3).document,
        set(),
    )
    why = ("explain", KIMI, "--gpu", "b200", "--tp", "8", "--offline", "--json", "--why", "flashinfer_trtllm")
    yield moectl(*why).document, {"why"}
    plan = ("convert", tiny_gpt_oss, tmp_path / "out", "--to", "moectl", "--dry-run", "--json")
    yield moectl(*plan).document, set()
    yield moectl("run", tiny_gpt_oss, "--layer", "0", "--json").document, set()
    yield moectl("doctor", "--json", code=None).document, set()
    yield moectl("env", "--json").document, set()
    yield moectl("list", "gpus", "--json").document, set()
    yield moectl("explain", "x/y", "--offline", "--json", code=3).document, set()


def test_keys_are_required(tiny_gpt_oss, tmp_path):
    for document, optional in documents(tiny_gpt_oss, tmp_path):
        small = first_items(document)
        published = validator(document["command"], strict=False)
        check(small)
        assert published.is_valid(small)
        found = {"/".join(map(str, path)) for path in keys(small) if published.is_valid(without(small, path))}
        assert {path for path in found if not NAMES.search(path)} == optional, document["command"]


def test_what_is_null_where_no_null_is_allowed_is_found():
    document = moectl(
        "explain", MIXED, "--gpu", "h200,t4", "--tp", "3", "--offline", "--json", code=1
    ).document
    small = {**document, "rows": document["rows"][:1]}
    (row,) = small["rows"]
    nullable = {
        name for name in row if validator("explain").is_valid({**small, "rows": [{**row, name: None}]})
    }
    assert nullable == {
        *("refusal", "backend", "usual_name", "experts", "monolithic", "remark", "padded_hidden"),
        *("padded_intermediate", "error", "fallback", "bytes", "fits", "memory"),
    }


def test_further_keys_are_allowed_by_the_published_schema_alone():
    document = moectl("explain", GPT, "--gpu", "h200", "--offline", "--json").document
    document["rows"][0]["of_a_later_version"] = 1
    assert validator("explain", strict=False).is_valid(document)
    with pytest.raises(AssertionError, match="of_a_later_version"):
        check(document)


def test_attributes_of_records_are_described():
    from moectl.environment import Device
    from moectl.files.record_schemas import kind_schema, record_schema

    described = record_schema(Device)["properties"]
    assert described["bf16_flops"]["description"].startswith("peak dense matrix rates")
    assert described["features"] == {
        "type": "array",
        "items": {"type": "string"},
        "description": "instruction sets that backends depend on, such as amx.",
    }
    assert record_schema(Dims)["required"] == [
        "hidden",
        "intermediate",
        "padded_hidden",
        "padded_intermediate",
    ]
    pair = kind_schema(tuple[int, str] | None)
    assert pair["type"] == ["array", "null"] and pair["prefixItems"][1] == {"type": "string"}
    with pytest.raises(TypeError):
        kind_schema(complex)
