"""Every kernel that vLLM's policy can name on SM90 is one that can be run and timed here, or has a reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest

from moectl.checkpoint.source.catalogue import built_in, model_names
from moectl.checkpoint.source.shards import separate_quantization
from moectl.checkpoint.tensors.layer_groups import layer_groups
from moectl.environment import Packages, find_device
from moectl.errors import UsageError
from moectl.kernels.registry import RUNNERS
from moectl.oracle import policy_named, select
from moectl.oracle.backend import Backend, Capability, ExpertsClass
from moectl.oracle.engines.vllm_0_33_0.kernels_here import GAPS, LAYER_GAPS, RUNNERS_OF
from moectl.oracle.format_keys import act_key, exact_key, group32_key, symmetric_group_key
from moectl.oracle.registry import known_packages
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.schemes import (
    A16,
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP4_ACT,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    Scheme,
    act_format,
    int_format,
)

H200 = find_device("h200")
WEIGHTS = (BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, MXFP8, NVFP4)
INTEGERS = tuple(int_format(bits, group) for bits, group in product((4, 8), (32, 128, FULL)))
ACTS = (
    *(A16, FP8_ACT_GROUP_128, FP8_ACT_TOKEN, FP8_ACT_TENSOR, FP8_ACT_TENSOR_STATIC),
    *(MXFP4_ACT, MXFP8_ACT, NVFP4_ACT, act_format("int8", (1, FULL))),
)
EVERYTHING = Packages(
    dict.fromkeys((*known_packages(), "vllm", "nvcc", "ninja", "flashinfer_cubin", "deep_gemm"), "")
)


def backends() -> Iterator[Backend]:
    """Every backend that a route of the policy can choose on an H200, asked for or not."""
    for route in policy_named("vllm-0.33.0").routes:
        for order in route.orders:
            if order.where is None or any(arch.fits(H200) for arch in order.where):
                yield from order.backends
        yield from (it.backend for it in route.assigned)
        yield from route.on_request
        yield from (backend for named in route.names.values() for backend in named)


def classes() -> dict[str, list[ExpertsClass]]:
    """Classes of experts with kernels for SM90, by name."""
    found: dict[str, list[ExpertsClass]] = {}
    for backend in backends():
        for variant in backend.variants:
            arch = variant.capability.arch
            if arch is None or any(it.fits(H200) for it in arch):
                mine = found.setdefault(variant.experts, [])
                if variant not in mine:
                    mine.append(variant)
    return found


CLASSES = classes()


def offers(capability: Capability, scheme: Scheme) -> bool:
    """Whether the engine takes these formats; a class without formats takes what emulation is for: MX."""
    keys = {key(scheme.weight) for key in (exact_key, group32_key, symmetric_group_key)}
    if capability.formats is None:
        return scheme.weight.name in ("mxfp4", "mxfp8")
    return any(offer.supports(key, act_key(scheme.act), H200) for offer in capability.formats for key in keys)


def takes(runner: str, problem: MoEProblem) -> bool:
    """Whether the runner takes a layer on an H200 with every package."""
    return select(problem, H200, EVERYTHING, policy_named("moectl"), runner).chosen is not None


def runs(runner: str, scheme: Scheme) -> bool:
    """Whether the runner takes a plain layer of these formats there."""
    return takes(runner, MoEProblem(Dims(512, 256), 8, 2, scheme))


@pytest.mark.parametrize("experts", sorted(CLASSES))
def test_each_class_has_a_runner_or_a_reason(experts: str) -> None:
    gaps = [gap for gap in GAPS if gap.experts == experts]
    runners = RUNNERS_OF.get(experts, ())
    assert runners or any(not (gap.weights or gap.acts) for gap in gaps), f"{experts} has neither"
    assert set(runners) <= set(RUNNERS)
    missing, used = [], set()
    for weight, act in product((*WEIGHTS, *INTEGERS), ACTS):
        scheme = Scheme(weight, act)
        if not any(offers(variant.capability, scheme) for variant in CLASSES[experts]):
            continue
        if any(runs(runner, scheme) for runner in runners):
            continue
        why = [gap for gap in gaps if gap.covers(weight.name, act.name)]
        used.update(why)
        missing += [] if why else [str(scheme)]
    assert not missing, f"neither a runner nor a reason for {experts} with {'; '.join(missing)}"
    assert {gap for gap in gaps if gap.weights or gap.acts} <= used, "a reason for what runs"


def test_reasons_and_runners_are_of_classes_that_are_there() -> None:
    assert set(RUNNERS_OF) | {gap.experts for gap in GAPS} == set(CLASSES)
    assert all(gap.why.endswith(".") and "\n" not in gap.why for gap in GAPS)


def published_layers() -> Iterator[tuple[str, MoEProblem]]:
    """Layers of every built-in model, whole and as one of 8 ranks has them."""
    for name in model_names():
        entry = built_in(name)
        config, file = separate_quantization(entry.documents)
        groups = layer_groups(entry.config, entry.listing(), quantization=config, quantization_file=file)
        for problem in dict.fromkeys(group.problem for group in groups):
            for parallel in (Parallel(), Parallel(tp=8), Parallel(tp=8, ep=True)):
                with suppress(UsageError):  # experts that cannot be cut in 8
                    yield name, problem.on(parallel)


def test_what_is_chosen_for_a_published_model_can_be_run_and_timed_or_has_a_reason() -> None:
    """Its activation, routing, sizes and scales count, too, and not its formats alone."""
    missing, used, ran = set(), set(), 0
    for name, problem in published_layers():
        decision = select(problem, H200, EVERYTHING, policy_named("vllm-0.33.0"))
        if decision.chosen is None or not decision.usable:
            continue
        experts, scheme = decision.chosen.variant.experts, problem.scheme
        if any(takes(runner, problem) for runner in RUNNERS_OF.get(experts, ())):
            ran += 1
            continue
        formats = [g for g in GAPS if g.experts == experts and g.covers(scheme.weight.name, scheme.act.name)]
        why = [gap for gap in LAYER_GAPS if experts in gap.experts and gap.of(problem)]
        used.update(why)
        if not formats and not why:
            missing.add(f"{name}: {experts}, {scheme}, {problem.dims}, {problem.activation}")
    assert not missing, "neither a runner nor a reason: " + "; ".join(sorted(missing))
    assert ran > 150, "most of them are run"
    assert used == set(LAYER_GAPS), "a reason for what runs"
