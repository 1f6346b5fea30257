"""vLLM's releases: recorded decisions of each, and that an older release answers otherwise where it did."""

from itertools import pairwise
from pathlib import Path

import pytest
from devtools.conformance import compare, decide, read_decisions, read_grid

from moectl.errors import UsageError
from moectl.oracle import engine_named, policy_named
from moectl.oracle.machine_packages import default_engine
from moectl.oracle.registry import ENGINES, answered_by
from support.invoking import moectl
from support.sampling import every_nth

DATA = Path(__file__).parents[2] / "data" / "oracle"
RELEASES = [engine for engine in ENGINES.values() if engine.family == "vllm"]
WHOLE = [engine for engine in RELEASES if not engine.policy.complete]
PARTIAL = [engine for engine in RELEASES if engine.policy.complete]
OLDER = {engine.version: DATA / f"decisions-{engine.version}.jsonl.gz" for engine in WHOLE[1:]}
UNQUANTIZED = {engine.version: DATA / f"unquantized-{engine.version}.jsonl.gz" for engine in PARTIAL}
PLAIN_GRID = read_grid(DATA / "grid-unquantized.json")


@pytest.mark.parametrize("part", every_nth(range(3), 3))
@pytest.mark.parametrize("version", every_nth(OLDER, 2))
def test_every_recorded_decision_of_a_release_agrees(version: str, part: int) -> None:
    """By default every third of the decisions, which still have every format and device."""
    records = list(read_decisions(OLDER[version]))[part::3]
    report = compare(records, read_grid(), policy_named(f"vllm=={version}"))
    assert not report.disagreements, "\n".join(map(str, report.disagreements[:20]))
    assert report.total.outside == 0 and report.total.asked > 333
    assert all(tally.asked for tally in report.fields.values())


@pytest.mark.parametrize("version", ["0.33.0", "0.28.0", "0.26.0"])
def test_random_decisions_agree(version: str) -> None:
    """Sizes, formats, layouts, requests and variables that no published model suggests."""
    records = list(read_decisions(DATA / f"random-{version}.jsonl.gz"))
    grid = read_grid(DATA / f"random-grid-{version}.json")
    report = compare(records, grid, policy_named(f"vllm=={version}"))
    assert not report.disagreements, "\n".join(map(str, report.disagreements[:20]))
    assert report.total.outside == 0 and report.total.asked >= 400


@pytest.mark.parametrize("version", UNQUANTIZED)
def test_every_recorded_decision_about_unquantized_experts_agrees(version: str) -> None:
    records = list(read_decisions(UNQUANTIZED[version]))
    report = compare(records, PLAIN_GRID, policy_named(f"vllm=={version}"))
    assert not report.disagreements, "\n".join(map(str, report.disagreements[:20]))
    assert report.total.outside == 0 and report.total.asked > 90


@pytest.mark.parametrize(("newer", "older"), [pair for pair in pairwise(RELEASES) if pair[1] in PARTIAL])
def test_the_next_release_chooses_otherwise_for_unquantized_experts(newer, older) -> None:
    records = list(read_decisions(UNQUANTIZED[older.version]))
    report = compare(records, PLAIN_GRID, newer.policy)
    assert "selected" in {found.field for found in report.disagreements}


@pytest.mark.parametrize("engine", PARTIAL, ids=lambda engine: engine.version)
def test_a_release_with_rules_for_some_formats_refuses_others(engine) -> None:
    ask = ("explain", "deepseek-ai/DeepSeek-V3", "--offline", "--gpu", "h200", "--tp", "8", "--engine")
    refused = " ".join(moectl(*ask, f"vllm=={engine.version}", code=1).stderr.split())
    assert f"the rules of vLLM {engine.version} do not cover fp8 block 128x128 experts" in refused
    assert "Ask vllm==0.26.0, the next release with rules for every format" in refused


@pytest.mark.parametrize(
    ("thread", "older", "newer", "gpu", "checkpoint", "before", "after"),
    [
        (
            "vllm#41306",
            "0.19.0",
            "0.20.0",
            "h200",
            "mistralai/Mixtral-8x7B-v0.1",
            "triton",
            "flashinfer_cutlass",
        ),
        (
            "vllm#44220",
            "0.22.0",
            "0.23.0",
            "h200",
            "mistralai/Mixtral-8x7B-v0.1",
            "flashinfer_cutlass",
            "triton",
        ),
        (
            "vllm#53472",
            "0.23.0",
            "0.26.0",
            "b200",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "flashinfer_cutlass",
            "flashinfer_trtllm",
        ),
    ],
)
def test_changes_that_users_reported_are_found(
    thread: str, older: str, newer: str, gpu: str, checkpoint: str, before: str, after: str
) -> None:
    since = ("--from", f"vllm=={older}", "--to", f"vllm=={newer}", "--gpu", gpu, "--tp", "8")
    found = moectl("explain", checkpoint, "--offline", *since, "--json", code=1).document["releases"]
    assert found["uncovered"] == 0
    (change,) = found["changes"]
    assert (change["before"], change["after"]) == (before, after)
    assert change["reported"][0].startswith(thread) and change["causes"]


def test_decisions_without_rules_are_counted_and_not_compared() -> None:
    since = ("--from", "vllm==0.24.0", "--to", "vllm==0.26.0", "--gpu", "h200")
    names = ("deepseek-ai/DeepSeek-V3", "mistralai/Mixtral-8x7B-v0.1")
    done = moectl("explain", *names, "--offline", *since)
    assert "The decision is the same." in done.stdout
    assert "not compared: vLLM 0.24.0 or vLLM 0.26.0 has no rules" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("newer", "older"), list(pairwise(WHOLE)))
def test_the_next_release_would_fail_on_the_recording_of_the_one_before(newer, older) -> None:
    records, grid = list(read_decisions(OLDER[older.version])), read_grid()
    missing = {"selected", "experts_cls", "rejected"}
    for share in (records[start::8] for start in range(8)):
        missing -= {found.field for found in compare(share, grid, newer.policy).disagreements}
        if not missing:
            break
    assert not missing


def test_releases_share_what_did_not_change() -> None:
    newest, older = ({b.engine_name: b for b in engine.policy.backends()} for engine in RELEASES[:2])
    assert newest["VLLM_CUTLASS"].name == older["VLLM_CUTLASS"].name
    assert {"AITER_TRITON_MXFP4_MXFP4"} == set(newest) - set(older)


def test_variables_are_those_of_the_release() -> None:
    def found(version: str, name: str) -> str:
        (finding,) = engine_named(f"vllm=={version}").judge({name: "1"})
        return finding.remark

    assert "which vLLM 0.29.0 dropped" in found("0.30.0", "VLLM_TEST_FORCE_FP8_MARLIN")
    assert "--moe-backend marlin" in found("0.30.0", "VLLM_TEST_FORCE_FP8_MARLIN")
    assert not found("0.28.0", "VLLM_TEST_FORCE_FP8_MARLIN")
    assert not found("0.33.0", "VLLM_STEP5_SHARD_SP_SHARED_EXPERT")
    assert "which vLLM 0.33.0 added" in found("0.32.0", "VLLM_STEP5_SHARD_SP_SHARED_EXPERT")
    assert found("0.33.0", "VLLM_USE_FBGEMM").endswith("ignores VLLM_USE_FBGEMM, which vLLM 0.24.0 dropped")
    assert not found("0.20.0", "VLLM_USE_FLASHINFER_MOE_FP16")
    assert "deprecates VLLM_USE_FLASHINFER_MOE_FP16" in found("0.23.0", "VLLM_USE_FLASHINFER_MOE_FP16")
    assert "which vLLM 0.24.0 dropped" in found("0.24.0", "VLLM_USE_FLASHINFER_MOE_FP16")
    # One that came back: dropped in 0.29.0, again in 0.31.0, dropped in 0.33.0.
    assert "which vLLM 0.29.0 dropped" in found("0.30.0", "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM")
    assert "which vLLM 0.33.0 dropped" in found("0.33.0", "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM")


@pytest.mark.parametrize(
    ("version", "name", "says"),
    [
        ("0.28.0", "b12x", "does not accept b12x as a backend name, which vLLM 0.29.0 added"),
        ("0.19.0", "humming", "which vLLM 0.21.0 added"),
        ("0.32.0", "flashinfer_moe_ep_mega_cutedsl", "which vLLM 0.32.0 dropped"),
    ],
)
def test_a_backend_name_of_another_release_is_told(version: str, name: str, says: str) -> None:
    asked = cell(scheme="bf16", device="sm90", forced=name)
    decision = decide(read_grid(), asked, policy_named(f"vllm=={version}"))
    assert any(says in str(gate) for gate in decision.gates)


def test_a_variable_that_a_release_still_read_forces_marlin() -> None:
    ask = ("explain", "deepseek-ai/DeepSeek-V3", "--offline", "--gpu", "b200", "--tp", "8", "--json")
    for version, backend in (("0.30.0", "flashinfer_trtllm"), ("0.28.0", "marlin")):
        env = ("--env", "VLLM_TEST_FORCE_FP8_MARLIN=1", "--engine", f"vllm=={version}")
        document = moectl(*ask, *env).document
        assert document["groups"][-1]["decision"]["chosen"]["backend"] == backend


def test_minimum_versions_are_those_of_the_release() -> None:
    oldest = [engine.packages["flashinfer"].oldest for engine in RELEASES]
    assert oldest == [
        *("0.7.2", "0.7.0", "0.7.0", "0.6.18", "0.6.16", "0.6.14"),
        *("0.6.12", "0.6.12", "0.6.11", "0.6.8", "0.6.6"),
    ]
    humming = {engine.version: engine.packages["humming"].oldest for engine in RELEASES}
    assert (humming["0.33.0"], humming["0.28.0"], humming["0.26.0"]) == ("0.1.19", "0.1.12", "0.1.10")


def test_one_backend_of_a_release_is_one_object_in_all_of_its_routes() -> None:
    for engine in RELEASES:
        seen: dict[tuple[str, ...], int] = {}
        for backend in engine.policy.backends():
            key = (backend.name, backend.engine_name, *(variant.experts for variant in backend.variants))
            assert seen.setdefault(key, id(backend)) == id(backend) or backend.forms


def test_a_release_is_named_exactly_or_answered_by_the_one_before() -> None:
    for engine in RELEASES:
        assert engine_named(f"vllm=={engine.version}") is engine
        assert engine_named(f"vllm=={engine.version}.post1") is engine
        assert not answered_by(f"vllm=={engine.version}.post1+cu130")
    newest, oldest = RELEASES[0], RELEASES[-1]
    assert engine_named("vllm==99.0") is newest and newest.version in answered_by("vllm==99.0")
    patched = f"{oldest.version.rpartition('.')[0]}.7"
    assert engine_named(f"vllm=={patched}") is oldest
    assert f"rules for vLLM {patched}: {oldest.version}" in answered_by(f"vllm=={patched}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vllm==0.9.2", f"the oldest release that it knows is {RELEASES[-1].version}"),
        ("vllm==latest", "names no release"),
        ("moectl==1.0", "there are no releases of 'moectl'; known are those of vllm"),
    ],
)
def test_what_no_release_answers_is_refused_in_a_sentence(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engine_named(name)
    assert says in moectl("explain", "openai/gpt-oss-120b", "--offline", "--engine", name, code=2).stderr


@pytest.mark.parametrize(
    ("installed", "answers"),
    [
        ("", RELEASES[0]),
        (RELEASES[1].version, RELEASES[1]),
        (f"{RELEASES[1].version}.post2+cu130", RELEASES[1]),
        ("0.1.0", RELEASES[0]),
    ],
)
def test_without_a_name_the_installed_release_answers(installed: str, answers, monkeypatch) -> None:
    monkeypatch.setattr("moectl.oracle.machine_packages.distribution_version", lambda *arguments: installed)
    assert default_engine() is answers


def test_a_refusal_that_an_engine_cannot_word_ends_its_selection() -> None:
    grid = read_grid()
    refused = cell(scheme="int8_w8a16_g128_ct", device="cpu-x86", profile="cpu", model="mixtral-8x7b")
    decision = decide(grid, refused, policy_named("vllm==0.26.0"))
    assert decision.chosen is None and decision.error_kind == "KeyError"
    assert "fails as it words" in decision.error


def test_explain_says_which_release_answers() -> None:
    ask = ("explain", "openai/gpt-oss-120b", "--offline", "--gpu", "h200", "--engine")
    assert "vLLM 0.32.0" in moectl(*ask, "vllm==0.32.0").stdout
    between = moectl(*ask, "vllm==0.32.9")
    assert "0.32.0, the last known release before it, answers" in " ".join(between.stderr.split())


def cell(**names: str | None) -> dict[str, str | None]:
    """A case of the grid; the rest as usual."""
    usual = {"model": "qwen3-30b-a3b", "profile": "full", "parallel": "tp1", "forced": None}
    return {**usual, **names}


@pytest.mark.parametrize(
    ("asked", "version", "then", "now"),
    [
        (
            cell(scheme="mxfp8", device="gfx950", profile="rocm_aiter"),
            "0.32.0",
            "Mxfp8NativeTritonExperts",
            "AiterMxfp8Experts",
        ),
        (cell(scheme="bf16", device="sm100", forced="marlin"), "0.32.0", None, "TrtLlmBf16ExpertsMonolithic"),
        # Humming has priority over Marlin on SM90 since 0.32.0.
        (cell(scheme="int4_g128_gptq", device="sm90"), "0.31.0", "MarlinExperts", "HummingIndexedExperts"),
        # No backend with other activations than declared ones stepped in before 0.32.0.
        (cell(scheme="mxfp4_quark_w4a4", device="sm90"), "0.31.0", None, "FlashInferExperts"),
        (cell(scheme="w4a8_fp8_g128_ct", device="sm100"), "0.30.0", None, "HummingIndexedExperts"),
        (cell(scheme="int8_w8a8_ct", device="xpu", profile="xpu"), "0.30.0", None, "TritonExperts"),
        # GPTQ with activation order was refused from 0.30.0 on.
        (cell(scheme="int4_g128_gptq_descact", device="sm100"), "0.28.0", "MarlinExperts", None),
        (cell(scheme="int8_w8a16_g128_ct", device="sm100"), "0.28.0", None, "MarlinExperts"),
        # Native MXFP4 went the way of gpt-oss, and emulation needed no package.
        (
            cell(scheme="mxfp4_native", device="sm100", model="kimi-k2"),
            "0.26.0",
            "TrtLlmMxfp4ExpertsModular",
            "TrtLlmMxfp4ExpertsMonolithic",
        ),
        (
            cell(scheme="mxfp4_quark_w4a4", device="sm80"),
            "0.26.0",
            "OCP_MXQuantizationEmulationTritonExperts",
            "MarlinExperts",
        ),
        (
            cell(scheme="mxfp8", device="gfx942", profile="rocm_default", parallel="dp8_ep8_deepep_ll"),
            "0.26.0",
            "Mxfp8EmulationTritonExperts",
            None,
        ),
    ],
)
def test_older_releases_choose_otherwise(asked, version: str, then: str | None, now: str | None) -> None:
    grid = read_grid()
    for name, experts in ((version, then), (RELEASES[0].version, now)):
        chosen = decide(grid, asked, policy_named(f"vllm=={name}")).chosen
        assert (chosen and chosen.variant.experts) == experts
