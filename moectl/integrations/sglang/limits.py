"""What SGLang offers and moectl's experts in it do not support, as data: imports nothing of SGLang."""

from __future__ import annotations

from collections.abc import Mapping

from ..limits import Limit, limits_met

_ROWS = (
    Limit("--enable-eplb", "EPLB", "leave out --enable-eplb"),
    Limit("--ep-num-redundant-experts", "EPLB", "leave out --ep-num-redundant-experts", only=("0",)),
    Limit(
        "--init-expert-location",
        "experts placed otherwise than in consecutive ranges",
        "leave out --init-expert-location",
        only=("trivial",),
    ),
    Limit("--elastic-ep-backend", "elastic expert parallelism", "leave out --elastic-ep-backend"),
    Limit("--dwdp-size", "weights that ranks fetch from each other", "leave out --dwdp-size", only=("1",)),
    Limit(
        "--moe-a2a-backend",
        "all-to-all backends (DeepEP, Mooncake, NIXL, FlashInfer and others)",
        "leave out --moe-a2a-backend: tokens are then gathered and sums reduced",
        only=("none",),
    ),
    Limit("--enable-two-batch-overlap", "two-batch overlap", "leave out --enable-two-batch-overlap"),
    Limit("--enable-single-batch-overlap", "single-batch overlap", "leave out --enable-single-batch-overlap"),
    Limit(
        "--moe-runner-backend",
        "a runner of SGLang's own that it is told to use",
        "use --moe-runner-backend auto, and name moectl's backend in MOECTL_BACKEND",
        only=("auto", "moectl"),
    ),
    Limit(
        "--load-format",
        "weights that were stored after loading, or that another process holds",
        "use --load-format auto",
        only=("auto", "safetensors", "fastsafetensors", "instanttensor", "dummy"),
    ),
    Limit("--enable-lora", "LoRA", "leave out --enable-lora, or serve without moectl"),
    Limit("--lora-paths", "LoRA", "leave out --lora-paths, or serve without moectl"),
    Limit("--cpu-offload-gb", "offloading to the CPU", "leave out --cpu-offload-gb", only=("0", "0.0")),
    Limit("--kt-weight-path", "experts that KTransformers computes", "leave out --kt-weight-path"),
    Limit("--enable-paged-experts", "paged experts", "leave out --enable-paged-experts"),
)

LIMITS: Mapping[str, Limit] = {row.option: row for row in _ROWS}
"""Refused at start, by option; all reasons at once."""

MEMORY_SAVER = Limit(
    "--enable-memory-saver",
    "weights that the memory saver discards",
    "use --enable-weights-cpu-backup, which keeps them",
)
"""Refused unless ``--enable-weights-cpu-backup`` is given."""


def refusals(options: Mapping[str, object]) -> tuple[Limit, ...]:
    """The limits that a deployment with `options` meets; options without a limit are ignored.

    Example:
        >>> [limit.why for limit in refusals({"--enable-eplb": True, "--enable-memory-saver": True})]
        ['EPLB', 'weights that the memory saver discards']
    """
    met = limits_met(LIMITS.values(), options)
    saver = MEMORY_SAVER.refuses(options.get(MEMORY_SAVER.option))
    return (*met, MEMORY_SAVER) if saver and not options.get("--enable-weights-cpu-backup") else met
