"""Another engine is a folder and an entry in the registry: every command takes it from there."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from devtools.conformance import compare, compare_rounding, read_grid

import moectl as package
from moectl.checkpoint import open_checkpoint
from moectl.doctor import examine
from moectl.environment import Packages, find_device
from moectl.errors import UsageError
from moectl.explain.proposed_changes import proposals
from moectl.oracle import ENGINES, SelectionInputs, decide, engine_named, policy_named
from moectl.oracle.checks import Verdict
from moectl.oracle.registry import engine_names, known_packages, newest_engines
from support.invoking import moectl
from support.scripts import SCRIPTS

from .acme_1_0 import ACME
from .acme_1_0.backends import BATCHED, QUICK, STEADY

GPT = "openai/gpt-oss-120b"
ROOT = Path(package.__file__).parent


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine in the registry, which is all that a command needs."""
    monkeypatch.setitem(ENGINES, ACME.name, ACME)


def explain(*options: str, code: int = 0) -> dict[str, Any]:
    arguments = ("explain", GPT, "--offline", "--gpu", "h200", "--policy", "acme", "--json", *options)
    document: dict[str, Any] = moectl(*arguments, code=code).document
    return document


def test_the_registry_knows_it_by_both_names() -> None:
    assert engine_named("acme") is engine_named("acme-1.0") is ACME
    assert policy_named("acme") is ACME.policy
    assert {"acme", "acme-1.0"} <= set(engine_names())
    assert ACME in newest_engines() and "acme_kernels" in known_packages()


def test_explain_takes_its_packages_sizes_memory_and_exchanges() -> None:
    document = explain()
    decision = document["groups"][0]["decision"]
    assert decision["chosen"]["experts"] == "QuickRunner"
    assert document["packages"] == {
        "versions": {"acme_kernels": "", "acme_cubin": ""},
        "env": {"ACME_QUICK": "1"},
    }
    assert document["parallel"]["all2all"] == "ring"
    assert decision["chosen"]["layout"] == "acme-rows"
    assert decision["chosen"]["padded_hidden"] == 3072
    assert document["groups"][0]["memory"]["repacking"] == "w2 is turned over twice"
    assert document["environment"]["tuned"][0]["why"] == "quick (QuickRunner) reads no tuned files"
    mesh = explain("--dp", "8", "--ep", "--all2all", "mesh")["groups"][0]["decision"]
    assert mesh["chosen"]["experts"] == "BatchedRunner"
    reasons = {
        v["question"]
        for c in mesh["candidates"]
        if c["backend"] == "steady"
        for v in c["reasons"]["parallel"]
    }
    assert reasons == {"token format"}


def test_it_is_shown_beside_the_default_engine() -> None:
    document = moectl("explain", GPT, "--offline", "--gpu", "h200", "--json").document
    assert [other["policy"] for other in document["groups"][0]["others"]] == ["moectl", "acme-1.0"]


def test_its_variables_are_judged_as_its_own() -> None:
    env = ("--env", "ACME_QUICK=yes", "--env", "ACME_FAST=1", "--env", "ACME_QIUCK=1", "--env", "VLLM_X=1")
    found = explain(*env, code=0)["environment"]["variables"]
    remarks = {row["name"]: row["remark"] for row in found}
    assert "Acme 1.0 fails on ACME_QUICK='yes'" in remarks["ACME_QUICK"]
    assert remarks["ACME_FAST"] == "Acme 1.0 ignores ACME_FAST; use ACME_QUICK"
    assert "did you mean ACME_QUICK" in remarks["ACME_QIUCK"]
    assert set(remarks) == {"ACME_QUICK", "ACME_FAST", "ACME_QIUCK"}
    wrong = moectl("explain", GPT, "--policy", "acme", "--env", "ACME_QUICK", code=2)
    assert "--env ACME_QUICK=1" in wrong.stderr
    names = {row["name"] for row in moectl("list", "variables", "--json").document["variables"]}
    assert {"ACME_QUICK", "ACME_FAST"} < names


def test_why_spells_its_command_line() -> None:
    off = ("--env", "ACME_QUICK=0")
    answers = explain(*off, "--why", "quick")["why"][0]["answers"]
    texts = [change["text"] for answer in answers for change in answer["changes"]]
    assert "set ACME_QUICK=1" in texts
    assert "--engine acme" in answers[0]["command"] and "ACME_QUICK=1" in answers[0]["command"]
    texts = [
        change["text"]
        for answer in explain("--why", "steady")["why"][0]["answers"]
        for change in answer["changes"]
    ]
    assert "request it by name (acme up --runner steady)" in texts
    batched = explain("--dp", "8", "--ep", "--why", "steady_batched")["why"][0]["answers"][0]
    assert batched["changes"][0]["text"] == "use --over mesh"
    assert "--all2all mesh" in batched["command"]


def test_changes_of_a_deployment_are_its_options() -> None:
    problem = open_checkpoint(GPT, offline=True).groups[0].problem
    inputs = SelectionInputs(problem, find_device("h200"), Packages(), ACME.policy.name)
    candidate, verdict = (
        decide(inputs).candidates[0],
        Verdict("token exchange", "parallel", "", "", False),
    )
    texts = {change.text for change in proposals(inputs, candidate, verdict)}
    assert "deploy with --copies 8 --spread 8 --over mesh" in texts
    verdict = Verdict("experts over ranks", "parallel", "", "", False)
    texts = {change.text for change in proposals(inputs, candidate, verdict)}
    assert texts == {"deploy with --slices 8 --spread 8", "deploy with --copies 8 --spread 8"}


def test_diff_and_replay_read_its_documents(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps(explain()))
    again = moectl("explain", "--replay", str(before), "--json").document
    assert again["groups"][0]["decision"]["chosen"]["experts"] == "QuickRunner"
    changed = explain("--env", "ACME_QUICK=0", "--diff", str(before), code=1)["diff"]
    (group,) = changed["groups"]
    assert (group["old_choice"], group["new_choice"]) == (
        ["quick", "QuickRunner"],
        ["steady", "SteadyRunner"],
    )
    assert group["rules"][0]["verdicts"][0]["question"] == "switch ACME_QUICK"


def test_text_and_matrix_name_it() -> None:
    said = moectl("explain", GPT, "--offline", "--gpu", "h200", "--policy", "acme").words
    assert "Acme 1.0" in said and "run acme up openai/gpt-oss-120b" in said
    assert (
        "w2 is turned over twice"
        in moectl("explain", GPT, "--offline", "--gpu", "h200", "--policy", "acme", "-v").words
    )
    table = moectl("explain", GPT, "--offline", "--gpu", "h200,a100", "--policy", "ACME_1.0", "--quiet")
    assert [line.split("\t")[-1] for line in table.stdout.splitlines()] == ["quick", "steady"]
    missing = moectl("explain", GPT, "--gpu", "h200", "--packages", "acme_kernels", "--policy", "acme").words
    assert "Acme's library has neither kernels (acme-cubin) nor nvcc to compile them" in missing


def test_doctor_examines_it(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "ACME_FAST": "1", "ACME_CACHE": str(tmp_path / "c"), "ACME_PORT": "1"}
    report = examine(env)
    assert {status.name for status in report.backends if status.policy == ACME.name} == {
        backend.name for backend in (QUICK, STEADY, BATCHED)
    }
    says = [remark.says for remark in report.remarks]
    assert "Acme is not installed: its backends are judged by its rules alone" in says
    assert "Acme 1.0 ignores ACME_FAST; use ACME_QUICK" in says
    (cache,) = [cache for cache in report.caches if cache.name == "Acme"]
    assert cache.path == str(tmp_path / "c")
    assert not report.installed("acme_kernels").present


def recorded(
    device: str, parallel: str, selected: str | None, experts: str | None, **changes: Any
) -> dict[str, Any]:
    return {
        "scheme": "mxfp4",
        "model": "small",
        "device": device,
        "profile": "full",
        "parallel": parallel,
        "forced": None,
        "gates": [],
        "selected": selected,
        "experts_cls": experts,
        "monolithic": False,
        "padded": {"hidden": 1024, "intermediate_per_partition": 512},
        "priority": ["QUICK", "STEADY", "STEADY_BATCHED"],
        "rejected": [],
        "error": "",
    } | changes


def test_conformance_reads_its_recordings() -> None:
    refused = [{"backend": "QUICK", "experts_cls": "QuickRunner", "code": "device"}]
    unknown = {"forced": "brisk", "gates": ["no such runner: brisk"], "monolithic": None, "padded": None}
    records = [
        recorded("sm90", "one", "QUICK", "QuickRunner"),
        recorded("sm80", "one", "STEADY", "SteadyRunner", rejected=refused),
        recorded("sm90", "mesh8", "STEADY_BATCHED", "BatchedRunner"),
        recorded("sm90", "one", None, None, error="ValueError: brisk", **unknown),
        recorded("gfx942", "one", "STEADY", "SteadyRunner"),
    ]
    grid = read_grid(None, ACME)
    report = compare(enumerate(records, 1), grid, ACME.policy)
    assert [str(found) for found in report.disagreements] == []
    assert (report.total.asked, report.total.agreed, report.total.without_meaning) == (4, 4, 1)
    wrong = recorded("sm90", "one", "STEADY", "SteadyRunner")
    assert compare([(1, wrong)], grid, ACME.policy).disagreements
    row = {"device": "sm90", "family": "four bits", "backend": "QUICK", "activation": None}
    sizes = {"hidden": 640, "intermediate": 500, "padded": [1024, 512]}
    assert compare_rounding([row | sizes], grid, ACME.policy).total.agreed == 1
    with pytest.raises(UsageError, match="moectl has no grid of recorded decisions"):
        read_grid(None, engine_named("moectl"))


SHOWN_TO_USERS = {
    ("cli/tune/command.py", "moectl tune Qwen/Qwen3-30B-A3B --to vllm ./tuned"),
    # Whose versions a bug report needs.
    ("doctor/software.py", "sglang"),
    ("doctor/software.py", "tensorrt-llm"),
}
"""Texts that name an engine."""
ROOMS = (
    *(ROOT / name for name in ("doctor", "environment", "tuning", "cli", "explain")),
    SCRIPTS / "devtools" / "conformance",
)


def named_engines(path: Path) -> set[tuple[str, str]]:
    """Names and texts in a module that are an engine's: its imports, its strings, its comments."""
    home = ROOT if path.is_relative_to(ROOT) else SCRIPTS
    name, text = path.relative_to(home).as_posix(), path.read_text(encoding="utf-8")
    pattern = re.compile(r"vllm|sglang|tensorrt|0[._]33", re.IGNORECASE)
    found = {
        (name, node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.search(node.value)
    }
    rest = text
    for _, shown in found & SHOWN_TO_USERS:
        rest = rest.replace(shown, "")
    return found | {(name, line) for line in rest.splitlines() if pattern.search(line)}


def test_no_room_but_the_registry_names_an_engine() -> None:
    assert [room for room in ROOMS if not room.is_dir()] == []
    modules = [path for room in ROOMS for path in room.rglob("*.py")]
    modules += [path for path in (ROOT / "oracle").glob("*.py") if path.name != "registry.py"]
    assert len(modules) > 60
    assert {entry for path in modules for entry in named_engines(path)} == SHOWN_TO_USERS


def test_the_registry_names_each_family_once() -> None:
    said = (ROOT / "oracle" / "registry.py").read_text()
    for row in {row.family: row for row in ENGINES.known() if row.family != ACME.family}.values():
        assert said.count(f'"{row.family}", "{row.title}"') == 1
