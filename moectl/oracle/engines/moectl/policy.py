"""What moectl itself runs on one machine: its order of backends."""

from ....environment import Device
from ....problem.moe_problem import MoEProblem, Parallel
from ....problem.number_formats import NUMBER_FORMATS
from ...backend import ANY, Backend
from ...gpu_archs import OUT_OF_TREE, TPU
from ...policy import Policy, ServeOptions
from ...route import DECLARED_ACT, EngineSubstitute, Order, Route
from .external import HUMMING, MARLIN, TRITON_KERNELS
from .external_flashinfer import (
    FLASHINFER_CUTLASS,
    FLASHINFER_TRTLLM,
    FLASHINFER_TRTLLM_FP8,
    FLASHINFER_TRTLLM_FP8_MONOLITHIC,
    FLASHINFER_TRTLLM_MONOLITHIC,
)
from .own import EMULATION, TORCH, TRITON, TRITON_MARLIN

BACKENDS: tuple[Backend, ...] = (
    *(TRITON, TRITON_MARLIN),
    *(HUMMING, MARLIN, TRITON_KERNELS),
    *(FLASHINFER_TRTLLM, FLASHINFER_TRTLLM_MONOLITHIC),
    *(TORCH, EMULATION),
    FLASHINFER_CUTLASS,
)
"""In the automatic order: one's own kernels, those of others, what runs everywhere, what compiles long."""

ON_REQUEST: tuple[Backend, ...] = (FLASHINFER_TRTLLM_FP8, FLASHINFER_TRTLLM_FP8_MONOLITHIC)
"""Backends that compute otherwise than the checkpoint declares."""


def _dtype(problem: MoEProblem, device: Device) -> str:
    return problem.dtype


def _activation(problem: MoEProblem) -> str:
    return problem.activation.name


def _routing(problem: MoEProblem) -> str:
    return problem.routing.scoring


POLICY = Policy(
    name="moectl",
    routes=(
        Route(
            name="every format",
            method="moectl",
            storages=ANY,
            weights=frozenset(NUMBER_FORMATS),
            act=DECLARED_ACT,
            rounds=True,
            orders=(Order(BACKENDS),),
            on_request=ON_REQUEST,
            covers=ANY,
            stand_ins=(
                EngineSubstitute("none", (TPU,), "there is no kernel for TPUs here", at_once=True),
                EngineSubstitute(
                    "none",
                    (OUT_OF_TREE,),
                    "there is no kernel here for platforms that an engine knows through a plug-in",
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
    # It is shown beside engines whose exchanges these are, and takes tokens of none of them.
    batching_exchanges=frozenset({"deepep_low_latency", "nixl_ep"}),
    serve=ServeOptions(
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
