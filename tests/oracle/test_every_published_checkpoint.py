"""Every built-in checkpoint on every architecture in every parallel mode: an answer, or a sentence."""

import json
from functools import cache

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.environment import find_device
from moectl.environment.named_devices import DATA
from moectl.errors import UsageError
from moectl.oracle import policy_named, select
from moectl.oracle.machine_packages import packages_from
from moectl.problem.moe_problem import MoEProblem, Parallel
from support.sampling import every_nth

VLLM = policy_named("vllm-0.33.0")
TABLE = json.loads((DATA / "gpus.json").read_text(encoding="utf-8"))
DEVICES = [find_device(name) for name in (*TABLE["representatives"].values(), "cpu")]
PACKAGES = {
    platform: packages_from(profile)
    for platform, profile in {"cuda": "full", "rocm": "rocm_aiter", "cpu": "cpu", "xpu": "xpu"}.items()
}
MODES = (
    Parallel(),
    Parallel(tp=8),
    Parallel(tp=8, ep=True, eplb=True),
    Parallel(dp=8, ep=True),
    Parallel(tp=2, dp=4, ep=True),
    *(
        Parallel(dp=8, ep=True, all2all=name)
        for name in ("deepep_high_throughput", "deepep_low_latency", "flashinfer_nvlink_one_sided")
    ),
)


@cache
def problems(name: str) -> tuple[MoEProblem, ...]:
    groups = open_checkpoint(name, offline=True).groups
    return tuple(dict.fromkeys(group.problem for group in groups))


@pytest.mark.parametrize("name", every_nth(model_names(), 3))
def test_every_checkpoint_has_an_answer_everywhere(name: str) -> None:
    served = set()
    for problem in problems(name):
        for device in DEVICES:
            for mode in MODES:
                try:
                    rank = problem.on(mode)
                except UsageError:
                    continue
                decision = select(rank, device, PACKAGES[device.platform], VLLM)
                assert decision.chosen is not None or decision.error
                assert decision.candidates or decision.error
                assert not decision.error_kind or decision.error
                if decision.usable:
                    served.add(device.arch)
    assert {"sm90", "sm100", "sm120"} <= served


@pytest.mark.parametrize("request_name", VLLM.request_names())
def test_every_request_has_an_answer(request_name: str) -> None:
    starts = ("openai/gpt-oss-20b", "Qwen/Qwen3-30B", "nvidia/Qwen3-30B")
    small = [name for name in model_names() if name.startswith(starts)]
    assert len(small) == 5
    for name in small:
        for problem in problems(name):
            for device in DEVICES:
                packages = PACKAGES[device.platform]
                decision = select(problem, device, packages, VLLM, request_name)
                assert decision.chosen is not None or decision.error
