"""FlashInfer's records in this tool's own policy say what the runners say, and where nobody tried them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from moectl.capabilities.flashinfer import CUTLASS, TRTLLM, kernel_of, refusal
from moectl.environment import Packages, find_device
from moectl.oracle.decision import Candidate, Decision
from moectl.oracle.machine_packages import packages_from
from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import MXFP8_ACT, Scheme
from support.sampling import every_nth

MOECTL = policy_named("moectl")
FULL = packages_from("flashinfer")
ACTIVATIONS = (
    *(SILU, SWIGLU_OAI, Activation("silu", limit=7.0), Activation("swiglustep", limit=7.0)),
    *(Activation("swiglustep"), Activation("situ", beta=4.0, linear_beta=25.0), Activation("situ", beta=4.0)),
    *(Activation("gelu_tanh"), Activation("relu2", gated=False), Activation("silu", gated=False)),
)
ROUTINGS = (
    *(Routing(), Routing("sigmoid", correction_bias=True, scale=2.5), Routing(scale=2.0)),
    *(Routing("sigmoid", weight_on_input=True), Routing("sqrtsoftplus"), Routing(hashed=True)),
)


def decide(problem: MoEProblem, gpu: str, packages: Packages = FULL, name: str | None = None) -> Decision:
    return select(problem, find_device(gpu), packages, MOECTL, name)


def candidate(decision: Decision, name: str) -> Candidate:
    return next(c for c in decision.candidates if c.backend.name == name)


def problems(kernels: tuple[object, ...]) -> list[MoEProblem]:
    return [
        MoEProblem(
            Dims(hidden, 256),
            experts=8,
            top_k=top_k,
            scheme=Scheme(kernel.weight, kernel.act),  # type: ignore[attr-defined]
            activation=activation,
            routing=routing,
            bias=bias,
            dtype=dtype,
        )
        for kernel, activation, routing, bias, dtype, hidden, top_k in product(
            kernels, ACTIVATIONS, ROUTINGS, (False, True), ("bf16", "fp16"), (512, 480), (1, 2)
        )
    ]


@pytest.mark.parametrize("part", every_nth(range(3), 3))
@pytest.mark.parametrize(
    ("name", "gpu", "kernels", "logits"),
    [
        ("flashinfer_cutlass", "h200", CUTLASS, False),
        ("flashinfer_trtllm", "b200", TRTLLM, False),
        ("flashinfer_trtllm_monolithic", "b200", TRTLLM, True),
    ],
)
def test_the_record_and_the_runner_say_the_same(
    name: str, gpu: str, kernels: tuple[object, ...], logits: bool, part: int
) -> None:
    seen, every = set(), 7 if len(kernels) > 3 else 3
    for problem in problems(kernels)[every * part :: 3 * every]:
        kernel = kernel_of(kernels, problem.scheme.weight, problem.scheme.act)  # type: ignore[arg-type]
        assert kernel is not None
        asked = candidate(decide(problem, gpu), name)
        why = refusal(kernel, problem, logits=logits)
        hashed = problem.routing.hashed and logits
        assert asked.usable == (not why and not hashed), (problem, why, asked.failed)
        assert not asked.usable or asked.layout == kernel.layout
        if why and not hashed:
            assert why in [verdict.wanted for verdict in asked.failed], (why, asked.failed)
        seen.add(asked.usable)
    assert seen == {True, False}


def test_other_devices_and_machines_without_it_are_refused() -> None:
    problem = MoEProblem(Dims(512, 256), 8, 2, Scheme(TRTLLM[0].weight))
    for name, gpu in (("flashinfer_cutlass", "b200"), ("flashinfer_trtllm", "h200")):
        assert [v.question for v in candidate(decide(problem, gpu), name).failed] == ["device"]
    missing = candidate(decide(problem, "b200", Packages()), "flashinfer_trtllm").failed
    assert {verdict.group for verdict in missing} == {"package"}


def test_other_tokens_than_declared_only_on_request() -> None:
    problem = MoEProblem(Dims(512, 256), 8, 2, Scheme(TRTLLM[0].weight))
    assert not candidate(decide(problem, "b200"), "flashinfer_trtllm_afp8").usable
    asked = decide(problem, "b200", name="flashinfer_trtllm_afp8").require()
    assert asked.backend.runner == "flashinfer_trtllm_afp8" and asked.layout == "trtllm-mxfp4"
    declared = replace(problem, scheme=Scheme(TRTLLM[0].weight, MXFP8_ACT))
    assert candidate(decide(declared, "b200"), "flashinfer_trtllm").usable


def test_a_backend_is_untried_where_nobody_ran_it() -> None:
    for route in MOECTL.routes:
        for backend in route.backends():
            assert backend.runner
            assert backend.untried(find_device("b200")), backend.name
    torch = next(b for b in MOECTL.routes[0].backends() if b.name == "torch")
    assert not torch.untried(find_device("cpu")) and not torch.untried(find_device("h200"))
    cutlass = next(b for b in MOECTL.routes[0].backends() if b.name == "flashinfer_cutlass")
    assert not cutlass.untried(find_device("h200"))
    document = decide(MoEProblem(Dims(512, 256), 8, 2, Scheme(TRTLLM[0].weight)), "b200").to_json()
    listed = {c["backend"]: c["verified_on"] for c in document["candidates"]}
    assert listed["flashinfer_trtllm"] == [] and listed["torch"] == ["sm90", "cpu"]
