"""What this tool itself runs on one machine."""

from ...environment import Device
from ...problem import MoEProblem, Parallel
from ..archs import OUT_OF_TREE, TPU
from ..backend import ANY, Backend
from ..backends.native import TORCH, TRITON, TRITON_MARLIN
from ..backends.native_emulation import EMULATION
from ..backends.peer_flashinfer_cutlass import PEER_FLASHINFER_CUTLASS
from ..backends.peer_flashinfer_trtllm import (
    PEER_TRTLLM,
    PEER_TRTLLM_FP8,
    PEER_TRTLLM_FP8_MONOLITHIC,
    PEER_TRTLLM_MONOLITHIC,
)
from ..backends.peer_humming import PEER_HUMMING
from ..backends.peer_marlin import PEER_MARLIN
from ..backends.peer_triton_kernels import PEER_TRITON_KERNELS
from ..policy import Policy
from ..route import DECLARED_ACT, Order, Route, StandIn

BACKENDS: tuple[Backend, ...] = (
    *(TRITON, TRITON_MARLIN),
    *(PEER_HUMMING, PEER_MARLIN, PEER_TRITON_KERNELS),
    *(PEER_TRTLLM, PEER_TRTLLM_MONOLITHIC),
    *(TORCH, EMULATION),
    PEER_FLASHINFER_CUTLASS,
)
"""In the automatic order: one's own kernels, those of others, what runs everywhere, what compiles long."""

ON_REQUEST: tuple[Backend, ...] = (PEER_TRTLLM_FP8, PEER_TRTLLM_FP8_MONOLITHIC)
"""Backends that compute otherwise than the checkpoint declares."""


def _dtype(problem: MoEProblem, device: Device) -> str:
    return problem.dtype


def _activation(problem: MoEProblem) -> str:
    return problem.activation.name


def _routing(problem: MoEProblem) -> str:
    return problem.routing.scoring


MOECTL = Policy(
    name="moectl",
    routes=(
        Route(
            name="every format",
            method="moectl",
            storages=ANY,
            weights=frozenset({"bf16", "fp8", "mxfp8", "nvfp4", "mxfp4", "int8", "int4"}),
            act=DECLARED_ACT,
            rounds=True,
            orders=(Order(BACKENDS),),
            on_request=ON_REQUEST,
            covers=ANY,
            stand_ins=(
                StandIn("none", (TPU,), "there is no kernel for TPUs here", at_once=True),
                StandIn(
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
    dtype=_dtype,
    activation=_activation,
    routing=_routing,
    measures=True,
)
