"""FP8 experts: blocks, tensors, channels, from FP8, ModelOpt, compressed-tensors and Quark checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

from .....problem.moe_problem import Dims, MoEProblem
from .....problem.schemes import (
    A16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FULL,
    ActFormat,
    WeightFormat,
)
from ....backend import ANY, Backend, SupportQuery, but, only
from ....decision import Candidate, Failure
from ....format_keys import act_key, exact_key
from ....gpu_archs import SM10X, SM90
from ....route import (
    DECLARED_ACT,
    Condition,
    EngineSubstitute,
    Exclusion,
    LateFailure,
    Order,
    OrderMove,
    Route,
)
from ..backends import aiter, cpu, cutlass, deep_gemm, flashinfer, hpc, triton, trtllm_fp8, xpu
from ..backends.humming import HUMMING
from ..backends.marlin import MARLIN
from .order import (
    AITER_DEMANDED,
    CPU,
    DEEP_GEMM_DEMANDED,
    HUMMING_FIRST,
    OUT_OF_TREE,
    TPU,
    XPU,
    without_aiter,
    without_deep_gemm,
)

_BLOCK = "fp8 block 128x128"
_FINEST = 32
"""Edge of the smallest block that scales are re-expanded to."""


def _blocks(weight: WeightFormat) -> bool:
    return FULL not in weight.block


def _fp8_act(problem: MoEProblem, invariant: bool) -> ActFormat:
    """Group-128 activations for weight blocks; per-token instead of per-tensor scales if `invariant`."""
    if _blocks(problem.scheme.weight):
        return FP8_ACT_GROUP_128
    declared = problem.scheme.act
    return FP8_ACT_TOKEN if invariant and declared.dynamic else declared


def _modelopt_act(problem: MoEProblem, invariant: bool) -> ActFormat:
    return FP8_ACT_TENSOR_STATIC


def _per_tensor(weight: WeightFormat) -> str:
    """Scales per channel are requested as one per tensor, too."""
    return exact_key(replace(weight, block=(FULL, FULL)))


def _compressed_act(problem: MoEProblem, invariant: bool) -> ActFormat:
    """Dynamic per-tensor activations are requested as groups of 128, which few kernels support here."""
    declared = problem.scheme.act
    dynamic_tensor = declared.dynamic and declared.block == (FULL, FULL)
    return FP8_ACT_GROUP_128 if _blocks(problem.scheme.weight) or dynamic_tensor else declared


def blocks_alike(weight: WeightFormat) -> str:
    """Blocks of any size are requested as 128x128."""
    return _BLOCK if _blocks(weight) else exact_key(weight)


def _refined(problem: MoEProblem) -> int:
    """The finer block edge that a shard needs; 0 if blocks are aligned with it, or no edge would be."""
    rows, columns = problem.scheme.weight.block
    dims, sliced = problem.dims, problem.parallel.tp_size > 1
    if dims.intermediate % rows == 0 and not (sliced and dims.intermediate % columns):
        return 0
    edge = math.gcd(rows, columns, dims.intermediate, dims.hidden)
    return edge if edge >= _FINEST else 0


def _fit_blocks(ask: SupportQuery, named: tuple[Backend, ...]) -> SupportQuery | Failure:
    """Re-expand the scales of unaligned shards; pad to whole blocks for a request that cannot take those."""
    weight, dims = ask.problem.scheme.weight, ask.problem.dims
    if not _blocks(weight):
        return ask
    edge = _refined(ask.problem)
    finer = replace(ask, weight=exact_key(replace(weight, block=(edge, edge)))) if edge else ask
    rows, columns = weight.block
    if not named or (edge and any(_takes(finer, backend) for backend in named)):
        return finer
    sliced = ask.problem.parallel.tp_size > 1
    if rows != columns or not sliced or dims.intermediate % rows == 0:
        return finer
    whole = dims.intermediate * ask.problem.parallel.tp_size
    if whole % rows or dims.hidden % rows or ask.problem.lora or ask.problem.bias:
        return Failure(
            f"one rank's shard cannot be padded to whole blocks of {rows}: whole sizes must be multiples of "
            f"{rows} (intermediate {whole}, hidden {dims.hidden}), without adapters or expert biases",
            "ValueError",
        )
    padded = Dims(dims.hidden, -(-dims.intermediate // rows) * rows)
    return replace(ask, problem=replace(ask.problem, dims=padded), sliced=dims.intermediate)


def _takes(ask: SupportQuery, backend: Backend) -> bool:
    """True when some experts class of `backend` supports the number formats."""
    return any(
        variant.capability.formats is None
        or any(
            offer.supports(ask.weight, act_key(FP8_ACT_GROUP_128), ask.device)
            for offer in variant.capability.formats
        )
        for variant in backend.variants
    )


def _cut_block(ask: SupportQuery, chosen: Candidate | None) -> bool:
    weight, parallel = ask.problem.scheme.weight, ask.problem.parallel
    if not _blocks(weight) or ask.weight not in (_BLOCK, exact_key(weight)):
        return False
    rows, columns = weight.block
    size = ask.problem.dims.intermediate
    return bool(size % rows or (parallel.tp > 1 and size % columns))


_CUTS_BLOCKS = LateFailure(
    "weight blocks",
    _cut_block,
    lambda ask, chosen: (
        f"intermediate {ask.problem.dims.intermediate} per rank is not aligned with blocks of "
        f"{ask.problem.scheme.weight}"
    ),
    kind="ValueError",
    sized=True,
)

_CUTLASS_PAIR = (cutlass.CUTLASS_FP8, cutlass.BATCHED_CUTLASS_FP8)
_DEEP_GEMM_PAIR = (deep_gemm.DEEP_GEMM_FP8, deep_gemm.BATCHED_DEEP_GEMM)


def _hopper_blocks(ask: SupportQuery) -> bool:
    return ask.weight == _BLOCK and act_key(ask.declared) == act_key(FP8_ACT_GROUP_128)


_NAMES: dict[str, tuple[Backend, ...]] = {
    "triton": (triton.TRITON_PLAIN,),
    "deep_gemm": (deep_gemm.DEEP_GEMM_FP8,),
    "cutlass": (cutlass.CUTLASS_FP8,),
    "flashinfer_trtllm": (trtllm_fp8.TRTLLM_FP8,),
    "flashinfer_cutlass": (flashinfer.CUTLASS_FP8,),
    "marlin": (MARLIN,),
    "humming": (HUMMING,),
    "aiter": (aiter.AITER_W8A8,),
    "hpc": (hpc.HPC,),
}
_SHARED_EXCLUSIONS = (*without_deep_gemm(*_DEEP_GEMM_PAIR), without_aiter(aiter.AITER_W8A8))

_COMPRESSED_FP8 = Route(
    name="FP8 of compressed-tensors",
    method="CompressedTensorsW8A8Fp8MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"fp8"}),
    act=DECLARED_ACT,
    declares=_compressed_act,
    key=blocks_alike,
    orders=(
        Order(
            (
                aiter.AITER_W8A8,
                trtllm_fp8.TRTLLM_FP8,
                flashinfer.CUTLASS_FP8,
                deep_gemm.DEEP_GEMM_FP8,
                cutlass.CUTLASS_FP8,
                triton.TRITON_PLAIN,
                MARLIN,
                HUMMING,
                deep_gemm.BATCHED_DEEP_GEMM,
                cutlass.BATCHED_CUTLASS_FP8,
                triton.BATCHED_TRITON,
                xpu.XPU_FP8,
                cpu.CPU_W8A8,
                cpu.CPU_FP8,
                hpc.HPC,
            )
        ),
    ),
    moves=(
        HUMMING_FIRST,
        OrderMove(
            trtllm_fp8.TRTLLM_FP8,
            (SM10X,),
            first=True,
            when=lambda ask: ask.exchange == "deepep_v2" and _hopper_blocks(ask),
            why="TRT-LLM has the highest priority with DeepEP v2, as it skips the padding between experts",
        ),
        OrderMove(
            flashinfer.CUTLASS_FP8,
            (SM90,),
            first=True,
            when=lambda ask: ask.problem.parallel.ep_size > 1 and _hopper_blocks(ask),
            why="FlashInfer's CUTLASS has the highest priority for blocks on SM90 with expert parallelism",
        ),
        OrderMove(
            triton.TRITON_PLAIN,
            (SM90,),
            first=True,
            when=lambda ask: ask.problem.parallel.ep_size == 1 and _hopper_blocks(ask),
            why="Triton has the highest priority for blocks on SM90 without expert parallelism",
        ),
        OrderMove(
            xpu.XPU_FP8, XPU, first=True, why="the platform's own kernels have the highest priority on XPU"
        ),
        OrderMove(
            cpu.CPU_FP8, CPU, first=True, why="the platform's own kernels have the highest priority on CPUs"
        ),
        OrderMove(
            cpu.CPU_W8A8, CPU, first=True, why="FP8 activations have priority over 16-bit ones on CPUs"
        ),
    ),
    exclusions=_SHARED_EXCLUSIONS,
    switch_requests=(DEEP_GEMM_DEMANDED, AITER_DEMANDED),
    names=_NAMES,
    batched_twins=(
        (triton.TRITON_PLAIN, triton.BATCHED_TRITON),
        (deep_gemm.DEEP_GEMM_FP8, deep_gemm.BATCHED_DEEP_GEMM),
        (cutlass.CUTLASS_FP8, cutlass.BATCHED_CUTLASS_FP8),
    ),
    covers=ANY,
    minimum=70,
    late_failures=(_CUTS_BLOCKS,),
    substitutes=(
        EngineSubstitute(
            "NONE",
            (*CPU, *XPU, *TPU, *OUT_OF_TREE),
            "no kernel supports this deployment; vLLM continues without one until the weights are loaded",
        ),
    ),
)

_PAIRS = frozenset({("per tensor", "per tensor"), ("per channel", "per token")})


def _pair(ask: SupportQuery) -> tuple[str, str]:
    """Granularity of the scales of weights and activations."""
    weight, act = ask.problem.scheme.weight, act_key(ask.problem.scheme.act)
    return exact_key(weight).removeprefix("fp8 "), act.removeprefix("fp8 ").rpartition(" ")[0]


def _says_pair(ask: SupportQuery) -> str:
    return f"{ask.problem.scheme} is not a combination of scales that the method supports"


def _quantizes(act: ActFormat) -> bool:
    """True for FP8 activations, static ones per tensor only."""
    return act.name == "fp8" and (act.dynamic or act.block == (FULL, FULL))


_COMPRESSED_REFUSES = (
    Condition(
        "activations",
        lambda ask: (
            ask.problem.scheme.act == A16 and exact_key(ask.problem.scheme.weight) == "fp8 per channel"
        ),
        lambda ask: "compressed-tensors' weights per channel with 16-bit activations must be packed integers",
    ),
    Condition(
        "activations",
        lambda ask: not _quantizes(ask.problem.scheme.act),
        lambda ask: f"the engine has no method for {ask.problem.scheme} of compressed-tensors",
        kind="RuntimeError",
    ),
    Condition(
        "scales",
        lambda ask: not _blocks(ask.problem.scheme.weight) and _pair(ask) not in _PAIRS,
        _says_pair,
        kind="AssertionError",
    ),
)
_QUARK_REFUSES = Condition(
    "scales",
    lambda ask: _pair(ask) not in {*_PAIRS, ("block 128x128", "group 128")},
    _says_pair,
)

_FP8 = replace(
    _COMPRESSED_FP8,
    name="FP8",
    method="Fp8MoEMethod",
    storages=only("fp8"),
    key=exact_key,
    declares=_fp8_act,
    exclusions=(
        Exclusion(_CUTLASS_PAIR, "never used by this method", by_name=True),
        *_SHARED_EXCLUSIONS,
    ),
    fit_shard=_fit_blocks,
    minimum=75,
    dtypes=only("bf16", "fp16"),
)
_MODELOPT_FP8 = replace(
    _FP8,
    name="FP8 of ModelOpt",
    method="ModelOptFp8MoEMethod",
    storages=only("modelopt"),
    key=_per_tensor,
    declares=_modelopt_act,
    fit_shard=None,
    minimum=80,
    late_failures=(),
)
_MODELOPT_BLOCKS = replace(
    _FP8,
    name="FP8 blocks of ModelOpt",
    storages=only("modelopt"),
    when=Condition(
        "scales per block",
        lambda ask: _blocks(ask.problem.scheme.weight),
        lambda ask: f"the weights are {ask.problem.scheme.weight}",
    ),
)
_QUARK_FP8 = replace(
    _FP8,
    name="FP8 of Quark",
    method="QuarkW8A8Fp8MoEMethod",
    storages=only("quark"),
    declares=None,
    fit_shard=None,
    platforms=but("xpu"),
    refusals=(_QUARK_REFUSES,),
    minimum=70,
    dtypes=ANY,
)

ROUTES = (
    _FP8,
    _MODELOPT_BLOCKS,
    _MODELOPT_FP8,
    replace(_COMPRESSED_FP8, refusals=_COMPRESSED_REFUSES),
    _QUARK_FP8,
)
