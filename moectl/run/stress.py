"""A layer's kernel on inputs that are easy to get wrong, each held to the reference.

Memory that a call allocates holds NaN before it; what it is given must be the same after it.
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
from .backend_failures import guarded, lost
from .layer_variants import every_second, poisoned_padding, rank_share
from .one_layer import CheckedLayer
from .stress_cases import CASES, StressCase, StressInputs
from .workload import Workload, expected_of

RANKS = 2
"""Ranks that the layer is shared by in the case of a rank's share; the last one is run."""

APART = 64
"""Elements of NaN between two rows of poisoned tokens."""

SMALL_BLOCK = 1 << 20
"""Bytes up to which CUDA's caching allocator serves a request from its small blocks."""


@dataclass(frozen=True)
class PlannedCase:
    """A case with its inputs and the reference's answer, made once for all backends of a layer.

    Attributes:
        beside: why it cannot be asked of this layer; empty when it can.
    """

    case: StressCase
    workload: Workload
    expected: Tensor
    beside: str = ""


@dataclass(frozen=True)
class CaseResult:
    """What came of one case on one backend.

    Attributes:
        ok: None where it could not be asked, or the backend refused such a layer; `note` says why.
        note: what failed, in sentences; or what was left out.
        check: against the reference; None where there was no result.
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
        """Whether it was asked and answered wrong."""
        return self.ok is False


@dataclass
class _Findings:
    """What a way of running gathers: the result that is checked, what is wrong with it, what was left out."""

    y: Tensor | None = None
    wrong: tuple[str, ...] = ()
    left: str = ""


def plan_stress(
    layer: ExpertLayer, device: torch.device, *, seed: int = 0, cases: Sequence[StressCase] = CASES
) -> tuple[PlannedCase, ...]:
    """`cases` for `layer` with the reference's answers; every expert is decoded once for all, on `device`."""
    router = layer.router
    bias = no_bias(layer.problem)
    if router is not None and router.correction_bias is not None:
        bias = router.correction_bias.float()
    made = [case.make(StressInputs(layer.problem, bias, seed + i)) for i, case in enumerate(cases)]
    asked = [_seen(layer, case, it) for case, it in zip(cases, made, strict=True)]
    columns = ((it.x, it.ids, it.weights, it.logits) for it in asked)
    whole = LayerInputs(*(torch.cat(tensors) for tensors in zip(*columns, strict=True)))
    answers = torch.split(expected_of(layer, whole, device), [len(it.x) for it in asked])
    return tuple(
        PlannedCase(case, it, answer, _beside(layer, case, answer))
        for case, it, answer in zip(cases, made, answers, strict=True)
    )


def _seen(layer: ExpertLayer, case: StressCase, workload: Workload) -> LayerInputs:
    """The inputs with the ids that the case's kernel computes."""
    inputs = workload.inputs
    if case.how not in SHARES or _no_share(layer):
        return inputs
    here = SHARES[case.how](layer)[inputs.ids.clamp(min=0).long()] & (inputs.ids >= 0)
    return replace(inputs, ids=torch.where(here, inputs.ids, -1))


def _last_ranks(layer: ExpertLayer) -> Tensor:
    first = layer.problem.experts - rank_share(layer, RANKS, RANKS - 1).problem.local_experts
    return torch.arange(layer.problem.experts) >= first


def _mapped(layer: ExpertLayer) -> Tensor:
    return every_second(layer)[1] >= 0


SHARES: Mapping[str, Callable[[ExpertLayer], Tensor]] = {"share": _last_ranks, "map": _mapped}
"""Ways to run a case with a part of the experts: ``[experts]`` bool, true for those that there are."""


def _no_share(layer: ExpertLayer) -> str:
    if layer.share is not None and layer.partial:
        return "the layer is one rank's share itself, in every case"
    return f"there are {layer.problem.experts} experts" if layer.problem.experts < RANKS else ""


def _beside(layer: ExpertLayer, case: StressCase, answer: Tensor) -> str:
    """Why a case cannot be asked of `layer`."""
    if case.how in SHARES:
        return _no_share(layer)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[layer.problem.dtype]
    if answer.numel() and float(answer.abs().max()) > torch.finfo(dtype).max:
        return f"its results are larger than {layer.problem.dtype} holds"
    return ""


def stress(
    held: CheckedLayer, cases: Sequence[PlannedCase], device: torch.device, progress: Callable[[str], None]
) -> Iterator[CaseResult]:
    """The result of each case on a held layer; none raises, and after a lost device each says so."""
    gone = ""
    for planned in cases:
        progress(planned.case.name)
        if gone:
            yield _result(held, planned, False, f"not run, {gone}")
            continue
        found = _one(held, planned)
        if found.failed:
            gone = lost(device)
        yield found


def _one(held: CheckedLayer, planned: PlannedCase) -> CaseResult:
    case, kernel = planned.case, held.kernel
    if planned.beside:
        return _result(held, planned, None, planned.beside)
    if case.by_ids and kernel.monolithic:
        return _result(held, planned, None, "it routes by itself: no logits lead to these ids")
    try:
        with guarded(kernel.runner.name, held.layer.layer):
            found = WAYS[case.how](held, planned.workload)
    except BackendFailed as error:
        return _result(held, planned, False, error.why)
    except NoBackend as error:
        return _result(held, planned, None, f"refused: {error}")
    except MoectlError as error:
        return _result(held, planned, False, str(error))
    if found.y is None:
        return _result(held, planned, False, "; ".join(found.wrong))
    result = check(found.y, planned.expected, tolerance_for(held.layer.problem, kernel.runner.accumulation))
    wrong = found.wrong if result.ok else (_far(found.y, planned.expected, result), *found.wrong)
    return _result(held, planned, not wrong, "; ".join(wrong) or found.left, result)


def _result(
    held: CheckedLayer, planned: PlannedCase, ok: bool | None, note: str, check: CheckResult | None = None
) -> CaseResult:
    case = planned.case
    name = held.kernel.runner.name
    return CaseResult(name, case.name, case.about, planned.workload.tokens, ok, note, check)


def _far(y: Tensor, expected: Tensor, result: CheckResult) -> str:
    """What is wrong with a result, in a sentence."""
    broken = torch.nonzero((~torch.isfinite(y)).any(1)).flatten().tolist()
    if broken:
        return f"{len(broken)} of {len(y)} tokens are not finite, the first is token {broken[0]}"
    limit = result.tolerance
    size = float(expected.double().norm())
    token = f"worst token {result.worst_token}"
    if size == 0.0:
        return f"zeros were expected, got up to {float(y.abs().max()):.3g}; {token}"
    return f"RMS {result.rms:.3g} (at most {limit.rms:g}), max {result.max:.3g} ({limit.max:g}); {token}"


# How a case is run.


def _once(held: CheckedLayer, workload: Workload) -> _Findings:
    return _called(held.kernel, *workload.at(held.prepared))


def _share(held: CheckedLayer, workload: Workload) -> _Findings:
    mine = rank_share(held.layer, RANKS, RANKS - 1)
    kernel = kernel_of(mine.prepared(held.prepared.backend, held.prepared.device))
    return _called(kernel, *workload.at(kernel.prepared))


def _map(held: CheckedLayer, workload: Workload) -> _Findings:
    mine, table = every_second(held.layer)
    prepared = mine.prepared(held.prepared.backend, held.prepared.device)
    runner = held.kernel.runner
    kernel = FusedMoEKernel(prepared, runner, runner.forms[0], expert_map=table.to(prepared.device))
    # Ids stay the layer's: the kernel maps them.
    return _called(kernel, *workload.at(held.prepared))


def _padding(held: CheckedLayer, workload: Workload) -> _Findings:
    kernel, left = held.kernel, ""
    if kernel.runner.layout_of(held.layer.problem) is not None and not kernel.runner.masks_padding:
        left = "the weights' padding stayed zeros, which the backend counts on"
    elif kernel.runner.masks_padding:
        prepared = poisoned_padding(held.layer, held.prepared.backend, held.prepared.device)
        left = "" if prepared is not None else "the weights have no padding"
        kernel = kernel if prepared is None else kernel_of(prepared)
    inputs, bias = workload.at(kernel.prepared)
    nan = float("nan")
    around = LayerInputs(
        _within(inputs.x, nan, APART), _within(inputs.ids, 0), _within(inputs.weights, nan),
        _within(inputs.logits, nan),
    )  # fmt: skip
    return replace(_called(kernel, around, bias), left=left)


def _repeated(held: CheckedLayer, workload: Workload) -> _Findings:
    inputs, bias = workload.at(held.prepared)
    first = _called(held.kernel, inputs, bias)
    if first.y is None:
        return first
    other = LayerInputs(
        *(t.flip(0).contiguous() for t in (inputs.x, inputs.ids, inputs.weights, inputs.logits))
    )
    held.kernel.run(other, bias)
    for _ in range(3):
        again = held.kernel.run(inputs, bias).cpu()
        differing = int((again.view(torch.int16) != first.y.view(torch.int16)).any(1).sum())
        if differing:
            told = f"{differing} of {len(first.y)} tokens had other bits when the call was made again"
            return replace(first, wrong=(*first.wrong, told))
    return first


WAYS: Mapping[str, Callable[[CheckedLayer, Workload], _Findings]] = {
    "once": _once,
    "share": _share,
    "map": _map,
    "padding": _padding,
    "repeated": _repeated,
}
"""How cases are run, by name."""


def _within(t: Tensor, fill: float, apart: int = 0) -> Tensor:
    """`t` as a view into a larger tensor of `fill`: a row before, one after, and `apart` between its rows."""
    whole = t.new_full((len(t) + 2, t.shape[1] + apart), fill)
    view = whole[1 : len(t) + 1, : t.shape[1]]
    view.copy_(t)
    return view


def _called(kernel: FusedMoEKernel, inputs: LayerInputs, bias: Tensor | None) -> _Findings:
    """One call in poisoned memory; a result of another form is no result."""
    given = {"x": inputs.x, "ids": inputs.ids, "weights": inputs.weights, "logits": inputs.logits}
    before = {name: t.clone() for name, t in given.items()}
    if inputs.x.is_cuda:
        # The first call leaves the memory that the second is given.
        kernel.run(inputs, bias)
    with poisoned_memory(inputs.x.device):
        y = kernel.run(inputs, bias)
    wrong = [
        f"it wrote into {name}, which it was given"
        for name, t in given.items()
        if not torch.equal(t, before[name])
    ]
    x = inputs.x
    if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        form = f"{y.dtype} {list(y.shape)} on {y.device}"
        return _Findings(None, (f"expected {x.dtype} {list(x.shape)} on {x.device}, got {form}", *wrong))
    return _Findings(y.cpu(), tuple(wrong))


@contextmanager
def poisoned_memory(device: torch.device) -> Iterator[None]:
    """In here memory that torch has not initialized holds NaN, and negative or very large integers.

    On CUDA what the caching allocator has free at the start; memory that it asks the driver for is as it is.
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
    """Take every free block of the caching allocator, fill it with ones (which are NaN), give it back."""
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
    held = [
        torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF)
        for size in sorted(sizes, reverse=True)
        if size
    ]
    del held
