"""The oracle: all questions asked, requests, notes, and decisions that can be made again."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from moectl.environment import Device, Packages, find_device
from moectl.errors import NoBackend, UsageError
from moectl.oracle import Decision, OutOfScope, decide, policy_named, replay_inputs, select
from moectl.oracle.backend import GROUPS
from moectl.oracle.checks import CHECKS
from moectl.oracle.decision import CAPABILITY, DTYPE
from moectl.oracle.machine_packages import packages_from
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Dims, MoEProblem, Parallel, Routing
from moectl.problem.schemes import A16, FULL, INT8_ACT_TOKEN, MXFP4, ActFormat, Scheme, int_format

VLLM, OWN = policy_named("vllm-0.33.0"), policy_named("moectl")
FULL_INSTALL = packages_from("full")
GPT_OSS = MoEProblem(
    Dims(2880, 2880),
    experts=128,
    top_k=4,
    scheme=Scheme(MXFP4),
    activation=SWIGLU_OAI,
    routing=Routing(after_topk=True, router_bias=True),
    storage="gpt_oss",
    rows="interleaved",
    bias=True,
)
KIMI = MoEProblem(
    Dims(7168, 2048),
    experts=384,
    top_k=8,
    scheme=Scheme(int_format(4, 32)),
    routing=Routing("sigmoid", correction_bias=True, groups=1, topk_groups=1, scale=2.827),
    storage="compressed-tensors",
)
MIXTRAL = MoEProblem(Dims(4096, 14336), experts=8, top_k=2, scheme=Scheme(int_format(4, 128)), storage="gptq")
DP8_LL = Parallel(dp=8, ep=True, all2all="deepep_low_latency")


def ask(
    problem: MoEProblem, gpu: str, packages: Packages = FULL_INSTALL, only: str | None = None
) -> Decision:
    return select(problem, find_device(gpu), packages, VLLM, only)


def chosen(decision: Decision) -> tuple[str, str]:
    winner = decision.require()
    return winner.backend.name, winner.variant.experts


def test_every_candidate_is_asked_every_question() -> None:
    decision = ask(GPT_OSS, "t4")
    questions = {check.question for check in CHECKS}
    for candidate in decision.candidates:
        assert questions <= {verdict.question for verdict in candidate.verdicts}
        assert all(verdict.group in GROUPS for verdict in candidate.verdicts)
    trtllm = next(c for c in decision.candidates if c.variant.experts == "TrtLlmMxfp4ExpertsMonolithic")
    assert {v.group for v in trtllm.failed} == {"arch"}
    bare = ask(GPT_OSS.on(DP8_LL), "t4", packages_from("none"))
    trtllm = next(c for c in bare.candidates if c.variant.experts == "TrtLlmMxfp4ExpertsMonolithic")
    assert list(trtllm.reasons()) == ["arch", "package", "parallel"]
    assert {v.question for v in trtllm.reasons()["parallel"]} >= {"token exchange", "token format"}


def test_a_missing_package_of_the_exchange_is_noted() -> None:
    def said(packages: str, exchange: str) -> list[str]:
        notes = ask(GPT_OSS.on(replace(DP8_LL, all2all=exchange)), "h200", packages_from(packages)).notes
        return [note for note in notes if "stops at start" in note]

    needed = {"deepep_low_latency": "deep_ep", "flashinfer_nvlink_one_sided": "flashinfer"}
    for exchange, package in needed.items():
        [note] = said("none", exchange)
        assert note.startswith(f"--all2all-backend {exchange} needs {package}, which is not installed (")
        assert not said("full", exchange)
    assert not said("none", "allgather_reducescatter")


@pytest.mark.parametrize(
    ("gpu", "problem", "winner"),
    [
        ("b200", GPT_OSS, ("flashinfer_trtllm", "TrtLlmMxfp4ExpertsMonolithic")),
        ("h100", GPT_OSS, ("triton", "OAITritonMxfp4ExpertsMonolithic")),
        ("l40s", GPT_OSS, ("marlin", "MarlinExperts")),
        ("rtx5090", GPT_OSS, ("marlin", "MarlinExperts")),
        ("h100", KIMI, ("humming", "HummingIndexedExperts")),
        ("b200", KIMI, ("marlin", "MarlinExperts")),
        ("a100", MIXTRAL, ("marlin", "MarlinExperts")),
        ("cpu-amx", replace(GPT_OSS), ("cpu", "CPUExpertsMxfp4")),
    ],
)
def test_known_choices(gpu: str, problem: MoEProblem, winner: tuple[str, str]) -> None:
    assert chosen(ask(problem, gpu, packages_from("none") if gpu == "cpu-amx" else FULL_INSTALL)) == winner


def test_sizes_are_padded_once_by_exchange_and_backend() -> None:
    dims = ask(GPT_OSS.on(Parallel(tp=8)), "a100").problem.dims
    assert (dims.hidden, dims.intermediate) == (2880, 360)
    assert (dims.padded_hidden, dims.padded_intermediate) == (3072, 384)
    exchanged = ask(KIMI.on(DP8_LL), "a100").problem.dims
    assert (exchanged.padded_hidden, exchanged.padded_intermediate) == (7168, 2048)
    small = replace(MIXTRAL, dims=Dims(2880, 2880), storage="gpt_oss", scheme=Scheme(MXFP4))
    throughput = Parallel(dp=8, ep=True, all2all="deepep_high_throughput")
    assert ask(small.on(throughput), "a100").problem.dims.padded_hidden == 3072


def test_hidden_sizes_that_the_exchange_cannot_carry_are_an_error() -> None:
    decision = ask(replace(KIMI, dims=Dims(16384, 2048)).on(DP8_LL), "a100")
    assert not decision.usable
    assert "up to 8192" in decision.error


def test_humming_comes_before_marlin_on_hopper_only_and_says_so() -> None:
    def order(gpu: str) -> list[str]:
        return list(dict.fromkeys(c.backend.name for c in ask(KIMI, gpu).candidates))

    hopper, blackwell = order("h100"), order("b200")
    assert hopper.index("humming") == hopper.index("marlin") - 1
    assert blackwell.index("humming") > blackwell.index("marlin")
    assert any("9.0" in note for note in ask(KIMI, "h100").notes)
    assert not any("9.0" in note for note in ask(KIMI, "b200").notes)


def test_a_request_that_cannot_serve_is_refused_with_its_reasons() -> None:
    decision = ask(KIMI, "a100", only="flashinfer_trtllm")
    assert decision.chosen is None
    assert not decision.usable
    assert "this device is SM80" in decision.error
    assert {c.backend.name for c in decision.candidates} == {"flashinfer_trtllm"}
    with pytest.raises(NoBackend, match="flashinfer_trtllm does not support"):
        decision.require()
    relaxed = select(KIMI, find_device("a100"), FULL_INSTALL, VLLM, "flashinfer_trtllm", allow_fallback=True)
    assert chosen(relaxed)[0] == "marlin"
    assert relaxed.chosen in relaxed.candidates
    assert any("flashinfer_trtllm was requested" in note for note in relaxed.notes)
    assert [c.rank for c in relaxed.candidates] == list(range(1, len(relaxed.candidates) + 1))


@pytest.mark.parametrize("name", ["flashinfer_trtllm_afp8", "no such backend", "deep_gemm"])
def test_a_fallback_helps_with_names_that_the_engine_does_not_accept(name: str) -> None:
    assert not ask(GPT_OSS, "b200", only=name).usable
    relaxed = select(GPT_OSS, find_device("b200"), FULL_INSTALL, VLLM, name, allow_fallback=True)
    assert chosen(relaxed)[0] == "flashinfer_trtllm"
    assert any("was requested but is not supported" in note for note in relaxed.notes)


def test_a_fallback_does_not_pass_a_refusal() -> None:
    ordered = replace(MIXTRAL, act_order="group")
    decision = select(ordered, find_device("h100"), FULL_INSTALL, VLLM, "triton", allow_fallback=True)
    assert decision.chosen is None
    assert "activation order" in decision.error


def test_a_request_keeps_the_judging() -> None:
    asked = ask(GPT_OSS, "h100", only="marlin").require()
    automatic = next(c for c in ask(GPT_OSS, "h100").candidates if c.variant.experts == "MarlinExperts")
    assert asked.verdicts == automatic.verdicts


def test_unknown_requests_list_what_is_known_and_spelling_is_forgiving() -> None:
    decision = ask(KIMI, "a100", only="cutlass")
    assert "available: triton, marlin, humming" in decision.error
    assert chosen(ask(GPT_OSS, "h100", only="Triton-Unfused")) == (
        "triton_unfused",
        "UnfusedOAITritonExperts",
    )
    assert ask(GPT_OSS, "h100", only="auto").to_json()["chosen"] == ask(GPT_OSS, "h100").to_json()["chosen"]


def test_batched_tokens_translate_a_request_for_mxfp4_but_not_for_integers() -> None:
    assert chosen(ask(GPT_OSS.on(DP8_LL), "h100", only="marlin"))[0] == "batched_marlin"
    assert not ask(KIMI.on(DP8_LL), "h100", only="marlin").usable
    assert chosen(ask(KIMI.on(DP8_LL), "h100"))[0] == "batched_marlin"


def test_methods_that_assign_their_backend_say_what_they_did_not_ask() -> None:
    problem = replace(KIMI, scheme=Scheme(MXFP4, ActFormat("mxfp4", 4, (1, 32))))
    cpu = select(problem, Device("cpu", "x86", "cpu"), Packages(), VLLM, "triton")
    assert chosen(cpu) == ("marlin", "MarlinExperts")
    assert any("without checks" in note and "this device is x86" in note for note in cpu.notes)
    assert any("ignores the request for triton" in note for note in cpu.notes)
    cutlass = ask(problem, "b200")
    assert chosen(cutlass) == ("cutlass", "CutlassExpertsMxfp4")
    assert cutlass.require().engine_name == "MARLIN"
    other = next(c for c in cutlass.candidates if c.backend.name == "marlin")
    assert not other.usable


def test_refusals_before_and_failures_after_the_choice() -> None:
    ordered = ask(replace(MIXTRAL, act_order="group"), "h100")
    assert ordered.chosen is None
    assert "activation order" in ordered.error
    channel = ask(replace(KIMI, scheme=Scheme(int_format(8, FULL))), "h100")
    assert channel.chosen is not None
    assert not channel.usable
    assert "Marlin only" in channel.error
    old = ask(GPT_OSS, "t4")
    assert old.chosen is not None
    assert [gate.kind for gate in old.gates] == [CAPABILITY, DTYPE]
    assert old.to_json()["gates"][0] == {"kind": CAPABILITY, "says": str(old.gates[0])}
    assert (ordered.error_kind, channel.error_kind, old.error_kind) == ("ValueError", "AssertionError", "")
    with pytest.raises(NoBackend, match="needs SM80"):
        old.require()


def test_a_gptq_method_changes_where_marlin_does_not_take_the_sizes() -> None:
    odd = replace(MIXTRAL, dims=Dims(2880, 2880))
    assert ask(odd, "a100").method == "MoeWNA16Method"
    assert chosen(ask(odd, "a100"))[1] == "TritonWNA16Experts"
    assert ask(MIXTRAL, "a100").method == "AutoGPTQMoEMethod"
    too_thin = ask(odd.on(Parallel(tp=8)), "a100")
    assert "no quantization group of 32" in too_thin.error
    assert too_thin.sized
    assert too_thin.error_kind == "AssertionError"


def test_a_failure_carries_the_engines_exception_class() -> None:
    nothing = ask(KIMI.on(Parallel(dp=8, ep=True, all2all="nixl_ep")), "mi300x")
    assert nothing.error_kind == nothing.to_json()["error_kind"] == "NotImplementedError"
    assert ask(KIMI, "a100", only="flashinfer_trtllm").error_kind == "ValueError"
    assert ask(KIMI, "a100", only="cutlass").error_kind == "ValueError"


def test_switches_and_packages_decide() -> None:
    env = {"VLLM_USE_FLASHINFER_MOE_INT4": "1"}
    assert chosen(ask(KIMI, "b200", packages_from("full", env)))[1] == "TrtLlmMxint4ExpertsMonolithic"
    lacking = Packages(
        FULL_INSTALL.versions,
        frozenset({"flashinfer:fused_moe.trtllm_mxint4_block_scale_moe"}),
        {**FULL_INSTALL.env, **env},
    )
    refused = ask(KIMI, "b200", lacking)
    assert chosen(refused)[0] == "marlin"
    trtllm = next(c for c in refused.candidates if c.backend.name == "flashinfer_trtllm")
    assert [v.offered for v in trtllm.failed] == ["flashinfer without it"]
    native = replace(KIMI, scheme=Scheme(MXFP4), storage="mxfp4")
    assert chosen(ask(native, "rtx5090"))[0] == "deep_gemm"
    off = packages_from("full", {"VLLM_USE_DEEP_GEMM": "0"})
    assert chosen(ask(native, "rtx5090", off))[0] == "marlin"


def test_switches_of_earlier_releases_are_noted() -> None:
    decision = ask(GPT_OSS, "b200", packages_from("full", {"VLLM_MXFP4_USE_MARLIN": "1"}))
    assert chosen(decision)[0] == "flashinfer_trtllm"
    ignored = "ignores VLLM_MXFP4_USE_MARLIN, which vLLM 0.24.0 dropped; use --moe-backend"
    assert any(ignored in note for note in decision.notes)
    assert not any("ignores" in note for note in ask(GPT_OSS, "b200").notes)


def test_the_activation_filter_is_shown() -> None:
    declared = replace(
        GPT_OSS, storage="quark", scheme=Scheme(MXFP4, ActFormat("mxfp4", 4, (1, 32))), bias=False
    )
    decision = ask(declared, "b200")
    assert chosen(decision)[0] == "cutlass"
    filtered = [c for c in decision.candidates if any(v.code == "filtered" for v in c.failed)]
    assert {c.backend.name for c in filtered} >= {"flashinfer_trtllm_afp8", "flashinfer_cutlass_afp8"}
    assert all("policy" in c.reasons() for c in filtered)


def test_decisions_are_equal_for_equal_arguments_and_can_be_made_again() -> None:
    cases = [
        (GPT_OSS, "h100", None),
        (KIMI.on(DP8_LL), "b300", None),
        (MIXTRAL, "cpu", "marlin"),
        (replace(KIMI, scheme=Scheme(int_format(4, 32, zero_point=True))), "a10", None),
    ]
    for problem, gpu, only in cases:
        first = ask(problem, gpu, only=only).to_json()
        assert first == ask(problem, gpu, only=only).to_json()
        again = decide(replay_inputs(json.loads(json.dumps(first))))
        assert again.to_json() == first


def test_documents_that_are_not_decisions_are_refused() -> None:
    document = ask(GPT_OSS, "h100").to_json()
    with pytest.raises(UsageError, match="not a decision"):
        replay_inputs({})
    broken = json.loads(json.dumps(document))
    broken["inputs"]["problem"]["dims"]["colour"] = 1
    with pytest.raises(UsageError, match="unknown fields colour"):
        replay_inputs(broken)
    del broken["inputs"]["problem"]["dims"]
    with pytest.raises(UsageError, match="incomplete"):
        replay_inputs(broken)


def test_decisions_recorded_under_the_former_names_of_own_backends_are_replayed() -> None:
    now = select(KIMI, find_device("h100"), Packages(), OWN, "moectl").to_json()
    time = {"tactic": "", "tokens": 1, "routing": "uniform", "us": 9.0, "spread_us": 0.1, "cold": True}
    now["inputs"] |= {"measured": [{"backend": "triton_marlin", **time, "error": 0.0}]}
    inputs = replay_inputs(now)
    assert inputs.requested == "moectl" and inputs.measured.rows[0].backend == "moectl_marlin"
    assert decide(inputs).require().backend.name == "moectl"
    now["inputs"]["requested"] = "triton_marlin"
    assert replay_inputs(now).requested == "moectl_marlin"
    now["inputs"] |= {"requested": "triton", "policy": VLLM.name}
    assert replay_inputs(now).requested == "triton", "vLLM's own name of its backend"


def test_formats_and_platforms_without_rows_are_out_of_scope() -> None:
    with pytest.raises(OutOfScope, match="do not cover"):
        ask(replace(KIMI, storage="plain"), "h100")
    with pytest.raises(UsageError, match="no policy 'lmdeploy'"):
        policy_named("lmdeploy")


@pytest.mark.parametrize(
    ("gpu", "scheme", "runner"),
    [
        ("h100", Scheme(MXFP4), "moectl"),
        ("a100", Scheme(int_format(4, 64)), "moectl"),
        ("b200", Scheme(int_format(8, FULL, "F16", zero_point=True)), "moectl"),
        ("h100", Scheme(MXFP4, ActFormat("mxfp4", 4, (1, 32))), "moectl"),
        ("a100", Scheme(int_format(4, 32), ActFormat("int8", 8, (1, FULL))), "moectl"),
        ("t4", Scheme(int_format(4, 128)), "torch"),
        ("cpu", Scheme(MXFP4), "torch"),
        ("mi300x", Scheme(MXFP4), "torch"),
    ],
)
def test_the_tools_own_policy(gpu: str, scheme: Scheme, runner: str) -> None:
    problem = replace(KIMI, scheme=scheme, dims=Dims(2880, 360))
    winner = select(problem, find_device(gpu), Packages(), OWN).require()
    assert winner.backend.runner == runner
    if runner == "moectl":
        assert winner.layout == "moectl-mtile64"
        assert winner.dims.padded_intermediate == 384


def test_integers_have_a_layout_for_each_kind_of_tokens() -> None:
    for bits, act, layout in (
        *((8, INT8_ACT_TOKEN, "moectl-int8"), (8, A16, "moectl-mtile64")),
        *((4, INT8_ACT_TOKEN, "moectl-int4"), (4, A16, "moectl-mtile64")),
    ):
        weight = int_format(bits, FULL if bits == 8 else 128, "F32" if act.bits == 8 else "BF16")
        problem = replace(KIMI, scheme=Scheme(weight, act))
        winner = select(problem, find_device("h100"), Packages(), OWN).require()
        assert (winner.backend.runner, winner.layout) == ("moectl", layout)


@pytest.mark.parametrize(
    "problem",
    [
        replace(KIMI, scheme=Scheme(int_format(4, 32, "F32"))),
        replace(KIMI, scheme=Scheme(int_format(4, 48, zero_point=True))),
        replace(KIMI, activation=Activation("gelu")),
        replace(KIMI, activation=Activation("silu", gated=False)),
    ],
)
def test_plain_torch_runs_what_the_tools_own_kernels_refuse(problem: MoEProblem) -> None:
    decision = select(problem, find_device("h100"), Packages(), OWN)
    usable = {c.backend.runner for c in decision.candidates if c.usable}
    assert {"torch", "emulation"} <= usable and not {"moectl", "moectl_marlin"} & usable


@pytest.mark.parametrize("problem", [replace(KIMI, act_order="group"), KIMI.on(DP8_LL)])
def test_the_tools_own_policy_refuses_what_it_cannot_run(problem: MoEProblem) -> None:
    decision = select(problem, find_device("h100"), Packages(), OWN)
    assert not decision.usable
    assert all(len(candidate.failed) >= 1 for candidate in decision.candidates)


def test_the_oracle_imports_no_heavy_package() -> None:
    code = (
        "import sys; import moectl.oracle, moectl.doctor, moectl.environment as e; "
        "moectl.oracle.packages_from(None); e.detect_device(); "
        "print(sorted({'torch', 'triton', 'flashinfer', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dp", [1, 2])
def test_fused_routers_serve_one_data_parallel_rank_alone(dp: int) -> None:
    decision = ask(replace(GPT_OSS, parallel=Parallel(dp=dp)), "b200")
    fused = [c for c in decision.candidates if c.variant and not c.variant.capability.parallel.dp]
    answers = {v.holds for c in fused for v in c.verdicts if v.question == "data parallel ranks"}
    assert answers == {dp == 1}


def test_experts_without_gating_are_asked_for_as_such() -> None:
    decision = ask(replace(GPT_OSS, activation=Activation("relu2", gated=False)), "b200")
    gated = ask(GPT_OSS, "b200")
    for answers, all_hold in ((decision, False), (gated, True)):
        holds = [v.holds for c in answers.candidates for v in c.verdicts if v.question == "gating"]
        assert holds and all(holds) == all_hold


@pytest.mark.parametrize("hashed", [False, True])
def test_kernels_that_route_by_themselves_refuse_routing_by_token_id(hashed: bool) -> None:
    routing = replace(GPT_OSS.routing, hashed=hashed)
    decision = ask(replace(GPT_OSS, routing=routing), "b200")
    fused = [c for c in decision.candidates if c.variant.monolithic and not c.variant.capability.hashed]
    answers = {v.holds for c in fused for v in c.verdicts if v.question == "hash routing"}
    assert answers == {not hashed}
