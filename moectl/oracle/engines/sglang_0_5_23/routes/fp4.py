"""MXFP4 experts of gpt-oss and compressed-tensors, and NVFP4 experts of ModelOpt."""

from __future__ import annotations

from ....backend import LOADING, RuntimeFailure, only
from ....gpu_archs import sm
from ....route import Order, Route
from ..runners import aiter, runner
from ..terms import BLACKWELL, SM90, SM100, SM120
from .shared import LATE_FAILURES, RUNNER_NAMES, without_deepep_v2, without_hpc_ops

_MX = "Mxfp4MoEMethod"
_REPACKED = RuntimeFailure(
    lambda ask: ask.device.platform == "cpu",
    "repacks the weights for triton_kernels, but computes with the loaded ones on a CPU",
    "AttributeError",
)
_ON_GPU = RuntimeFailure(
    lambda ask: ask.device.platform == "cpu" and "amx" not in ask.device.features,
    "dequantizes the weights by a kernel of triton_kernels, which needs a GPU",
    "RuntimeError",
    LOADING,
)
_MX_TRITON = runner("triton", _MX, failures=(_ON_GPU,))
MXFP4 = Route(
    name="MXFP4",
    method=_MX,
    storages=only("gpt_oss", "compressed-tensors"),
    weights=frozenset({"mxfp4"}),
    orders=(Order((aiter(_MX), _MX_TRITON)),),
    names={
        **{
            name: (runner(name, _MX),) for name in ("deep_gemm", "aiter", "experimental_sgl_marlin", "marlin")
        },
        "triton": (_MX_TRITON,),
        "triton_kernel": (runner("triton_kernel", _MX, failures=(_REPACKED,)),),
        "flashinfer_mxfp4": (runner("flashinfer_mxfp4", _MX, (SM90, SM100, SM120)),),
    },
    minimum=80,
    refusals=(without_hpc_ops(_MX), without_deepep_v2(_MX)),
    late_failures=LATE_FAILURES,
    fails_by_name="NotImplementedError",
)

_NV = "ModelOptNvFp4FusedMoEMethod"
_NV_ALSO = ("megamoe",)
NVFP4 = Route(
    name="NVFP4 of ModelOpt",
    method=_NV,
    storages=only("modelopt"),
    weights=frozenset({"nvfp4"}),
    orders=(
        Order(
            (
                runner("marlin", _NV, (sm(80, 99),), _NV_ALSO),
                runner("flashinfer_trtllm", _NV, BLACKWELL, _NV_ALSO),
            )
        ),
    ),
    names={
        name: (runner(name, _NV, None if "marlin" in name else BLACKWELL, _NV_ALSO),)
        for name in RUNNER_NAMES
        if name not in ("cutlass",)
    },
    minimum=80,
    refusals=(without_hpc_ops(_NV), without_deepep_v2(_NV)),
    late_failures=LATE_FAILURES,
    fails="ValueError",
    fails_by_name="ValueError",
    fails_unknown="NotImplementedError",
)
