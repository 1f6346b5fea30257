"""Tables of what `one_engine` measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .one_engine import BATCHES

Row = Mapping[str, Any]

EXPERT_KERNELS = re.compile(
    r"moe|expert|marlin|humming|matmul_ogs|routing|topk|bitmatrix|expt_data|swiglu|_reduce_grouped|finalize"
    r"|act_and_mul|silu_mul|token_group_quant|ep_scatter|ep_gather|sm90_fp8_gemm"
    r"|_(gemm|gemm[12]|layer|batch|combine|copy_tokens|count|cut|items|order|place|prefill|route|scatter|schedule"
    r"|list|sort_few|plan|plan_and_order|token_tiles|block_codes|token_codes|tensor_codes|largest)_kernel",
    re.IGNORECASE,
)
"""Names of kernels of routed experts, from the router's choice to the sum of their outputs.

Nothing else in `whole_models` has these names: their other layers are in 16 bits and have no activation.
"""

LOG_FIGURES = {
    "model_s": r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds",
    "compile_s": r"torch\.compile (?:and initial profiling/warmup run together )?took ([\d.]+) s",
    "graphs_s": r"Graph capturing finished in ([\d.]+) secs",
    "init_s": r"init engine .* took ([\d.]+) s",
}
"""Seconds that vLLM's log tells of."""


COMPILED = re.compile(
    r"moectl: \d+ kernels, (\d+) from the cache, (\d+) compiled in ([\d.]+) s(?:, \d+ failed)?"
    r"(?:; (\d+) were compiled by \d+ processes)?"
)
"""What moectl logs once for each different layer and process: `KernelLoad.ready`."""

MONITORED = "Kernel JIT monitor activated"
SERVING = re.compile(r"(\w+) (?:kernel )?JIT compilation during inference: ([^.(]+)")
"""What vLLM logs once for each kernel that is compiled while it serves, from `MONITORED` on."""


def log_figures(log: str) -> dict[str, float]:
    """Seconds and numbers of kernels that a log tells of; those that are not in it are left out.

    `LOG_FIGURES`; ``moectl_compiled``, ``moectl_cached`` and ``moectl_s``, the kernels that moectl had
    compiled, or found compiled, and how long engines waited for them; and ``serving_compiled``, the kernels
    that were compiled after the start, of whatever library.
    """
    matches = {name: re.search(pattern, log) for name, pattern in LOG_FIGURES.items()}
    found = {name: float(match[1]) for name, match in matches.items() if match}
    if lines := COMPILED.findall(log):
        ahead = sum(int(before or 0) for *_, before in lines)
        found["moectl_compiled"] = ahead + sum(int(compiled) for _, compiled, *_ in lines)
        # What a process had compiled ahead, the engine found in the cache.
        found["moectl_cached"] = sum(int(cached) for cached, *_ in lines) - ahead
        found["moectl_s"] = sum(float(seconds) for _, _, seconds, _ in lines)
    if MONITORED in log:
        found["serving_compiled"] = len(set(SERVING.findall(log)))
    return found


def table(names: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table: a column per run, with the ratio to the first in parentheses."""
    lines: list[tuple[str, list[float | None], bool]] = [
        (f"decode, batch {batch} (tokens/s)", [row.get("decode", {}).get(str(batch)) for row in rows], True)
        for batch in BATCHES
    ]
    lines.append(("prefill (tokens/s)", [row.get("prefill") for row in rows], True))
    for batch in BATCHES:
        shares = [experts_share(row, batch) for row in rows]
        lines.append((f"experts in a step of {batch} (%)", shares, False))
    for batch in BATCHES:
        busy = [row.get("busy_us", {}).get(str(batch)) for row in rows]
        lines.append((f"GPU busy in a step of {batch} (us)", busy, True))
    lines.append(("GPU busy in prefill (us)", [row.get("prefill_busy_us") for row in rows], True))
    for label, key in {
        "model loaded (s)": "model_s",
        "of that, experts laid out (s)": "process_s",
        "torch.compile (s)": "compile_s",
        "graphs captured (s)": "graphs_s",
        "moectl's kernels taken or compiled (s)": "moectl_s",
        "engine initialized after loading (s)": "init_s",
        "engine ready, imports not counted (s)": "engine_s",
    }.items():
        lines.append((label, [row.get(key) for row in rows], True))
    for label, key in {
        "moectl's kernels compiled at start": "moectl_compiled",
        "moectl's kernels from the cache": "moectl_cached",
        "kernels compiled while serving": "serving_compiled",
    }.items():
        lines.append((label, [row.get(key) for row in rows], False))
    above = [
        (row["peak_bytes"] - row["weights_bytes"]) / 2**20 if "peak_bytes" in row else None for row in rows
    ]
    lines.append(("peak memory over weights while loading (MiB)", above, False))
    head = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    return "\n".join(head + [_line(label, figures, ratio) for label, figures, ratio in lines])


def _line(label: str, figures: Sequence[float | None], ratio: bool) -> str:
    cells = []
    for number, figure in enumerate(figures):
        text = "" if figure is None else f"{figure:,.4g}" if figure < 1000 else f"{figure:,.0f}"
        first = figures[0]
        if ratio and number and figure is not None and first:
            text += f" ({figure / first:.2f})"
        cells.append(text)
    return f"| {label} | " + " | ".join(cells) + " |"


def experts_share(row: Row, batch: int) -> float | None:
    """Percent of a decoding step's time on the GPU that kernels of routed experts take; None if unknown."""
    kernels: Mapping[str, float] | None = row.get("kernels", {}).get(str(batch))
    if not kernels:
        return None
    experts = sum(time for name, time in kernels.items() if EXPERT_KERNELS.search(name))
    return 100 * experts / sum(kernels.values())


def differences(first: Row, second: Row) -> dict[str, float] | None:
    """How two engines' answers differ: equal greedy tokens, and log-probabilities of equal tokens.

    None if a run was stopped before its answers.

    `greedy` covers continuations up to the first token that differs, `given` texts that both were given.
    """
    if "answers" not in first or "answers" not in second:
        return None
    one, two = first["answers"], second["answers"]
    pairs = [
        list(zip(*lists, strict=True))
        for lists in zip(one["tokens"], two["tokens"], one["logprobs"], two["logprobs"], strict=True)
    ]
    greedy = []
    for steps in pairs:
        for token, other, logprob, others in steps:
            if token != other:
                break
            greedy.append(abs(logprob - others))
    given = [
        abs(a - b) for x, y in zip(one["given"], two["given"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    return {
        "tokens": sum(map(len, pairs)),
        "equal": sum(token == other for steps in pairs for token, other, *_ in steps),
        "greedy_largest": max(greedy, default=0.0),
        "greedy_mean": sum(greedy) / max(1, len(greedy)),
        "given_largest": max(given),
        "given_mean": sum(given) / len(given),
    }
