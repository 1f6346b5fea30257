"""Greedy tokens of a whole model in SGLang's real engine on a CPU, as one JSON object.

usage: sglang_generate.py MODEL OPTIONS

OPTIONS is a JSON object of arguments of ``sglang.Engine``. `scores` are the tokens' log-probabilities.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPT = [1, 5, 9, 77, 300, 42, 8, 19, 250, 401]
DEFAULTS = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "context_length": 256,
    "max_running_requests": 4,
    "max_total_tokens": 1024,
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "attention_backend": "torch_native",
    "log_level": "warning",
}


def main() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang

    model, options = sys.argv[1:]
    given = {**DEFAULTS, **json.loads(options)}
    # SGLang wants a memory node for each rank, or to be told each rank's cores.
    cores = sorted(os.sched_getaffinity(0))
    ranks = (str(cores[rank % len(cores)]) for rank in range(given.get("tp_size", 1)))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(ranks)
    engine = sglang.Engine(model_path=model, **given)
    asked = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    answer = engine.generate(input_ids=PROMPT, sampling_params=asked, return_logprob=True)
    scores = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
    told: dict[str, Any] = {"tokens": answer["output_ids"], "scores": scores}
    if given.get("quantization") == "moectl":
        told["update"] = engine.update_weights_from_disk(model)[:2]
        again = engine.generate(input_ids=PROMPT, sampling_params=asked)
        told["again"] = again["output_ids"]
    print(json.dumps(told), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
