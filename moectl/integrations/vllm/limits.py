"""What vLLM offers and moectl's experts in it do not, as data: imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from ..limits import Limit as Limit
from ..limits import limits_met, reasons_and_hints

_ROWS = (
    Limit("--enable-eplb", "EPLB", "leave out --enable-eplb"),
    Limit("--enable-elastic-ep", "elastic expert parallelism", "leave out --enable-elastic-ep"),
    Limit("--enable-lora", "LoRA", "leave out --enable-lora, or serve without moectl"),
    Limit(
        "--all2all-backend",
        "batched activations (DeepEP low latency, NIXL) and experts that move between ranks (MoonEP)",
        "use --all2all-backend allgather_reducescatter or deepep_high_throughput",
        values=("deepep_low_latency", "nixl_ep", "moonep", "mori_low_latency"),
    ),
    Limit(
        "--expert-placement-strategy",
        "experts placed otherwise than in consecutive ranges",
        "use --expert-placement-strategy linear",
        only=("linear",),
    ),
    Limit(
        "--load-format",
        "weights that were stored after loading, or that another process holds",
        "use --load-format auto",
        values=("sharded_state", "runai_streamer_sharded", "tensorizer", "ipc_cache"),
    ),
    Limit("--weight-transfer-config", "weights from a trainer", "call reload_weights with a path"),
    Limit("--cpu-offload-gb", "offloading to the CPU", "leave out --cpu-offload-gb", only=("0", "0.0")),
    Limit("--offload-group-size", "offloading to the CPU", "leave out --offload-group-size", only=("0",)),
    Limit("--moe-backend", "a backend that vLLM is told to use", "set MOECTL_BACKEND", only=("auto",)),
)

LIMITS: Mapping[str, Limit] = {row.option: row for row in _ROWS}
"""Refused at start, by option; all reasons at once."""

CALLS: Mapping[str, Limit] = {
    row.option: row
    for row in (
        Limit(
            "LLM.reload_weights(weights_iterator=...)",
            "weights that are handed over in memory",
            "call reload_weights with a path",
        ),
        Limit(
            "LLM.reload_weights(is_checkpoint_format=False)",
            "weights in a kernel's format that are handed over in memory",
            "call reload_weights with a path",
        ),
        Limit("LLM.sleep(level=2)", "sleep that discards weights", "call wake_up, then sleep with level=1"),
    )
}
"""Refused when they are called."""


def refusals(options: Mapping[str, object]) -> tuple[Limit, ...]:
    """The limits that a deployment with `options` meets; options without a limit are ignored.

    Example:
        >>> [limit.why for limit in refusals({"--enable-eplb": True, "--enable-lora": False, "--seed": 7})]
        ['EPLB']
    """
    return limits_met(LIMITS.values(), options)


def sentence(limits: tuple[Limit, ...]) -> tuple[str, str]:
    """One sentence with every reason, and the hint that belongs to it.

    Example:
        >>> sentence(refusals({"--enable-eplb": True, "--enable-lora": True}))[0]
        "moectl's experts in vLLM do not support EPLB, LoRA"
    """
    return reasons_and_hints("vLLM", limits)
