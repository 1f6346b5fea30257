"""MXFP4 through the method of native checkpoints: also DeepSeek-V4, Kimi-K3 and FP8 activations."""

from dataclasses import replace

from ....backend import ANY, Backend, SupportQuery, is_on, only
from ....gpu_archs import gfx
from ....route import Assignment, Condition, Order, Route
from ..backends import aiter, cpu, deep_gemm, emulation, flashinfer, mega_moe, triton, xpu
from ..backends.humming import HUMMING
from ..backends.marlin import BATCHED_MARLIN, MARLIN
from ..variables import VARIABLES
from .mxfp4 import ADAPTER_NAMES, NAMES, ON_REQUEST, TWINS
from .order import CPU, HUMMING_FIRST, ROCM, XPU
from .terms import ROUTES_AS_DEEPSEEK_V4

_MXFP4 = Route(
    name="native MXFP4",
    method="Mxfp4MoEMethod",
    storages=only("mxfp4"),
    weights=frozenset({"mxfp4"}),
    orders=(
        Order((aiter.AITER_BF16, emulation.EMULATION_MX), ROCM),
        Order((xpu.XPU_MXFP4,), XPU),
        Order((cpu.CPU_MXFP4,), CPU),
        Order(
            (flashinfer.TRTLLM_MXFP8, deep_gemm.DEEP_GEMM_MXFP4, MARLIN, BATCHED_MARLIN, HUMMING),
        ),
    ),
    moves=(HUMMING_FIRST,),
    on_request=ON_REQUEST,
    names=NAMES,
    adapter_names=ADAPTER_NAMES,
    batched_twins=TWINS,
    rounds=True,
    minimum=80,
    dtypes=only("bf16"),
)


def _mega(name: str, backend: Backend) -> dict[str, Route]:
    """The request for a model-specific megakernel; weights are not padded for it."""
    route = replace(
        _MXFP4,
        name=f"the model's own experts, {name} asked for",
        method=backend.variants[0].experts,
        orders=(),
        on_request=(),
        names={name: (backend,)},
        rounds=False,
        fails_by_name="NotImplementedError",
    )
    return {name: route}


_DEEPSEEK_V4 = replace(
    _MXFP4,
    name="MXFP4 experts of DeepSeek-V4",
    when=ROUTES_AS_DEEPSEEK_V4,
    orders=(Order((aiter.AITER_BF16, triton.TRITON_UNFUSED), ROCM), *_MXFP4.orders[1:]),
    request_routes={
        **_mega("deep_gemm_mega_moe", mega_moe.DEEP_GEMM_MEGA),
        **_mega("aiter_mega_moe", mega_moe.AITER_MEGA),
    },
    # The quantization config is that of the surrounding FP8 layers.
    minimum=75,
    dtypes=only("bf16", "fp16"),
)

LEAST_SLICE = 256
"""Intermediate size below which Kimi-K3 pads the shards of tensor-parallel ranks."""


def _padded_slice(ask: SupportQuery, asked: tuple[Backend, ...]) -> SupportQuery:
    """`ask` with the intermediate size after the model's own padding."""
    problem = ask.problem
    parallel, inter = problem.parallel, problem.dims.intermediate
    whole = inter * parallel.tp_size
    if parallel.ep or parallel.tp == 1 or whole // parallel.tp >= LEAST_SLICE:
        return ask
    padded = -(-LEAST_SLICE * parallel.tp // parallel.tp_size)
    dims = replace(problem.dims, intermediate=padded, padded_intermediate=padded)
    return replace(ask, problem=replace(problem, dims=dims), sliced=inter)


_SITU = Condition(
    "SiTU experts",
    lambda ask: ask.activation == "situ",
    lambda ask: f"experts have the activation function {ask.activation}",
)
_KIMI_K3 = replace(
    _MXFP4,
    name="MXFP4 experts of Kimi-K3",
    storages=only("compressed-tensors", "mxfp4"),
    when=_SITU,
    fit_shard=_padded_slice,
    request_routes=_mega("deep_gemm_mega_moe", mega_moe.DEEP_GEMM_MEGA),
)


def _aiter_situ(ask: SupportQuery) -> bool:
    return (
        ask.activation == "situ"
        and gfx("gfx950").fits(ask.device)
        and all(
            is_on(ask.packages, VARIABLES[name])
            for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE")
        )
        and ask.packages.has("aiter")
    )


_KIMI_K3_AITER = replace(
    _KIMI_K3,
    name="MXFP4 experts of Kimi-K3 with AITER",
    when=Condition("SiTU experts with AITER", _aiter_situ, _SITU.says),
    orders=(),
    moves=(),
    on_request=(),
    names={},
    request_routes={},
    assigned=(
        Assignment(aiter.AITER_BF16, aiter.AITER_BF16.variants[0], aiter.AITER_BF16.engine_name, ROCM),
    ),
)
_FP8_ACTIVATIONS = Condition(
    "FP8 activations scaled at run time",
    lambda ask: (
        ask.problem.scheme.act.name in ("fp8", "mxfp8")
        and ask.problem.scheme.act.dynamic
        and ask.problem.scheme.act.block[0] == 1
    ),
    lambda ask: f"activations are {ask.problem.scheme.act}",
)
_COMPRESSED_W4A8 = replace(
    _MXFP4,
    name="MXFP4 of compressed-tensors with FP8 activations",
    method="CompressedTensorsW4A8Mxfp4MoEMethod",
    storages=only("compressed-tensors"),
    when=_FP8_ACTIVATIONS,
    minimum=70,
    dtypes=ANY,
)

ROUTES = (_KIMI_K3_AITER, _KIMI_K3, _DEEPSEEK_V4, _MXFP4, _COMPRESSED_W4A8)
