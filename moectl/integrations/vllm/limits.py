"""What vLLM offers and moectl's experts in it do not, as data: imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """An option or call of vLLM that moectl's experts do not support.

    Attributes:
        option: as on the command line of ``vllm serve``, or a method of ``vllm.LLM`` with its arguments.
        values: the values that are refused; empty for any that turns the option on.
        why: what is not supported, as it continues "moectl's experts do not support".
        hint: what to do instead.
        only: the values that are allowed, where all others are refused.
    """

    option: str
    why: str
    hint: str
    values: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def refuses(self, value: object) -> bool:
        """Whether `value` of the option is refused: None and False never are.

        Example:
            >>> [LIMITS["--load-format"].refuses(name) for name in ("auto", "tensorizer")]
            [False, True]
        """
        if value is None or value is False:
            return False
        if self.only:
            return str(value) not in self.only
        return not self.values or str(value) in self.values


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
    Limit("--cpu-offload-gb", "offloading to the CPU", "leave out --cpu-offload-gb"),
    Limit("--offload-group-size", "offloading to the CPU", "leave out --offload-group-size"),
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
    )
}
"""Refused when they are called."""


def refusals(options: Mapping[str, object]) -> tuple[Limit, ...]:
    """The limits that a deployment with `options` meets; options without a limit are ignored.

    Example:
        >>> [limit.why for limit in refusals({"--enable-eplb": True, "--enable-lora": False, "--seed": 7})]
        ['EPLB']
    """
    return tuple(
        LIMITS[name] for name, value in options.items() if name in LIMITS and LIMITS[name].refuses(value)
    )


def sentence(limits: tuple[Limit, ...]) -> tuple[str, str]:
    """One sentence with every reason, and the hint that belongs to it.

    Example:
        >>> sentence(refusals({"--enable-eplb": True, "--enable-lora": True}))[0]
        "moectl's experts in vLLM do not support EPLB, LoRA"
    """
    return (
        f"moectl's experts in vLLM do not support {', '.join(dict.fromkeys(limit.why for limit in limits))}",
        "; ".join(dict.fromkeys(limit.hint for limit in limits)),
    )
