"""Whatever the problem, the machine and the request: an answer, or a refusal with a sentence."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.cache.backend_times import current_name
from moectl.environment import Device, Packages, find_device
from moectl.oracle import ENGINES, OutOfScope, decide, policy_named, replay_inputs, select
from moectl.oracle.machine_packages import packages_from
from moectl.problem.moe_problem import (
    SILU,
    SWIGLU_OAI,
    Activation,
    Dims,
    MoEProblem,
    Parallel,
    Routing,
)
from moectl.problem.schemes import BF16, FULL, MXFP4, ActFormat, Scheme, WeightFormat, int_format

FP8_BLOCKS = st.sampled_from([(FULL, FULL), (1, FULL), (128, 128), (64, 64), (32, 128), (1, 128)])
SCALES = ((FULL, FULL), (1, FULL), (1, 128))
ACTS = st.sampled_from(
    [
        ActFormat(),
        *(
            ActFormat("fp8", 8, block, dynamic)
            for block in ((FULL, FULL), (1, FULL), (1, 128))
            for dynamic in (True, False)
        ),
        ActFormat("int8", 8, (1, FULL)),
        ActFormat("mxfp8", 8, (1, 32)),
        ActFormat("nvfp4", 4, (1, 16)),
    ]
)
SCHEMES = st.one_of(
    st.just(Scheme(BF16)),
    st.builds(Scheme, st.builds(WeightFormat, st.just("fp8"), st.just(8), FP8_BLOCKS), ACTS),
    st.builds(
        Scheme,
        st.sampled_from(
            [
                WeightFormat("nvfp4", 4, (1, 16)),
                WeightFormat("mxfp8", 8, (1, 32)),
                WeightFormat("int8", 8, (FULL, FULL)),
                int_format(4, 128),
                int_format(4, 128, zero_point=True),
            ]
        ),
        ACTS,
    ),
    st.builds(Scheme, st.just(MXFP4), st.sampled_from([ActFormat(), ActFormat("mxfp4", 4, (1, 32))])),
    st.builds(
        Scheme,
        st.builds(
            int_format,
            st.sampled_from([4, 8]),
            st.sampled_from([FULL, 16, 32, 48, 64, 128, 256]),
            zero_point=st.booleans(),
        ),
    ),
)
PROBLEMS = st.builds(
    MoEProblem,
    dims=st.builds(Dims, st.integers(1, 20000), st.integers(1, 40000)),
    experts=st.integers(1, 1100),
    top_k=st.integers(1, 22),
    scheme=SCHEMES,
    activation=st.sampled_from([SILU, SWIGLU_OAI, Activation("relu2", gated=False), Activation("situ")]),
    routing=st.builds(
        Routing,
        st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
        st.booleans(),
        correction_bias=st.booleans(),
        groups=st.sampled_from([None, 1, 8]),
        weight_on_input=st.booleans(),
        hashed=st.booleans(),
    ),
    storage=st.sampled_from(
        ["plain", "fp8", "modelopt", "gpt_oss", "mxfp4", "quark", "compressed-tensors", "gptq", "awq"]
    ),
    rows=st.sampled_from(["interleaved", "concatenated"]),
    act_order=st.sampled_from(["", "weight", "group"]),
    bias=st.booleans(),
    dtype=st.sampled_from(["bf16", "fp16"]),
    parallel=st.builds(
        Parallel,
        st.sampled_from([1, 2, 8]),
        st.sampled_from([1, 2, 8]),
        st.booleans(),
        st.sampled_from(
            [
                "allgather_reducescatter",
                "deepep_high_throughput",
                "deepep_low_latency",
                "nixl_ep",
                "moonep",
                "deepep_v2",
                "flashinfer_nvlink_one_sided",
                "flashinfer_nvlink_two_sided",
            ]
        ),
        st.booleans(),
    ),
    router_dtype=st.sampled_from(["bf16", "fp32"]),
    lora=st.booleans(),
    model_type=st.sampled_from(["", "qwen3_5_moe_text"]),
).map(lambda problem: replace(problem, top_k=min(problem.top_k, problem.experts)))
GPUS = ("v100", "sm75", "a100", "sm90", "b200", "thor", "gb10", "mi300x", "gfx950", "gfx1201", "xpu")
OTHERS = ("cpu", "cpu-amx-fp8", "cpu-arm", "cpu-power", "cpu-zen", "tpu", "out-of-tree")
DEVICES = st.sampled_from([find_device(name) for name in (*GPUS, *OTHERS)])
PACKAGES = st.builds(
    lambda packages, env: replace(packages, env={**packages.env, **env}),
    st.sampled_from(
        [packages_from(name) for name in ("full", "bare", "rocm_aiter_quark", "none", "zentorch")]
    ),
    st.dictionaries(
        st.sampled_from(
            ["VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_ROCM_USE_AITER", "VLLM_BATCH_INVARIANT"]
        ),
        st.sampled_from(["0", "1"]),
    ),
)
REQUESTS = st.sampled_from(
    [None, "auto", "marlin", "triton", "humming", "b12x", "emulation", "cutlass", "deep_gemm", "no such"]
)


@settings(max_examples=300, deadline=None)
@given(PROBLEMS, DEVICES, PACKAGES, REQUESTS, st.booleans(), st.sampled_from([*ENGINES]))
def test_every_question_has_an_answer(
    problem: MoEProblem, device: Device, packages: Packages, only: str | None, fallback: bool, policy: str
) -> None:
    if only is not None and policy == "moectl":
        only = current_name(only)  # a former name in a document is read as the name of today
    try:
        decision = select(problem, device, packages, policy_named(policy), only, fallback)
    except OutOfScope:
        return
    assert decision.usable == (decision.chosen is not None and not decision.error and not decision.gates)
    assert decision.chosen is None or decision.chosen in decision.candidates
    assert decision.chosen is not None or decision.error
    assert [candidate.rank for candidate in decision.candidates] == list(
        range(1, len(decision.candidates) + 1)
    )
    for candidate in decision.candidates:
        assert all(v.wanted and v.offered for v in candidate.verdicts)
        assert candidate.dims.padded_hidden >= problem.dims.hidden
        assert candidate.dims.padded_intermediate >= problem.dims.intermediate
    document = json.loads(json.dumps(decision.to_json()))
    again = decide(replay_inputs(document))
    assert again.to_json()["chosen"] == document["chosen"]
    assert again.to_json()["candidates"] == document["candidates"]
