"""Which experts a transformers release computes with: the quantizer first, then the implementation."""

from __future__ import annotations

from ...backend import SupportQuery, only
from ...policy import Policy, ServeOptions
from ...route import Condition
from .quantizers import routes
from .releases import Release
from .terms import (
    DEQUANTIZE,
    IMPLEMENTATIONS,
    STRICT,
    USE_KERNELS,
    VARIABLES,
    activation,
    dtype,
    routing,
    unknown_model,
)

_ACCEPTED = (
    "auto", *IMPLEMENTATIONS, DEQUANTIZE, USE_KERNELS, *(f"{DEQUANTIZE}+{name}" for name in IMPLEMENTATIONS)
)  # fmt: skip

_DEQUANTIZED = "quantization_config=CONFIG(dequantize=True)"
_SPELLED = {
    USE_KERNELS: "use_kernels=True",
    DEQUANTIZE: _DEQUANTIZED,
    **{
        f"{DEQUANTIZE}+{name}": f'{_DEQUANTIZED}, experts_implementation="{name}"' for name in IMPLEMENTATIONS
    },
}
"""CONFIG is Mxfp4Config, FineGrainedFP8Config or CompressedTensorsConfig."""

_DATA_PARALLEL = Condition(
    "deployment",
    lambda ask: ask.problem.parallel.dp > 1,
    lambda ask: "transformers has no data parallelism over experts",
)


def _unrecorded(ask: SupportQuery) -> str:
    """What of an answer no recorded decision was compared with."""
    parallel, parts = ask.problem.parallel, list[str]()
    if ask.problem.storage == "quark":
        parts.append("what AMD's package quark makes of experts")
    if parallel.ranks > 1 or parallel.pp > 1:
        parts.append("several ranks")
    if ask.problem.lora:
        parts.append("LoRA adapters on experts")
    return ", ".join(parts)


def policy(release: Release) -> Policy:
    """The rules of one release."""
    return Policy(
        name=f"transformers-{release.version}",
        routes=routes(release),
        platforms=frozenset({"cuda", "rocm", "xpu", "cpu"}),
        accepted_names=only(*_ACCEPTED),
        dtype=dtype,
        activation=activation,
        routing=routing,
        exchanges=frozenset({"none"}),
        default_exchange="none",
        serve=ServeOptions(
            command='AutoModelForCausalLM.from_pretrained("{}"',
            backend='experts_implementation="{}"',
            tensor="distributed_config=DistributedConfig(tp_size={})",
            data="data-parallel ranks {}",
            expert="DistributedConfig(ep_size={})",
            exchange="{}",
            dtype='dtype="{}"',
            spelled=_SPELLED,
            separator=", ",
            end=")",
        ),
        unrecorded=_unrecorded,
        variables=VARIABLES,
        refusals=(unknown_model(release), STRICT, _DATA_PARALLEL),
    )
