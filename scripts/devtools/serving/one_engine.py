"""One vLLM engine in one process: what it took to start, how fast it is, what it answers.

`python -m devtools.serving.one_engine CHECKPOINT ARGUMENTS OUT` writes a JSON object; ARGUMENTS are keyword
arguments of vLLM's `LLM` as JSON. The object is written again after every measurement, so that a run that is
stopped leaves what it has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moectl.files.atomic import replace_file
from moectl.files.strict_json import json_bytes

STARTED = time.perf_counter()

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

BATCHES = 1, 16, 64, 256
"""Sequences that are decoded at once."""

CONTEXT = 4096
PROMPT = 16
"""Tokens of each prompt whose continuation is timed."""

FEW, MANY = 8, 136
"""Lengths of continuations; their difference in time is that of the steps between them."""

SCORED, ANSWER = 8, 64
"""Prompts, and tokens of each, whose log-probabilities are recorded."""

PREFILL = 8, 2048
"""Prompts and their length for the rate of prefill."""

PREFILLS = 8
"""Times that they are read; the fastest counts, as the host may take a fifth longer."""

PROFILED = 12
"""Decoding steps in a profile."""


def measure(checkpoint: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Starts an engine on `checkpoint` and measures it; yields the row of `report.table` as it grows."""
    import torch
    import vllm  # noqa: F401  # its import is not counted

    alone = arguments.get("tensor_parallel_size", 1) == 1
    row: dict[str, Any] = {"imported_s": time.perf_counter() - STARTED, "torch": torch.__version__}
    if alone:
        _time_loading(row)
    begin = time.perf_counter()
    llm = started(checkpoint, arguments)
    row["engine_s"] = time.perf_counter() - begin
    row["experts"] = llm.apply_model(expert_classes)[0]
    yield row
    engine = Engine(llm)
    row["decode"] = {}
    for batch in BATCHES:
        row["decode"][str(batch)] = engine.decode_rate(batch)
        yield row
    row["prefill"] = engine.prefill_rate()
    row["answers"] = engine.answers()
    yield row
    if alone:
        row["prefill_busy_us"] = engine.prefill_busy()
    row["kernels"], row["busy_us"] = {}, {}
    for batch in BATCHES if alone else ():
        row["kernels"][str(batch)], row["busy_us"][str(batch)] = engine.kernel_times(batch)
    yield row


def started(checkpoint: str, arguments: dict[str, Any]) -> Any:
    """vLLM's `LLM` on `checkpoint`; `arguments` come before what all measurements have in common."""
    from vllm import LLM

    return LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        seed=0,
        **{
            "dtype": "bfloat16",
            "max_num_seqs": max(BATCHES),
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.8,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]},
            **arguments,
        },
    )


def _time_loading(row: dict[str, Any]) -> None:
    """Has vLLM's loader record its seconds and memory in `row`."""
    import torch
    import vllm.model_executor.model_loader.base_loader as base

    load, process = base.BaseModelLoader.load_model, base.process_weights_after_loading

    def timed_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model = load(self, *args, **kwargs)
        torch.cuda.synchronize()
        row["load_s"] = time.perf_counter() - begin
        row["weights_bytes"] = torch.cuda.memory_allocated()
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        return model

    def timed_process(*args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        process(*args, **kwargs)
        torch.cuda.synchronize()
        row["process_s"] = time.perf_counter() - begin

    base.BaseModelLoader.load_model = timed_load
    base.process_weights_after_loading = timed_process


def _spans(events: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Start and end of each event of a profile."""
    return ((event.time_range.start, event.time_range.end) for event in events)


def expert_classes(model: Any) -> list[str]:
    """Classes that compute the model's routed experts; runs in the engine's workers."""
    layers = (module for module in model.modules() if type(module).__name__.endswith("RoutedExperts"))
    names = {
        f"{type(layer.quant_method).__name__}:{type(layer.quant_method.moe_kernel.fused_experts).__name__}"
        for layer in layers
    }
    return sorted(names)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans from start to end cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Engine:
    """A started engine with the same sequence of random prompts in every process."""

    def __init__(self, llm: Any) -> None:
        import torch

        self._llm = llm
        self._generator = torch.Generator().manual_seed(1)
        self._vocabulary = llm.llm_engine.model_config.get_vocab_size() - 8

    def answers(self) -> dict[str, Any]:
        """Greedy continuations with log-probabilities, and log-probabilities of given texts."""
        prompts = self._prompts(SCORED, PROMPT)
        greedy = self._run(prompts, ANSWER, logprobs=0)
        texts = self._prompts(SCORED, ANSWER + 1)
        given = self._run(texts, 1, prompt_logprobs=0)
        return {
            "tokens": [list(out.outputs[0].token_ids) for out in greedy],
            "logprobs": [
                [step[token].logprob for step, token in zip(out.outputs[0].logprobs, ids, strict=True)]
                for out in greedy
                for ids in [out.outputs[0].token_ids]
            ],
            "given": [
                [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
                for out, text in zip(given, texts, strict=True)
                for ids in [text["prompt_token_ids"]]
            ],
        }

    def answers_again(self) -> dict[str, Any]:
        """`answers` to the prompts that a new engine's first call would get, whatever was asked before."""
        self._generator.manual_seed(1)
        return self.answers()

    def decode_rate(self, batch: int) -> float:
        """Tokens a second while `batch` sequences are decoded, without their prefill."""
        prompts = self._prompts(batch, PROMPT)
        self._run(prompts, FEW)
        few, many = (
            min(self._seconds(partial(self._run, prompts, length)) for _ in range(2))
            for length in (FEW, MANY)
        )
        return batch * (MANY - FEW) / (many - few)

    def prefill_rate(self) -> float:
        """Tokens a second of prompts that are read."""
        count, length = PREFILL
        prompts = self._prompts(count, length)
        self._run(prompts, 1)
        return count * length / min(self._seconds(partial(self._run, prompts, 1)) for _ in range(PREFILLS))

    def prefill_busy(self) -> float:
        """Microseconds in which the GPU ran any kernel while the prompts of `prefill_rate` were read."""
        prompts = self._prompts(*PREFILL)
        self._run(prompts, 1)
        return covered(_spans(self._profiled(prompts, 1)))

    def kernel_times(self, batch: int) -> tuple[dict[str, float], float]:
        """Microseconds on the GPU per decoding step of `batch` sequences: of each kernel, longest first, and
        those in which any ran. Kernels that overlap count whole in the former."""
        prompts = self._prompts(batch, PROMPT)
        totals: list[Counter[str]] = []
        busy: list[float] = []
        for length in (FEW, FEW + PROFILED):
            events = self._profiled(prompts, length)
            total: Counter[str] = Counter()
            for event in events:
                total[event.name] += event.time_range.elapsed_us()
            totals.append(total)
            busy.append(covered(_spans(events)))
        steps = totals[1] - totals[0]
        each = {name: time / PROFILED for name, time in steps.most_common(60)}
        return each, (busy[1] - busy[0]) / PROFILED

    def _profiled(self, prompts: list[dict[str, list[int]]], length: int) -> list[Any]:
        """What the GPU did while continuations of `length` tokens were generated."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self._run(prompts, length)
        return [event for event in profiled.events() if event.device_type.name == "CUDA"]

    def _prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        import torch

        ids = torch.randint(0, self._vocabulary, (count, length), generator=self._generator)
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    def _run(self, prompts: Sequence[Any], tokens: int, **options: int) -> Any:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )
        return self._llm.generate(prompts, parameters, use_tqdm=False)

    @staticmethod
    def _seconds(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    out = Path(sys.argv[3])
    for result in measure(sys.argv[1], json.loads(sys.argv[2])):
        replace_file(out, json_bytes(result))
