"""Layers through the triton backend under Triton's interpreter; as a program, every one of `PLAIN`."""

from __future__ import annotations

from dataclasses import replace

from moectl.kernels.external import vllm_triton
from support import peer_cases as cases
from support.random_layers import inputs_of, judged


def computes(name: str, kind: str, tokens: int = 5) -> None:
    """A layer agrees with the reference, with fp16 numbers: the interpreter multiplies no bf16 ones."""
    problem = replace(cases.PLAIN[name], dtype="fp16")
    layer = cases.layer_for(problem)
    prepared = layer.prepared("triton", "cpu")
    inputs = cases.with_ids(inputs_of(problem, tokens), kind, problem.local_experts)
    y = vllm_triton.compute(prepared, inputs.x, inputs.ids, inputs.weights)
    if kind == "none":
        assert not y.any()
        return
    result = judged(layer, prepared, y, inputs)
    assert result.ok and result.rms < (2e-3 if problem.scheme.weight.name == "bf16" else 0.06), result


if __name__ == "__main__":
    for name in cases.PLAIN:
        computes(name, "skipped")
        print(f"{name}: agrees")
