"""What an engine makes of environment variables: switches of three kinds, choices, names that are gone."""

import pytest

from moectl.environment.variables import (
    FAILS,
    IGNORED,
    INTEGER,
    ODD,
    ONE,
    READ,
    REMOVED,
    SET,
    SWITCHES,
    UNKNOWN,
    WORD,
    Variable,
    judge_variable,
    judge_variables,
)
from moectl.files.records import to_json
from moectl.oracle.engines.vllm_0_33_0.variables import HISTORY, VARIABLES, VERSION
from moectl.oracle.registry import policy_named

ENGINE = "vllm-0.33.0"
NAMES = HISTORY.variables.at(VERSION)


@pytest.mark.parametrize(
    ("kind", "text", "verdict", "means"),
    [
        (INTEGER, "1", SET, "on"),
        (INTEGER, "0", SET, "off"),
        (INTEGER, " 1 ", SET, "on"),
        (INTEGER, "2", ODD, "on"),
        (INTEGER, "true", FAILS, ""),
        (INTEGER, "yes", FAILS, ""),
        (INTEGER, "off", FAILS, ""),
        (INTEGER, "", FAILS, ""),
        (WORD, "True", SET, "on"),
        (WORD, "1", SET, "on"),
        (WORD, "0", SET, "off"),
        (WORD, "off", SET, "off"),
        (WORD, "yes", ODD, "off"),
        (WORD, " 1", ODD, "off"),
        (WORD, "2", SET, "off"),
        (ONE, "1", SET, "on"),
        (ONE, "true", ODD, "off"),
        (ONE, "0", SET, "off"),
    ],
)
def test_switches_are_read_as_the_engine_reads_them(kind: str, text: str, verdict: str, means: str) -> None:
    found = judge_variable(Variable("V", "does", kind), text, ENGINE)
    assert (found.verdict, found.means) == (verdict, means)
    assert bool(found.remark) == (verdict != SET)


@pytest.mark.parametrize(
    ("name", "text", "verdict", "says"),
    [
        ("VLLM_DEEP_GEMM_WARMUP", "relax", SET, ""),
        ("VLLM_DEEP_GEMM_WARMUP", "Relax", FAILS, "it takes skip, full, relax"),
        ("VLLM_ROCM_USE_AITER_MOE_SITUV2", "A8W4", SET, ""),
        ("VLLM_ROCM_USE_AITER_MOE_SITUV2", "a8w8", FAILS, "auto, a4w4"),
        ("VLLM_HUMMING_MOE_GEMM_TYPE", "Grouped", SET, ""),
        ("VLLM_HUMMING_MOE_GEMM_TYPE", "batched", ODD, "indexed, grouped, auto"),
        ("VLLM_DEEPEP_BUFFER_SIZE_MB", "2048", SET, ""),
        ("VLLM_DEEPEP_BUFFER_SIZE_MB", "2GB", FAILS, "a whole number"),
        ("VLLM_TUNED_CONFIG_FOLDER", "/x", SET, ""),
        ("VLLM_FLASHINFER_MOE_BACKEND", "latency", IGNORED, "--moe-backend flashinfer_trtllm"),
        ("VLLM_CPU_MOE_PREPACK", "1", IGNORED, "nothing replaces it"),
    ],
)
def test_other_variables(name: str, text: str, verdict: str, says: str) -> None:
    found = judge_variable(VARIABLES[name], text, ENGINE)
    assert found.verdict == verdict
    assert says in found.remark
    assert to_json(found)["does"] == VARIABLES[name].does


def test_names_that_nobody_knows_get_near_matches() -> None:
    env = {
        "VLLM_USE_DEEPGEMM": "0",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_QQQQQQ": "1",
        "HOME": "/root",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    found = {f.name: f for f in judge_variables(env, VARIABLES, ENGINE, prefix="VLLM_", others=NAMES)}
    assert set(found) == {"VLLM_USE_DEEPGEMM", "VLLM_QQQQQQ", "VLLM_USE_DEEP_GEMM"}
    assert found["VLLM_USE_DEEPGEMM"].verdict == UNKNOWN
    assert "did you mean VLLM_USE_DEEP_GEMM" in found["VLLM_USE_DEEPGEMM"].remark
    assert found["VLLM_USE_DEEPGEMM"].instead == "VLLM_USE_DEEP_GEMM"
    assert found["VLLM_QQQQQQ"].remark.endswith("has no variable VLLM_QQQQQQ")


def test_near_matches_are_names_that_are_read_unless_another_is_nearer() -> None:
    def told(name: str) -> str:
        (found,) = judge_variables({name: "1"}, VARIABLES, ENGINE, prefix="VLLM_", others=NAMES)
        return found.remark

    assert "did you mean VLLM_ROCM_MOE_PADDING or" in told("VLLM_MOE_PADING")
    assert told("VLLM_MOE_PADING").endswith("or VLLM_MOE_PADDING?")
    assert "VLLM_MXFP4_USE_MARLIN" in told("VLLM_MXFP4_USE_MARLN")


def test_the_table_agrees_with_the_engines_own_list() -> None:
    for variable in VARIABLES.values():
        assert (variable.name in NAMES) == (variable.status == READ), variable.name
        assert variable.status in (READ, REMOVED)
        if variable.kind in SWITCHES:
            assert judge_variable(Variable("V", "", variable.kind), variable.default, ENGINE).verdict == SET
        elif variable.default:
            variable.value(variable.default)


def test_every_switch_of_a_policy_stands_in_the_table() -> None:
    policy = policy_named(ENGINE)
    assert policy.switches()
    for name in policy.switches():
        assert VARIABLES[name].status == READ
    assert policy.variables is VARIABLES


def test_a_value_on_which_the_engine_fails_leaves_the_default() -> None:
    assert VARIABLES["VLLM_USE_DEEP_GEMM"].is_on("no")
    assert not VARIABLES["VLLM_USE_DEEP_GEMM"].is_on("0")
    assert VARIABLES["VLLM_USE_DEEP_GEMM"].is_on(None)
    assert VARIABLES["VLLM_USE_DEEP_GEMM"].is_on("2")
    assert not VARIABLES["VLLM_ROCM_USE_AITER"].is_on("yes")
    assert VARIABLES["VLLM_ROCM_USE_AITER"].is_on("TRUE")
