"""moectl's own policy: the priority order of the backends that it runs."""

from dataclasses import replace

from ....environment import Device
from ....errors import UsageError
from ....problem.moe_problem import MoEProblem, Parallel
from ....problem.number_formats import NUMBER_FORMATS
from ....problem.rank_sizes import as_sliced
from ...backend import ANY, Backend, SupportQuery
from ...decision import Failure
from ...gpu_archs import CPU, OUT_OF_TREE, TPU
from ...policy import Policy, ServeOptions
from ...route import DECLARED_ACT, EngineSubstitute, Order, OrderMove, Route
from .external import HUMMING, HUMMING_GROUPED, MARLIN, TRITON_KERNELS
from .external_flashinfer import (
    FLASHINFER_CUTLASS,
    FLASHINFER_TRTLLM,
    FLASHINFER_TRTLLM_FP8,
    FLASHINFER_TRTLLM_FP8_MONOLITHIC,
    FLASHINFER_TRTLLM_MONOLITHIC,
)
from .external_grouped import BATCHED_DEEP_GEMM, DEEP_GEMM, SONIC_MOE, TORCH_GROUPED
from .external_vllm import VLLM_CUTLASS, VLLM_TRITON
from .own import EMULATION, TORCH, TRITON, TRITON_MARLIN

BACKENDS: tuple[Backend, ...] = (
    *(TRITON, TRITON_MARLIN),
    *(HUMMING, MARLIN, TRITON_KERNELS),
    *(VLLM_CUTLASS, VLLM_TRITON),
    *(DEEP_GEMM, BATCHED_DEEP_GEMM, HUMMING_GROUPED),
    *(FLASHINFER_TRTLLM, FLASHINFER_TRTLLM_MONOLITHIC),
    *(TORCH_GROUPED, SONIC_MOE),
    *(TORCH, EMULATION),
    FLASHINFER_CUTLASS,
)
"""In priority order: own kernels, external kernels, what runs everywhere, what takes long to compile."""

ON_REQUEST: tuple[Backend, ...] = (FLASHINFER_TRTLLM_FP8, FLASHINFER_TRTLLM_FP8_MONOLITHIC)
"""Backends with other activations than the checkpoint declares."""


def _dtype(problem: MoEProblem, device: Device) -> str:
    return problem.dtype


def _activation(problem: MoEProblem) -> str:
    return problem.activation.name


def _routing(problem: MoEProblem) -> str:
    return problem.routing.scoring


def _slice_as_converted(ask: SupportQuery, named: tuple[Backend, ...]) -> SupportQuery | Failure:
    """`ask` with the channels that the first rank holds, by the rule of the conversion; or its refusal."""
    try:
        return replace(ask, problem=as_sliced(ask.problem))
    except UsageError as error:
        return Failure(error.what, "UsageError")


POLICY = Policy(
    name="moectl",
    routes=(
        Route(
            name="every format",
            method="moectl",
            storages=ANY,
            weights=frozenset(NUMBER_FORMATS),
            act=DECLARED_ACT,
            fit_shard=_slice_as_converted,
            rounds=True,
            orders=(Order(BACKENDS),),
            moves=(
                OrderMove(
                    TORCH_GROUPED,
                    (CPU,),
                    after=TORCH,
                    why="plain torch has priority on CPUs, where it is the reference",
                ),
            ),
            on_request=ON_REQUEST,
            covers=ANY,
            substitutes=(
                EngineSubstitute("none", (TPU,), "moectl has no kernel for TPUs", at_once=True),
                EngineSubstitute(
                    "none",
                    (OUT_OF_TREE,),
                    "moectl has no kernel for platforms of engine plug-ins",
                    at_once=True,
                ),
            ),
            names={backend.name: (backend,) for backend in (*BACKENDS, *ON_REQUEST)},
        ),
    ),
    platforms=frozenset({"cuda", "rocm", "xpu", "cpu", "tpu", "out-of-tree"}),
    accepted_names=ANY,
    exchanges=frozenset({Parallel().all2all}),
    default_exchange=Parallel().all2all,
    # Exchanges of the engines that this policy is compared with; no backend here supports them.
    batching_exchanges=frozenset({"deepep_low_latency", "nixl_ep"}),
    serve=ServeOptions(
        command="moectl run {}",
        backend="moectl run CKPT --backend {}",
        tensor="--tensor-parallel-size {}",
        data="--data-parallel-size {}",
        expert="--enable-expert-parallel",
        exchange="--all2all-backend {}",
        dtype="--dtype {}",
    ),
    dtype=_dtype,
    activation=_activation,
    routing=_routing,
    measures=True,
)
