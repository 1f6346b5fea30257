"""Stress cases on moectl's kernels under Triton's interpreter; `test_interpreter` runs it by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.environment import Packages, detect_cpu
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.run import RunMachine, plan_stress
from moectl.run.one_layer import prepare_layer
from moectl.run.stress import stress
from moectl.run.stress_cases import CASES, StressCase, StressInputs
from support.random_layers import GPT_OSS, KIMI, random_layer

FEW = {
    *("empty experts", "one expert", "skipped ids", "no ids", "rank's share", "expert map"),
    *("padding", "zeros", "repeated"),
}


def _short(case: StressCase) -> StressCase:
    """The case with three tokens, which the interpreter takes a second for."""

    def make(draw: StressInputs) -> object:
        made = case.make(draw)
        inputs = made.inputs
        return replace(
            made,
            inputs=replace(
                inputs,
                x=inputs.x[:3],
                ids=inputs.ids[:3],
                weights=inputs.weights[:3],
                logits=inputs.logits[:3],
            ),
        )

    return replace(case, make=make)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("moectl", replace(GPT_OSS, dims=Dims(96, 32), top_k=2)),
        ("moectl_marlin", replace(KIMI, dims=Dims(128, 64), experts=5, local_experts=5, top_k=2)),
    ],
    ids=["moectl", "moectl_marlin"],
)
def test_cases_pass(backend: str, problem: MoEProblem) -> None:
    layer = random_layer(problem)
    cpu = RunMachine(torch.device("cpu"), detect_cpu(), Packages())
    cases = plan_stress(layer, cpu.torch, cases=[_short(case) for case in CASES if case.name in FEW])
    found = list(stress(prepare_layer(layer, backend, cpu), cases, cpu.torch, lambda text: None))
    assert len(found) == len(FEW)
    assert all(it.ok for it in found), [(it.case, it.note) for it in found if not it.ok]
    notes = {it.case: it.note for it in found if it.note}
    assert notes == ({} if backend == "moectl" else {"padding": notes.get("padding")})
