"""The triton backend: moectl's own kernels on the layout ``moectl-mtile64``.

Several families of kernels, each for other numbers of tokens per expert and other GPUs; `launch_for`
chooses. Grids depend on sizes only, nothing is read back and sums have a fixed order: a call can be
captured in a CUDA graph and gives the same bits every time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ...capabilities.kernel_support import KernelSupport
from ...capabilities.own_kernels import TRITON
from ...environment import Device
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from ..prepared_layer import PreparedMoE
from ..runner import ActivationFormat, Runner
from .expert_batches import compute_batch, layer_one_each, one_each
from .hopper.mid import MID_FAMILY
from .hopper.prefill import PREFILL_FAMILY
from .hopper.stream import STREAM_FAMILY
from .kernel_family import KernelCall, KernelFamily, layer_of, multiprocessors, scale_name
from .launch_table import GpuModel, MeasuredLaunch, TokenSpread, nearest, tuned
from .launches import Launch, launch_for
from .portable import DECODE_FAMILY, GROUPED_FAMILY
from .sort_and_combine import INTERPRETED
from .warpwise import WARPWISE_FAMILY
from .workspace import workspace

LAYOUT = TRITON.weights[0].layout

FAMILIES: dict[str, KernelFamily] = {
    "decode": DECODE_FAMILY,
    "grouped": GROUPED_FAMILY,
    "stream": STREAM_FAMILY,
    "mid": MID_FAMILY,
    "prefill": PREFILL_FAMILY,
    "warpwise": WARPWISE_FAMILY,
}
"""Every family of kernels, by the name that a `Launch` gives."""


def run_with(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, launch: Launch) -> Tensor:
    """`Runner.compute` with a launch of one's own, for tuning and tests; UsageError when it is not legal."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return run_into(y, prepared, x, ids, weights, launch)


def run_into(
    y: Tensor, prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, launch: Launch
) -> Tensor:
    """`run_with` into an output that is there, contiguous and like `x`; the output."""
    kernel_family = _legal(prepared.problem, launch)
    if not len(x):
        return y
    call = KernelCall(aligned(x), ids.contiguous().view(-1), weights.contiguous().view(-1), y)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel_family.run(layer_of(prepared), call, launch.tile)
    return y


def run_batch_with(prepared: PreparedMoE, x: Tensor, counts: Tensor, launch: Launch) -> Tensor:
    """`Runner.batched` with a launch of one's own; UsageError when it is not legal."""
    kernel_family = _legal(one_each(prepared.problem), launch)
    layer = replace(layer_of(prepared), problem=one_each(prepared.problem))
    return compute_batch(aligned(x), counts, lambda call: kernel_family.run(layer, call, launch.tile))


def _legal(problem: MoEProblem, launch: Launch) -> KernelFamily:
    """The family of a launch; UsageError when there is none, or it does not take the problem."""
    kernel_family = FAMILIES.get(launch.family)
    if kernel_family is None:
        raise UsageError(f"no kernels are called {launch.family!r}; choose from {', '.join(FAMILIES)}")
    reason = kernel_family.fits(problem, launch.tile)
    if reason:
        raise UsageError(f"the {launch.family} kernels cannot run {problem.scheme}: {reason}")
    return kernel_family


def aligned(x: Tensor) -> Tensor:
    """`x` without gaps, from an address that 16 bytes divide, as copies into shared memory need."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def launch_on(prepared: PreparedMoE, tokens: int) -> Launch:
    """The launch for `tokens` tokens of a layer where it is; a function of sizes, never of the routing."""
    kept: dict[int, Launch] = prepared.derived.setdefault("launches", {})
    if tokens not in kept:
        kept[tokens] = choose(prepared.problem, tokens, prepared.device)
    return kept[tokens]


def choose(problem: MoEProblem, tokens: int, device: torch.device) -> Launch:
    """The launch that was tuned here for the layer, where there is one; else what ships."""
    if device.type == "cuda" and tokens:
        for row in tuned(problem, tokens, gpu_of(device)):
            launch = launch_of(row.family, row.tile)
            if launch is not None and is_runnable(launch, problem, device):
                return launch
    return choose_shipped(problem, tokens, device)


def choose_shipped(problem: MoEProblem, tokens: int, device: torch.device) -> Launch:
    """The nearest launch that ships and whose kernels exist on `device`; else what is safe everywhere."""
    if device.type == "cuda" and tokens:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        each = TokenSpread.here(problem, tokens).tokens_per_expert
        for row in nearest(problem, tokens, GpuModel(torch.cuda.get_device_capability(device), sms)):
            if not _reaches(row, each):
                continue
            for tile in _rings(FAMILIES[row.family].tile(**row.tile)):
                launch = Launch(row.family, tile)
                if is_runnable(launch, problem, device):
                    return launch
    return launch_for(problem, tokens)


REACH = 2.0
"""How many times the tokens of an expert a row is taken for that it was measured at, and to what share of
the fewest that its family is for. Where nothing nearer runs, an H200 took 0.9 to 1.1 of the portable kernels'
time at twice the tokens of an 8-token kernel's row, 1.1 to 1.2 at four times, 1.4 to 1.8 at eight, 2 to 3 at
more."""


CROWDED = 1.25
"""How many times the tokens that its programs take one of few tokens may meet an expert with: with more,
weights are read again for many of them."""


def _reaches(row: MeasuredLaunch, each: float) -> bool:
    """Whether the row says something of `each` tokens an expert."""
    fewest, most = FAMILIES[row.family].tokens_per_expert
    if math.isinf(most):
        return fewest / REACH <= each
    return fewest / REACH <= each <= min(REACH * row.spread.tokens_per_expert, CROWDED * row.tile["tokens"])


def _rings(tile: Any) -> Iterator[Any]:
    """`tile`, then with an ever shorter ring where it has one: wider codes leave room for fewer stages."""
    yield tile
    for stages in range(getattr(tile, "stages", 0) - 1, 0, -1):
        yield replace(tile, stages=stages)


def launch_of(name: str, tile: Mapping[str, int]) -> Launch | None:
    """The launch of a row; None where this version has no such kernels, or tiles of other fields."""
    family = FAMILIES.get(name)
    if family is None or set(tile) != {field.name for field in fields(family.tile)}:
        return None
    return Launch(name, family.tile(**tile))


def is_runnable(launch: Launch, problem: MoEProblem, device: torch.device) -> bool:
    """Whether its kernels exist for `device` and take `problem` with its tile."""
    kernel_family = FAMILIES[launch.family]
    return kernel_family.runs_on(device) and not kernel_family.fits(problem, launch.tile)


def gpu_of(device: torch.device) -> Device:
    """The GPU as a key of what was measured on it."""
    major, minor = torch.cuda.get_device_capability(device)
    return Device(
        "cuda", f"sm{major}{minor}", torch.cuda.get_device_name(device), sms=multiprocessors(device)
    )


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return run_with(prepared, x, ids, weights, launch_on(prepared, len(x)))


def _batched(prepared: PreparedMoE, x: Tensor, counts: Tensor) -> Tensor:
    # How many rows are tokens is known on the GPU alone: the launch is the one for a full batch.
    rows = x.shape[0] * x.shape[1]
    return run_batch_with(prepared, x, counts, launch_on(layer_one_each(prepared), rows))


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    weight = problem.scheme.weight
    if reason := gpu_refusal(TRITON, device):
        return reason
    if weight.name not in TRITON.names or weight.block[0] != 1:
        return f"it reads {', '.join(TRITON.names)} weights with scales by row, the layer has {weight}"
    if not TRITON.reads(weight):
        return f"it reads scale groups of {TRITON.groups} and scales of whole rows, the layer has {weight}"
    if not scale_name(problem):
        return f"it reads E8M0 and 16-bit scales, the layer has {weight.scale_dtype}"
    return TRITON.activation_refusal(problem.activation)


def gpu_refusal(support: KernelSupport, device: torch.device) -> str:
    """Why moectl's own kernels do not run on `device`, a clause; empty when they do."""
    if device.type == "cpu" and not INTERPRETED:
        return "it needs a CUDA GPU, the weights are on the CPU"
    if device.type == "cuda" and not support.runs_on(torch.cuda.get_device_capability(device)):
        return f"it needs compute capability {support.capability}"
    return ""


def _tactic(prepared: PreparedMoE, tokens: int) -> str:
    return str(launch_on(prepared, tokens))


def _workspace(prepared: PreparedMoE, tokens: int, form: ActivationFormat) -> int:
    if form is ActivationFormat.BATCHED:
        rows = tokens * prepared.problem.local_experts
        return workspace(prepared, tokens, form, launch_on(layer_one_each(prepared), rows))
    return workspace(prepared, tokens, form, launch_on(prepared, tokens))


RUNNER = Runner(
    "triton",
    LAYOUT,
    _compute,
    _refusal,
    ready=layer_of,
    batched=_batched,
    tactic=_tactic,
    masks_padding=True,
    workspace=_workspace,
)
