"""Stress test of a layer's kernel: edge cases, each checked against the reference.

Memory that a call allocates is filled with NaN beforehand, and a call must not change its inputs.
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
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .backend_failures import device_failure, guarded
from .layer_variants import every_second, expert_shard, poisoned_padding
from .one_layer import RunnableLayer
from .static_scales import beyond_static_scales, quantizes_activations
from .stress_cases import CASES, StressCase, StressInputs
from .workload import Workload, expected_of

RANKS = 2
"""Expert-parallel ranks of the case with a rank's shard; the last one is run."""

ROW_GAP = 64
"""Elements of NaN between two rows of poisoned tokens."""

SMALL_BLOCK = 1 << 20
"""Largest allocation in bytes that CUDA's caching allocator takes from its small blocks."""


@dataclass(frozen=True)
class PlannedCase:
    """A case with its inputs and the reference's result, planned once for all backends of a layer.

    Attributes:
        skipped: why it does not apply to this layer; empty if it does.
        beyond: why it does not apply to backends that quantize activations; empty if it does.
    """

    case: StressCase
    workload: Workload
    expected: Tensor
    skipped: str = ""
    beyond: str = ""


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case on one backend.

    Attributes:
        ok: None if the case does not apply, or the backend does not support such a layer.
        note: what failed, or why the case or a part of it was skipped.
        check: comparison with the reference; None without a result.
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
    """The outcome of running a case: the result to check, faults found so far, and what was skipped."""

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
    inputs = [_local_inputs(layer, case, workload) for case, workload in zip(cases, workloads, strict=True)]
    columns = ((call.x, call.ids, call.weights, call.logits) for call in inputs)
    joined = LayerInputs(*(torch.cat(tensors) for tensors in zip(*columns, strict=True)))
    results = torch.split(expected_of(layer, joined, device), [len(call.x) for call in inputs])
    beyond = [
        beyond_static_scales(layer, call, device) if case.scaled else ""
        for case, call in zip(cases, inputs, strict=True)
    ]
    return tuple(
        PlannedCase(case, workload, result, _why_skipped(layer, case, result), why)
        for case, workload, result, why in zip(cases, workloads, results, beyond, strict=True)
    )


def _local_inputs(layer: ExpertLayer, case: StressCase, workload: Workload) -> LayerInputs:
    """The inputs, with -1 for ids of experts that the kernel of the case does not have."""
    inputs = workload.inputs
    if case.how not in SUBSETS or _no_subset(layer):
        return inputs
    local = SUBSETS[case.how](layer)[inputs.ids.clamp(min=0).long()] & (inputs.ids >= 0)
    return replace(inputs, ids=torch.where(local, inputs.ids, -1))


def _on_last_rank(layer: ExpertLayer) -> Tensor:
    first = layer.problem.experts - expert_shard(layer, RANKS, RANKS - 1).problem.local_experts
    return torch.arange(layer.problem.experts) >= first


def _in_map(layer: ExpertLayer) -> Tensor:
    return every_second(layer)[1] >= 0


SUBSETS: Mapping[str, Callable[[ExpertLayer], Tensor]] = {"share": _on_last_rank, "map": _in_map}
"""Ways to run a case with a subset of the experts, and the ``[experts]`` bool masks of the subsets."""


def _no_subset(layer: ExpertLayer) -> str:
    """Why no subset of the experts can be run; empty if it can."""
    if layer.rank_slice is not None and layer.partial:
        return "the layer is one rank's shard itself, in every case"
    return f"there are {layer.problem.experts} experts" if layer.problem.experts < RANKS else ""


def _why_skipped(layer: ExpertLayer, case: StressCase, expected: Tensor) -> str:
    """Why a case does not apply to `layer`; empty if it does."""
    if case.how in SUBSETS:
        return _no_subset(layer)
    dtype = MODEL_TORCH_DTYPES[layer.problem.dtype]
    if expected.numel() and float(expected.abs().max()) > torch.finfo(dtype).max:
        return f"its results exceed the range of {layer.problem.dtype}"
    return ""


def stress(
    ready: RunnableLayer, cases: Sequence[PlannedCase], device: torch.device, progress: Callable[[str], None]
) -> Iterator[CaseResult]:
    """Yields the result of each case on a prepared layer; failures and a lost device are results, too."""
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


def _run_case(ready: RunnableLayer, planned: PlannedCase) -> CaseResult:
    case, kernel = planned.case, ready.kernel
    if planned.skipped:
        return _result(ready, planned, None, planned.skipped)
    if planned.beyond and quantizes_activations(kernel.runner.accumulation_of(ready.layer.problem)):
        return _result(ready, planned, None, planned.beyond)
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
    problem = ready.layer.problem
    result = check(
        case_run.y, planned.expected, tolerance_for(problem, kernel.runner.accumulation_of(problem))
    )
    wrong = (
        case_run.wrong if result.ok else (_deviation(case_run.y, planned.expected, result), *case_run.wrong)
    )
    return _result(ready, planned, not wrong, "; ".join(wrong) or case_run.skipped, result)


def _result(
    ready: RunnableLayer, planned: PlannedCase, ok: bool | None, note: str, check: CheckResult | None = None
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


# Ways to run a case.


def _once(ready: RunnableLayer, workload: Workload) -> _CaseRun:
    return _called(ready.kernel, *workload.at(ready.prepared))


def _share(ready: RunnableLayer, workload: Workload) -> _CaseRun:
    shard = expert_shard(ready.layer, RANKS, RANKS - 1)
    kernel = kernel_of(shard.prepared(ready.prepared.backend, ready.prepared.device))
    return _called(kernel, *workload.at(kernel.prepared))


def _map(ready: RunnableLayer, workload: Workload) -> _CaseRun:
    subset, table = every_second(ready.layer)
    prepared = subset.prepared(ready.prepared.backend, ready.prepared.device)
    runner = ready.kernel.runner
    kernel = FusedMoEKernel(prepared, runner, runner.forms[0], expert_map=table.to(prepared.device))
    # Ids are still the layer's: the kernel maps them.
    return _called(kernel, *workload.at(ready.prepared))


def _padding(ready: RunnableLayer, workload: Workload) -> _CaseRun:
    kernel, skipped = ready.kernel, ""
    if kernel.runner.layout_of(ready.layer.problem) is not None and not kernel.runner.masks_padding:
        skipped = "the weights' padding stayed zeros, which the backend relies on"
    elif kernel.runner.masks_padding:
        prepared = poisoned_padding(ready.layer, ready.prepared.backend, ready.prepared.device)
        skipped = "" if prepared is not None else "the weights have no padding"
        kernel = kernel if prepared is None else kernel_of(prepared)
    inputs, bias = workload.at(kernel.prepared)
    nan = float("nan")
    enclosed = LayerInputs(
        _enclosed(inputs.x, nan, ROW_GAP), _enclosed(inputs.ids, 0), _enclosed(inputs.weights, nan),
        _enclosed(inputs.logits, nan),
    )  # fmt: skip
    return replace(_called(kernel, enclosed, bias), skipped=skipped)


def _repeated(ready: RunnableLayer, workload: Workload) -> _CaseRun:
    inputs, bias = workload.at(ready.prepared)
    first = _called(ready.kernel, inputs, bias)
    if first.y is None:
        return first
    reversed_inputs = LayerInputs(
        *(t.flip(0).contiguous() for t in (inputs.x, inputs.ids, inputs.weights, inputs.logits))
    )
    ready.kernel.run(reversed_inputs, bias)
    for _ in range(3):
        repeated = ready.kernel.run(inputs, bias).cpu()
        differing = int((repeated.view(torch.int16) != first.y.view(torch.int16)).any(1).sum())
        if differing:
            reason = f"{differing} of {len(first.y)} tokens had different bits when the call was repeated"
            return replace(first, wrong=(*first.wrong, reason))
    return first


WAYS: Mapping[str, Callable[[RunnableLayer, Workload], _CaseRun]] = {
    "once": _once,
    "share": _share,
    "map": _map,
    "padding": _padding,
    "repeated": _repeated,
}
"""Ways to run a case, by the name in `StressCase.how`."""


def _enclosed(t: Tensor, fill: float, gap: int = 0) -> Tensor:
    """`t` as a view into a larger tensor of `fill`: a row before, one after, `gap` elements between rows."""
    buffer = t.new_full((len(t) + 2, t.shape[1] + gap), fill)
    view = buffer[1 : len(t) + 1, : t.shape[1]]
    view.copy_(t)
    return view


def _called(kernel: FusedMoEKernel, inputs: LayerInputs, bias: Tensor | None) -> _CaseRun:
    """One call in poisoned memory; without a result if shape, dtype or device are wrong."""
    arguments = {"x": inputs.x, "ids": inputs.ids, "weights": inputs.weights, "logits": inputs.logits}
    before = {name: t.clone() for name, t in arguments.items()}
    if inputs.x.is_cuda:
        # The second call reuses the memory that the first one has freed.
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
    """Within the context, uninitialized memory of torch holds NaN, or negative or very large integers.

    On CUDA this covers the caching allocator's free blocks on entry, not memory newly taken from the driver.
    """
    if device.type == "cuda":
        _poison_free_blocks(device)
        yield
        return
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warned)
        settings.fill_uninitialized_memory = filled


def _poison_free_blocks(device: torch.device) -> None:
    """Fills every free block of the caching allocator with bytes 0xFF (NaN in every float type)."""
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
