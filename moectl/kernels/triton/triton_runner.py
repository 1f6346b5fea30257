"""The triton backend: moectl's own kernels on the layouts of `own_kernels.TRITON`.

Several kernel families, each for a range of tokens per expert and some GPUs; `choose` selects one. Grids
depend on sizes only, nothing is copied from the GPU and sums have a fixed order: a call can be captured in a
CUDA graph and is bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...capabilities.kernel_support import KernelSupport
from ...capabilities.own_kernels import TRITON, in_rows, token_format
from ...environment import Device
from ...environment.named_devices import bandwidth_by_torch, published_bandwidth
from ...errors import UsageError
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import A16
from ..choice.launch import Launch
from ..choice.launch_model import USUAL_BANDWIDTH, GpuRates, predicted_us
from ..choice.launch_plan import Plan, launch_for, planned
from ..choice.launch_table import MeasuredLaunch, near, tuned
from ..choice.tile_family import launch_of as launch_named
from ..choice.tile_family import scale_name
from ..prepared_layer import PreparedMoE
from ..runner import ActivationFormat, Runner, check_dtype
from ..tolerance import DECLARED
from .expert_batches import CHOSEN_FOR, compute_batch, layer_one_each, one_each
from .hopper.mid import MID_FAMILY
from .hopper.prefill import PREFILL_FAMILY
from .hopper.stream import STREAM_FAMILY
from .hopper.tma import TMA_FAMILY
from .kernel_family import (
    KernelCall,
    KernelFamily,
    accept_scales,
    exponents_accepted,
    layer_of,
    multiprocessors,
    remember_exponents,
)
from .portable import DECODE_FAMILY, GROUPED_FAMILY
from .sort_and_combine import INTERPRETED
from .warpwise import WARPWISE_FAMILY
from .workspace import BY_ROWS, workspace

CHOICES = "choices of launches"
"""Key in `PreparedMoE.derived`."""

FAMILIES: dict[str, KernelFamily] = {
    "decode": DECODE_FAMILY,
    "grouped": GROUPED_FAMILY,
    "stream": STREAM_FAMILY,
    "mid": MID_FAMILY,
    "prefill": PREFILL_FAMILY,
    "tma": TMA_FAMILY,
    "warpwise": WARPWISE_FAMILY,
}
"""Every kernel family, by `Launch.family`."""


def run_with(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, launch: Launch) -> Tensor:
    """`Runner.compute` with a given launch, for tuning and tests; UsageError if it is not legal."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return run_into(y, prepared, x, ids, weights, launch)


def run_into(
    y: Tensor, prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, launch: Launch
) -> Tensor:
    """`run_with` into an existing contiguous output `y` with the shape and dtype of `x`; returns `y`."""
    kernel_family = _legal(prepared.problem, launch)
    check_dtype(prepared.problem, x)
    if not len(x):
        return y
    # Code for tensors that are not aligned would be another binary to compile.
    out = y if y.data_ptr() % 16 == 0 else torch.empty_like(y)
    call = KernelCall(aligned(x), aligned(ids).view(-1), aligned(weights).view(-1), out)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel_family.run(layer_of(prepared), call, launch.tile)
    return y if out is y else y.copy_(out)


def run_batch_with(prepared: PreparedMoE, x: Tensor, counts: Tensor, launch: Launch) -> Tensor:
    """`Runner.batched` with a given launch; UsageError if it is not legal."""
    kernel_family = _legal(one_each(prepared.problem), launch)
    check_dtype(prepared.problem, x)
    layer = replace(layer_of(prepared), problem=one_each(prepared.problem))
    return compute_batch(aligned(x), counts, lambda call: kernel_family.run(layer, call, launch.tile))


def _legal(problem: MoEProblem, launch: Launch) -> KernelFamily:
    """The kernel family of a launch; UsageError if it is unknown or does not support the problem."""
    kernel_family = FAMILIES.get(launch.family)
    if kernel_family is None:
        raise UsageError(f"unknown kernel family {launch.family!r}; choose from {', '.join(FAMILIES)}")
    reason = kernel_family.fits(problem, launch.tile)
    if reason:
        raise UsageError(f"the {launch.family} kernels do not support {problem.scheme}: {reason}")
    return kernel_family


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous and aligned to 16 bytes, as copies into shared memory require."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def launch_on(prepared: PreparedMoE, tokens: int) -> Launch:
    """The launch for `tokens` tokens of a layer on its device; never depends on the routing."""
    launches: dict[int, Launch] = prepared.derived.setdefault("launches", {})
    if tokens not in launches:
        launches[tokens] = _choices_of(prepared).launch(tokens)
    return launches[tokens]


def batch_launch(prepared: PreparedMoE, most: int, expected: int | None = None) -> Launch:
    """The launch for batches with `most` rows for each expert, of which about `expected` are tokens.

    Only the GPU knows the counts: without `expected` it is that of a full batch.
    """
    layer, experts = layer_one_each(prepared), prepared.problem.local_experts
    rows = experts * most if expected is None else experts * max(expected, 1)
    while rows < experts * most:
        launch = launch_on(layer, rows)
        if launch.family not in BY_ROWS:
            return launch
        rows *= 2
    return launch_on(layer, experts * most)


def _choices_of(prepared: PreparedMoE) -> LaunchChoices:
    """Kept by a layer without weights, which is asked for all numbers of tokens in a row; any other one heeds
    what is tuned meanwhile."""
    device = prepared.derived.get(CHOSEN_FOR)
    if device is None:
        return LaunchChoices.of(prepared.problem, prepared.device)
    if CHOICES not in prepared.derived:
        prepared.derived[CHOICES] = LaunchChoices.of(prepared.problem, device)
    choices: LaunchChoices = prepared.derived[CHOICES]
    return choices


class LaunchChoices(NamedTuple):
    """What launches of a layer are chosen by: what does not depend on the number of tokens, looked up once.

    Attributes:
        tuned: what `moectl tune` measured on this machine; it comes first.
        plan: the launches that ship, None where the model of time does not know the format, or on a CPU.
    """

    problem: MoEProblem
    device: torch.device
    tuned: tuple[MeasuredLaunch, ...]
    plan: Plan | None

    @staticmethod
    def of(problem: MoEProblem, device: torch.device) -> LaunchChoices:
        """Those of a layer on a device."""
        rows = tuned(problem, gpu_of(device)) if device.type == "cuda" else ()
        return LaunchChoices(problem, device, rows, _plan_of(problem, device))

    def launch(self, tokens: int) -> Launch:
        """The launch for `tokens` tokens."""
        for row in near(self.tuned, tokens) if tokens else ():
            launch = launch_of(row.family, row.tile)
            if launch is not None and is_runnable(launch, self.problem, self.device):
                return launch
        if tokens and self.plan is not None:
            return self.plan.launch(tokens)
        return launch_for(self.problem, tokens)


def choose(problem: MoEProblem, tokens: int, device: torch.device) -> Launch:
    """The launch that `moectl tune` measured for the layer on this machine, if any, else `choose_shipped`."""
    return LaunchChoices.of(problem, device).launch(tokens)


def choose_shipped(problem: MoEProblem, tokens: int, device: torch.device) -> Launch:
    """A launch that does not depend on measurements of this machine.

    That of the layer's plan: by the model of time, and by the shipped ones that were measured for this layer.
    """
    return LaunchChoices(problem, device, (), _plan_of(problem, device)).launch(tokens)


def _plan_of(problem: MoEProblem, device: torch.device) -> Plan | None:
    if device.type != "cuda":
        return None
    return planned(problem, _rates_of(device), torch.cuda.get_device_capability(device))


def predicted_for(problem: MoEProblem, tokens: int, launch: Launch, device: torch.device) -> float | None:
    """Microseconds of a launch by the model of time; None if it does not know the format, or on a CPU."""
    if device.type != "cuda" or not tokens:
        return None
    shape = FAMILIES[launch.family].shape(problem, launch.tile)
    return predicted_us(problem, tokens, launch.family, shape, _rates_of(device))


def _rates_of(device: torch.device) -> GpuRates:
    about = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    return GpuRates.of_gpu(about.name, about.multi_processor_count, bandwidth_of(about), capability)


def bandwidth_of(about: Any) -> float:
    """Published bytes per second of a GPU's memory, by its name, else from its clock and width."""
    return published_bandwidth(about.name) or bandwidth_by_torch(about) or USUAL_BANDWIDTH


def launch_of(name: str, tile: Mapping[str, int]) -> Launch | None:
    """The launch of a row; None if this version has no such kernel family, or its tile has other fields."""
    return launch_named(FAMILIES, name, tile)


def is_runnable(launch: Launch, problem: MoEProblem, device: torch.device) -> bool:
    """Whether the launch supports `device` and `problem`."""
    kernel_family = FAMILIES[launch.family]
    return kernel_family.runs_on(device) and not kernel_family.fits(problem, launch.tile)


def gpu_of(device: torch.device) -> Device:
    """The GPU as the key of measurements in the cache."""
    major, minor = torch.cuda.get_device_capability(device)
    return Device(
        "cuda", f"sm{major}{minor}", torch.cuda.get_device_name(device), sms=multiprocessors(device)
    )


def _compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return run_with(prepared, x, ids, weights, launch_on(prepared, len(x)))


def _compute_into(y: Tensor, prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return run_into(y, prepared, x, ids, weights, launch_on(prepared, len(x)))


def _batched(prepared: PreparedMoE, x: Tensor, counts: Tensor, expected: int | None = None) -> Tensor:
    return run_batch_with(prepared, x, counts, batch_launch(prepared, x.shape[1], expected))


def _refusal(problem: MoEProblem, device: torch.device) -> str:
    weight = problem.scheme.weight
    if reason := gpu_refusal(TRITON, device):
        return reason
    row = TRITON.row_for(problem.scheme) or TRITON.row(weight.name)
    if row is None:
        return f"it supports {', '.join(TRITON.names)} weights; the layer has {weight}"
    if not TRITON.reads(weight):
        if not weight.number.grid.integer:
            return f"it supports {', '.join(map(str, row.formats))}; the layer has {weight}"
        return f"it supports scale groups of {TRITON.groups} and scales of whole rows; the layer has {weight}"
    if TRITON.act_of(problem.scheme) is None:
        acts = ", ".join(dict.fromkeys("16-bit" if act == A16 else str(act) for act in row.acts))
        return f"with {weight.name} weights it takes {acts} activations; the layer has {problem.scheme.act}"
    if not row.own_scales and not in_rows(problem) and not scale_name(problem):
        return f"it supports E8M0 and 16-bit scales; the layer has {weight.scale_dtype}"
    return TRITON.activation_refusal(problem.activation)


def gpu_refusal(support: KernelSupport, device: torch.device) -> str:
    """Why moectl's own kernels do not run on `device`, as a clause; empty if they do."""
    if device.type == "cpu" and not INTERPRETED:
        return "it needs a CUDA GPU; the weights are on the CPU"
    if device.type == "cuda" and not support.runs_on(torch.cuda.get_device_capability(device)):
        return f"it needs compute capability {support.capability}"
    return ""


def _tactic(prepared: PreparedMoE, tokens: int) -> str:
    return str(launch_on(prepared, tokens))


def _predicted_us(prepared: PreparedMoE, tokens: int) -> float | None:
    return predicted_for(prepared.problem, tokens, launch_on(prepared, tokens), prepared.device)


def _workspace(prepared: PreparedMoE, tokens: int, form: ActivationFormat) -> int:
    if form is ActivationFormat.BATCHED:
        return workspace(prepared, tokens, form, batch_launch(prepared, tokens))
    return workspace(prepared, tokens, form, launch_on(prepared, tokens))


def _layout(problem: MoEProblem) -> str:
    return TRITON.layout_of(problem.scheme)


def _accumulation(problem: MoEProblem) -> str:
    """Kernels that quantize tokens to the declared format are judged as such."""
    return DECLARED if token_format(problem) else "fp32"


RUNNER = Runner(
    "moectl",
    _layout,
    _compute,
    _refusal,
    accumulation=_accumulation,
    ready=layer_of,
    batched=_batched,
    tactic=_tactic,
    predicted_us=_predicted_us,
    masks_padding=True,
    workspace=_workspace,
    refit=accept_scales,
    refit_exponents=exponents_accepted,
    refit_found=remember_exponents,
    refit_codes=("mxfp8",),
    into=_compute_into,
)
