"""transformers' quantizers as routes: what each keeps of a checkpoint's experts, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from ...backend import Backend, SupportQuery, only
from ...checks import judge
from ...route import Condition, LateFailure, Order, Route
from .experts import AS_HELD, NOT_READ, QUANTIZED, Experts, fp8, megablocks, mxfp4
from .releases import Release
from .terms import (
    ACCELERATE,
    COMPRESSED_TENSORS,
    DEQUANTIZE,
    GPTQMODEL,
    GPTQMODEL_FOR_GPTQ,
    NATIVE_FP8,
    OPTIMUM,
    OPTIMUM_FOR_GPTQ,
    QUARK,
    USE_KERNELS,
    asks,
    found,
    gpu,
    has_interface,
    kernels,
    on,
    without,
)

Requests = Mapping[str, tuple[Backend, ...]]
_RAISED = ("KeyError", "ValueError", "ImportError")
_RAISED_FP8 = ("AssertionError", "NotImplementedError", "ImportError", "ValueError")


def _arguments(
    usual: Requests, dequantized: Requests, with_kernels: tuple[Backend, ...] | None = None
) -> Requests:
    """Requests by name: implementations, with and without `dequantize`, and `use_kernels`."""
    default = usual["grouped_mm"]
    names: dict[str, tuple[Backend, ...]] = {**usual, USE_KERNELS: with_kernels or default}
    for implementation, backends in dequantized.items():
        names[f"{DEQUANTIZE}+{implementation}"] = backends
    if dequantized:
        names[DEQUANTIZE] = dequantized["grouped_mm"]
    return names


def _others(requests: Iterable[tuple[Backend, ...]], ranked: tuple[Backend, ...]) -> tuple[Backend, ...]:
    """Backends that only requests select."""
    return tuple(b for b in dict.fromkeys(chain.from_iterable(requests)) if b not in ranked)


def _refusals(release: Release) -> tuple[Condition, ...]:
    """What every model refuses when it is made."""
    need = kernels(release)
    return (
        Condition(
            "experts_implementation",
            lambda ask: asks(ask, "grouped_mm") and not has_interface(ask.problem, release),
            lambda ask: f"experts of {ask.problem.model_type} have one forward: grouped_mm is refused",
        ),
        Condition(
            USE_KERNELS,
            lambda ask: asks(ask, USE_KERNELS) and not need.met(ask.packages),
            lambda ask: f"use_kernels needs {need}; {found(ask, need.package)}",
        ),
    )


def _plain(release: Release, stored: str) -> tuple[Requests, tuple[Backend, ...]]:
    """Implementations for 16-bit weights, and the default one's backends."""
    made = Experts(release, stored).implementations()
    return made, made["grouped_mm"]


def _wide(
    release: Release,
    name: str,
    method: str,
    storages: tuple[str, ...],
    weights: frozenset[str],
    refusals: tuple[Condition, ...] = (),
    late: tuple[LateFailure, ...] = (),
    stored: str = AS_HELD,
) -> Route:
    """A quantizer whose experts are 16-bit in memory."""
    usual, ranked = _plain(release, stored)
    return Route(
        name=name,
        method=method,
        storages=only(*storages),
        weights=weights,
        orders=(Order(ranked),),
        on_request=_others(usual.values(), ranked),
        names=_arguments(usual, usual if stored == QUANTIZED else {}),
        refusals=(*refusals, *_refusals(release)),
        late_failures=late,
        raises=_RAISED,
        fails_unknown="KeyError",
    )


def _mxfp4(release: Release) -> tuple[Route, ...]:
    """gpt-oss: as published where the Hub's kernels can be loaded, else dequantized, with a warning only."""
    native = mxfp4(release)
    usual, ranked = _plain(release, QUANTIZED)

    def kept(ask: SupportQuery) -> bool:
        return any(all(v.holds for v in judge(ask, variant)) for variant in native.variants)

    every = dict.fromkeys(usual, (native,))
    refusals = (without(ACCELERATE, "MXFP4", spared=DEQUANTIZE), *_refusals(release))
    dequantized = Route(
        name="MXFP4 of gpt-oss, dequantized",
        method="Mxfp4HfQuantizer",
        storages=only("gpt_oss"),
        weights=frozenset({"mxfp4"}),
        orders=(Order((native, *ranked)),),
        on_request=_others(usual.values(), ranked),
        names=_arguments(usual, usual, (megablocks(release, True),)),
        refusals=refusals,
        raises=_RAISED,
        fails_unknown="KeyError",
    )
    quantized = replace(
        dequantized,
        name="MXFP4 of gpt-oss",
        when=Condition("kernels", kept, lambda ask: "the Hub's Triton kernels"),
        orders=(Order((native,)),),
        on_request=(),
        names={
            **every,
            "deepgemm_megamoe": (native,),
            **_arguments(every, usual, (megablocks(release, True),)),
        },
    )
    on_xpu = replace(
        quantized,
        name="MXFP4 of gpt-oss on XPU",
        when=Condition("XPU", lambda ask: ask.device.platform == "xpu" and kept(ask), lambda ask: "an XPU"),
        names={**quantized.names, USE_KERNELS: (megablocks(release, False),)},
    )
    need = kernels(release)
    triton = next(need for need in native.variants[1].capability.needs if need.package == "triton")
    on_cpu = replace(
        dequantized,
        name="MXFP4 of gpt-oss on CPU",
        when=Condition(
            "CPU",
            lambda ask: ask.device.platform == "cpu" and need.met(ask.packages) and triton.met(ask.packages),
            lambda ask: "a CPU",
        ),
        names={**dequantized.names, USE_KERNELS: (megablocks(release, False),)},
    )
    return on_xpu, on_cpu, quantized, dequantized


def _fp8(release: Release) -> tuple[Route, ...]:
    """Fine-grained FP8, MXFP8 and DeepSeek-V4's FP4: dequantized where the device has no FP8."""
    native, (usual, ranked) = fp8(release), _plain(release, QUANTIZED)
    refusals = (without(ACCELERATE, "FP8"), *_refusals(release))
    kept = native["grouped_mm"]
    quantized = Route(
        name="FP8",
        method="FineGrainedFP8HfQuantizer",
        storages=only("fp8", "mxfp4"),
        weights=frozenset({"fp8", "mxfp8", "mxfp4"}),
        when=Condition("FP8", lambda ask: on(ask.device, *NATIVE_FP8), lambda ask: "a device with FP8"),
        orders=(Order(kept),),
        on_request=_others(native.values(), kept),
        names=_arguments(native, usual),
        refusals=refusals,
        raises=_RAISED_FP8,
        fails_unknown="KeyError",
    )
    dequantized = replace(
        quantized,
        name="FP8, dequantized",
        when=None,
        orders=(Order((*kept, *ranked)),),
        on_request=_others(usual.values(), ranked),
        names=_arguments(usual, usual),
        raises=_RAISED,
    )
    return quantized, dequantized


_UNREAD = LateFailure(
    "weights",
    lambda ask, chosen: chosen is not None,
    lambda ask, chosen: (
        "transformers does not read the experts: GPTQModel replaces linear layers, and these experts have "
        "none; their weights stay random, and a warning lists them as missing (GPTQModel.load reads them)"
    ),
    kind="",
)
_MISSHAPED = LateFailure(
    "weights",
    lambda ask, chosen: chosen is not None and ask.problem.scheme.weight.name == "nvfp4",
    lambda ask, chosen: (
        "transformers has no quantizer for ModelOpt: it ignores the quantization with a warning, and "
        "packed weights do not have the shape of the model's"
    ),
    kind="RuntimeError",
)
_NO_GLOBAL_SCALES = LateFailure(
    "scales",
    lambda ask, chosen: chosen is not None and ask.problem.scheme.weight.name == "nvfp4",
    lambda ask, chosen: (
        "transformers dequantizes NVFP4 experts without their global scales, which it leaves unread"
    ),
    kind="",
)
_UNSCALED = LateFailure(
    "scales",
    lambda ask, chosen: chosen is not None,
    lambda ask, chosen: (
        "transformers has no quantizer for ModelOpt: it ignores the quantization with a warning, and uses "
        "the weights without their scales"
    ),
    kind="",
)


def _no_gptqmodel() -> Condition:
    return Condition(
        "gptqmodel on a CPU",
        lambda ask: not GPTQMODEL.met(ask.packages) and not gpu(ask.device),
        lambda ask: "GPTQ without GPTQModel needs a GPU",
        kind="RuntimeError",
    )


def routes(release: Release) -> tuple[Route, ...]:
    """Every quantizer of the release that the catalogue's formats need."""
    any_format = frozenset({"nvfp4", "fp8", "mxfp4", "mxfp8", "int4", "int8"})
    return (
        _wide(release, "unquantized", "none", ("plain",), frozenset({"bf16", "fp16"})),
        *_mxfp4(release),
        *_fp8(release),
        _wide(
            release,
            "compressed-tensors",
            "CompressedTensorsHfQuantizer",
            ("compressed-tensors",),
            any_format,
            (without(COMPRESSED_TENSORS, "compressed-tensors"),),
            late=() if release.reads_global_scales else (_NO_GLOBAL_SCALES,),
            stored=QUANTIZED,
        ),
        _wide(
            release,
            "GPTQ",
            "GptqHfQuantizer",
            ("gptq",),
            frozenset({"int4", "int8"}),
            (
                without(OPTIMUM, "GPTQ"),
                _no_gptqmodel(),
                without(GPTQMODEL_FOR_GPTQ, "GPTQ"),
                without(OPTIMUM_FOR_GPTQ, "GPTQ"),
            ),
            (_UNREAD,),
            NOT_READ,
        ),
        _wide(
            release,
            "AWQ",
            "AwqQuantizer",
            ("awq",),
            frozenset({"int4"}),
            (without(GPTQMODEL, "AWQ"), without(ACCELERATE, "AWQ")),
            (_UNREAD,),
            NOT_READ,
        ),
        _wide(
            release,
            "Quark",
            "QuarkHfQuantizer",
            ("quark",),
            any_format,
            (without(QUARK, "Quark"),),
        ),
        _wide(
            release,
            "ModelOpt",
            "none",
            ("modelopt",),
            any_format,
            late=(_MISSHAPED, _UNSCALED),
            stored=NOT_READ,
        ),
    )
