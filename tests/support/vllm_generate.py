"""Greedy tokens of a whole model in vLLM's real engine on a CPU, as one JSON object.

usage: vllm_generate.py MODEL OPTIONS [STEP ...]

OPTIONS is a JSON object of arguments of ``vllm.LLM``. Steps after the first generation: ``reload`` calls
``reload_weights``; ``reload=PATH`` calls it with a path and tells what came of it, and the tokens after it;
``hand-over`` calls it with weights in memory; ``sleep`` asks for sleep that discards weights; ``methods``
names the experts' classes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

PROMPT = [1, 5, 9, 77, 300, 42, 8, 19, 250, 401]


def methods(model: Any) -> list[str]:
    layers = (module for module in model.modules() if type(module).__name__.endswith("RoutedExperts"))
    return sorted(
        {
            f"{type(method).__name__}: {type(method.moe_kernel.fused_experts).__name__}"
            for method in (layer.quant_method for layer in layers)
        }
    )


def handed_over(worker: Any) -> str:
    try:
        worker.reload_weights(weights_iterator=iter(()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def reloaded(worker: Any, path: str) -> str:
    try:
        worker.reload_weights(weights_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def discarded(worker: Any) -> str:
    """As a worker on a GPU sleeps: one on a CPU ignores the call."""
    from vllm.v1.worker.gpu_worker import Worker

    try:
        Worker.sleep(worker.worker, level=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "asleep"


def main() -> None:
    from vllm import LLM, SamplingParams

    model, options, *steps = sys.argv[1:]
    defaults = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4}
    engine = LLM(model=model, **{"enforce_eager": True, **defaults, **json.loads(options)})

    def generated() -> list[int]:
        asked = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)
        out = engine.generate({"prompt_token_ids": PROMPT}, asked, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)

    told: dict[str, Any] = {"tokens": generated()}
    for step in steps:
        if step == "methods":
            told[step] = engine.apply_model(methods)[0]
        elif step == "reload":
            engine.collective_rpc("reload_weights")
            told[step] = generated()
        elif step.startswith("reload="):
            told["reload="] = [engine.collective_rpc(reloaded, args=(step[7:],))[0], generated()]
        elif step == "hand-over":
            told[step] = engine.collective_rpc(handed_over)[0]
        elif step == "sleep":
            told[step] = engine.collective_rpc(discarded)[0]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
