"""Stress test of a layer's kernel: edge cases, each checked against the reference.

Memory that a call allocates holds NaN before; a call must leave its inputs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendFailed, MoectlError, NoBackend
from ..kernels.layer_inputs import LayerInputs, no_bias
from ..kernels.modular.fused_moe_kernel import FusedMoEKernel, kernel_of
from ..kernels.tolerance import CheckResult, check, tolerance_for
from ..layer.experts import ExpertLayer
from .backend_failures import device_failure, guarded
from .layer_variants import every_second, poisoned_padding, rank_share
from .one_layer import CheckedLayer
from .stress_cases import CASES, StressCase, StressInputs
from .workload import Workload, expected_of

RANKS = 2
"""Expert-parallel ranks in the case of a rank's shard; the last one is run."""

APART = 64
"""Elements of NaN between two rows of poisoned tokens."""

SMALL_BLOCK = 1 << 20
"""Largest request in bytes that CUDA's caching allocator serves from its small blocks."""


@dataclass(frozen=True)
class PlannedCase:
    """A case with its inputs and the reference's result, made once for all backends of a layer.

    Attributes:
        skipped: why it does not apply to this layer; empty if it does.
    """

    case: StressCase
    workload: Workload
    expected: Tensor
    skipped: str = ""


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case on one backend.

    Attributes:
        ok: None if it does not apply, or the backend refuses such a layer; `note` says why.
        note: what failed, in sentences; or what was skipped.
        check: against the reference; None without a result.
    """

    backend: str
    case: str
    about: str
    tokens: int
    ok: bool | None
    note: str = ""
    check: CheckResult | None = None

    @property
    def failed(self) -> bool:
        """Whether the case ran and failed."""
        return self.ok is False


@dataclass
class _CaseRun:
    """The outcome of running a case: the result to check, what is wrong already, and what was skipped."""

    y: Tensor | None = None
    wrong: tuple[str, ...] = ()
    skipped: str = ""


def plan_stress(
    layer: ExpertLayer, device: torch.device, *, seed: int = 0, cases: Sequence[StressCase] = CASES
) -> tuple[PlannedCase, ...]:
    """`cases` for `layer` with the reference's results; each expert is decoded once, on `device`."""
    router = layer.router
    bias = no_bias(layer.problem)
    if router is not None and router.correction_bias is not None:
        bias = router.correction_bias.float()
    workloads = [case.make(StressInputs(layer.problem, bias, seed + i)) for i, case in enumerate(cases)]
    inputs = [_local_inputs(layer, case, it) for case, it in zip(cases, workloads, strict=True)]
    columns = ((it.x, it.ids, it.weights, it.logits) for it in inputs)
    joined = LayerInputs(*(torch.cat(tensors) for tensors in zip(*columns, strict=True)))
    answers = torch.split(expected_of(layer, joined, device), [len(it.x) for it in inputs])
    return tuple(
        PlannedCase(case, workload, answer, _why_skipped(layer, case, answer))
        for case, workload, answer in zip(cases, workloads, answers, strict=True)
    )


def _local_inputs(layer: ExpertLayer, case: StressCase, workload: Workload) -> LayerInputs:
    """The inputs, with -1 for ids of experts that the case's kernel does not have."""
    inputs = workload.inputs
    if case.how not in SHARES or _no_share(layer):
        return inputs
    local = SHARES[case.how](layer)[inputs.ids.clamp(min=0).long()] & (inputs.ids >= 0)
    return replace(inputs, ids=torch.where(local, inputs.ids, -1))


def _last_ranks(layer: ExpertLayer) -> Tensor:
    first = layer.problem.experts - rank_share(layer, RANKS, RANKS - 1).problem.local_experts
    return torch.arange(layer.problem.experts) >= first


def _mapped(layer: ExpertLayer) -> Tensor:
    return every_second(layer)[1] >= 0


SHARES: Mapping[str, Callable[[ExpertLayer], Tensor]] = {"share": _last_ranks, "map": _mapped}
"""Ways to run a case with some of the experts, and their ``[experts]`` bool masks."""


def _no_share(layer: ExpertLayer) -> str:
    if layer.rank_slice is not None and layer.partial:
        return "the layer is itself one rank's shard, in every case"
    return f"there are {layer.problem.experts} experts" if layer.problem.experts < RANKS else ""


def _why_skipped(layer: ExpertLayer, case: StressCase, answer: Tensor) -> str:
    """Why a case does not apply to `layer`; empty if it does."""
    if case.how in SHARES:
        return _no_share(layer)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[layer.problem.dtype]
    if answer.numel() and float(answer.abs().max()) > torch.finfo(dtype).max:
        return f"its results exceed the range of {layer.problem.dtype}"
    return ""


def stress(
    ready: CheckedLayer, cases: Sequence[PlannedCase], device: torch.device, progress: Callable[[str], None]
) -> Iterator[CaseResult]:
    """The result of each case on a prepared layer; a failure is a result too, as is a broken device."""
    device_error = ""
    for planned in cases:
        progress(planned.case.name)
        if device_error:
            yield _result(ready, planned, False, f"not run, {device_error}")
            continue
        result = _run_case(ready, planned)
        if result.failed:
            device_error = device_failure(device)
        yield result


def _run_case(ready: CheckedLayer, planned: PlannedCase) -> CaseResult:
    case, kernel = planned.case, ready.kernel
    if planned.skipped:
        return _result(ready, planned, None, planned.skipped)
    if case.by_ids and kernel.monolithic:
        return _result(ready, planned, None, "it routes by itself: no logits give these ids")
    try:
        with guarded(kernel.runner.name, ready.layer.layer):
            case_run = WAYS[case.how](ready, planned.workload)
    except BackendFailed as error:
        return _result(ready, planned, False, error.why)
    except NoBackend as error:
        return _result(ready, planned, None, f"refused: {error}")
    except MoectlError as error:
        return _result(ready, planned, False, str(error))
    if case_run.y is None:
        return _result(ready, planned, False, "; ".join(case_run.wrong))
    result = check(
        case_run.y, planned.expected, tolerance_for(ready.layer.problem, kernel.runner.accumulation)
    )
    wrong = (
        case_run.wrong if result.ok else (_deviation(case_run.y, planned.expected, result), *case_run.wrong)
    )
    return _result(ready, planned, not wrong, "; ".join(wrong) or case_run.skipped, result)


def _result(
    ready: CheckedLayer, planned: PlannedCase, ok: bool | None, note: str, check: CheckResult | None = None
) -> CaseResult:
    case = planned.case
    name = ready.kernel.runner.name
    return CaseResult(name, case.name, case.about, planned.workload.tokens, ok, note, check)


def _deviation(y: Tensor, expected: Tensor, result: CheckResult) -> str:
    """How a result deviates from what was expected, as a sentence."""
    nonfinite = torch.nonzero((~torch.isfinite(y)).any(1)).flatten().tolist()
    if nonfinite:
        return f"{len(nonfinite)} of {len(y)} tokens are not finite, the first is token {nonfinite[0]}"
    limit = result.tolerance
    size = float(expected.double().norm())
    token = f"worst token {result.worst_token}"
    if size == 0.0:
        return f"zeros were expected, got up to {float(y.abs().max()):.3g}; {token}"
    return f"RMS {result.rms:.3g} (at most {limit.rms:g}), max {result.max:.3g} ({limit.max:g}); {token}"


# How a case is run.


def _once(ready: CheckedLayer, workload: Workload) -> _CaseRun:
    return _called(ready.kernel, *workload.at(ready.prepared))


def _share(ready: CheckedLayer, workload: Workload) -> _CaseRun:
    shard = rank_share(ready.layer, RANKS, RANKS - 1)
    kernel = kernel_of(shard.prepared(ready.prepared.backend, ready.prepared.device))
    return _called(kernel, *workload.at(kernel.prepared))


def _map(ready: CheckedLayer, workload: Workload) -> _CaseRun:
    subset, table = every_second(ready.layer)
    prepared = subset.prepared(ready.prepared.backend, ready.prepared.device)
    runner = ready.kernel.runner
    kernel = FusedMoEKernel(prepared, runner, runner.forms[0], expert_map=table.to(prepared.device))
    # Ids are still the layer's: the kernel maps them.
    return _called(kernel, *workload.at(ready.prepared))


def _padding(ready: CheckedLayer, workload: Workload) -> _CaseRun:
    kernel, skipped = ready.kernel, ""
    if kernel.runner.layout_of(ready.layer.problem) is not None and not kernel.runner.masks_padding:
        skipped = "the weights' padding stayed zeros, which the backend relies on"
    elif kernel.runner.masks_padding:
        prepared = poisoned_padding(ready.layer, ready.prepared.backend, ready.prepared.device)
        skipped = "" if prepared is not None else "the weights have no padding"
        kernel = kernel if prepared is None else kernel_of(prepared)
    inputs, bias = workload.at(kernel.prepared)
    nan = float("nan")
    surrounded = LayerInputs(
        _within(inputs.x, nan, APART), _within(inputs.ids, 0), _within(inputs.weights, nan),
        _within(inputs.logits, nan),
    )  # fmt: skip
    return replace(_called(kernel, surrounded, bias), skipped=skipped)


def _repeated(ready: CheckedLayer, workload: Workload) -> _CaseRun:
    inputs, bias = workload.at(ready.prepared)
    first = _called(ready.kernel, inputs, bias)
    if first.y is None:
        return first
    other = LayerInputs(
        *(t.flip(0).contiguous() for t in (inputs.x, inputs.ids, inputs.weights, inputs.logits))
    )
    ready.kernel.run(other, bias)
    for _ in range(3):
        again = ready.kernel.run(inputs, bias).cpu()
        differing = int((again.view(torch.int16) != first.y.view(torch.int16)).any(1).sum())
        if differing:
            reason = f"{differing} of {len(first.y)} tokens had other bits when the call was repeated"
            return replace(first, wrong=(*first.wrong, reason))
    return first


WAYS: Mapping[str, Callable[[CheckedLayer, Workload], _CaseRun]] = {
    "once": _once,
    "share": _share,
    "map": _map,
    "padding": _padding,
    "repeated": _repeated,
}
"""Ways to run a case, by the name in `StressCase.how`."""


def _within(t: Tensor, fill: float, apart: int = 0) -> Tensor:
    """`t` as a view into a larger tensor of `fill`: a row before, one after, `apart` between its rows."""
    buffer = t.new_full((len(t) + 2, t.shape[1] + apart), fill)
    view = buffer[1 : len(t) + 1, : t.shape[1]]
    view.copy_(t)
    return view


def _called(kernel: FusedMoEKernel, inputs: LayerInputs, bias: Tensor | None) -> _CaseRun:
    """One call in poisoned memory; a result of the wrong shape, dtype or device does not count."""
    arguments = {"x": inputs.x, "ids": inputs.ids, "weights": inputs.weights, "logits": inputs.logits}
    before = {name: t.clone() for name, t in arguments.items()}
    if inputs.x.is_cuda:
        # The first call leaves behind the memory that the second one gets.
        kernel.run(inputs, bias)
    with poisoned_memory(inputs.x.device):
        y = kernel.run(inputs, bias)
    wrong = [
        f"it wrote into its input {name}" for name, t in arguments.items() if not torch.equal(t, before[name])
    ]
    x = inputs.x
    if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        got = f"{y.dtype} {list(y.shape)} on {y.device}"
        return _CaseRun(None, (f"expected {x.dtype} {list(x.shape)} on {x.device}, got {got}", *wrong))
    return _CaseRun(y.cpu(), tuple(wrong))


@contextmanager
def poisoned_memory(device: torch.device) -> Iterator[None]:
    """Inside, memory that torch leaves uninitialized holds NaN, or negative or very large integers.

    On CUDA this covers the blocks that the caching allocator has free on entry, not new memory of the driver.
    """
    if device.type == "cuda":
        _poison_free_blocks(device)
        yield
        return
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        settings.fill_uninitialized_memory = filling


def _poison_free_blocks(device: torch.device) -> None:
    """Fills every free block of the caching allocator with one bits (NaN in every float type)."""
    sizes = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            size = int(block["size"])
            if small:
                sizes += [SMALL_BLOCK] * (size // SMALL_BLOCK) + [size % SMALL_BLOCK]
            elif size > SMALL_BLOCK:
                sizes.append(size)
    blocks = [
        torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF)
        for size in sorted(sizes, reverse=True)
        if size
    ]
    del blocks
