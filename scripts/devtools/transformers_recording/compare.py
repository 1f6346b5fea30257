"""Agreement of the rules of transformers with recorded decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from devtools.conformance import ComparedCell, ConformanceReport, compare_rows
from moectl.checkpoint import Checkpoint, open_checkpoint
from moectl.environment import Packages, find_device
from moectl.oracle import SelectionInputs, decide, engine_named
from moectl.oracle.decision import NAME, Decision
from moectl.oracle.engines.transformers_5.experts import compiles_as_loop, decoding_kernel
from moectl.problem.moe_problem import Parallel

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
LOADED = {
    "modelopt nvfp4": "nvidia/Qwen3-30B-A3B-NVFP4",
    "modelopt nvfp4, hf_quant_config.json alone": "nvidia/Qwen3-30B-A3B-NVFP4",
    "modelopt fp8": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "gptq int4, its tensors alone": "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
    "awq int4, its tensors alone": "TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ",
    "compressed-tensors int4": "RedHatAI/Qwen3-30B-A3B-quantized.w4a16",
    "compressed-tensors fp8": "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "compressed-tensors nvfp4": "RedHatAI/Qwen3-Coder-Next-NVFP4",
    "fp8 fp8": "Qwen/Qwen3-30B-A3B-FP8",
}
"""Checkpoints of the catalogue that are stored as the small ones."""


class Answer(NamedTuple):
    """An outcome: the kernels of prompt and decoding, or the class of the exception before either.

    `quantizer` is empty without one; `kept` says that weights stay quantized in memory.
    """

    prefill: str
    decode: str = ""
    quantizer: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Comparison:
    """One recorded cell beside our answer."""

    row: dict[str, Any]
    recorded: Answer
    answer: Answer

    @property
    def agrees(self) -> bool:
        """True when both are the same."""
        return self.recorded == self.answer

    @property
    def cell(self) -> str:
        """What was asked."""
        arguments = {k: v for k, v in self.row.get("arguments", {}).items() if v not in (None, False)}
        asked = (self.row.get("checkpoint", ""), self.row.get("device", ""), self.row.get("loading", ""))
        return " ".join([*filter(None, asked), str({**arguments, **self.row.get("env", {})})])


@cache
def _checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(name, offline=True)


def _request(arguments: dict[str, Any]) -> str | None:
    """The request with the name that moectl has for the arguments of `from_pretrained`."""
    words = ["dequantize"] if arguments["dequantize"] else []
    words += ["use_kernels"] if arguments["use_kernels"] else []
    words += [arguments["implementation"]] if arguments["implementation"] else []
    return "+".join(words) or None


def decided(row: dict[str, Any], release: str) -> Decision:
    """Our decision for a recorded cell."""
    opened = _checkpoint(row["checkpoint"])
    problem = replace(opened.groups[0].problem, dtype=DTYPES[row["arguments"]["dtype"]])
    packages = Packages(versions=row["packages"], env=row["env"])
    inputs = SelectionInputs(
        problem.on(Parallel(all2all="none")),
        find_device(row["device"]),
        packages,
        engine_named(release).name,
        _request(row["arguments"]),
    )
    return decide(replace(inputs, model=opened.model))


def _failed(decision: Decision) -> str:
    """The class of the exception that our answer says; empty for none."""
    if decision.gates:
        kinds = {"config": "StrictDataclassFieldValidationError", "model": "ValueError", NAME: "ValueError"}
        return kinds.get(decision.gates[0].kind, "gate")
    return "" if decision.chosen is not None else decision.error_kind


def compared(row: dict[str, Any], release: str) -> Comparison:
    """A recorded cell beside our answer."""
    if "loading" in row:
        return _loaded(row, release)
    failed = row.get("error") or row["prefill"].get("error") or row["decode"].get("error")
    decision = decided(row, release)
    ours = _failed(decision)
    if failed or ours:
        return Comparison(row, Answer(failed["kind"] if failed else "works"), Answer(ours or "works"))
    chosen = decision.chosen
    assert chosen is not None
    kernel = chosen.engine_name
    after = decoding_kernel(kernel, decision.inputs.device.platform)
    if row["arguments"]["compile"] and compiles_as_loop(kernel, DTYPES[row["dtype"]]):
        after = "loop" if after == kernel else after
        kernel = "loop"
    quantized = decision.problem.storage in ("gpt_oss", "fp8", "mxfp4") and not chosen.backend.dequantizes
    quantizer = "" if decision.method == "none" else decision.method
    answer = Answer(kernel, after, quantizer, quantized)
    kept = row["experts"] in ("FP8Experts", "Mxfp4GptOssExperts")
    recorded = Answer(row["prefill"]["kernel"], row["decode"]["kernel"], row["quantizer"] or "", kept)
    return Comparison(row, recorded, answer)


def _loaded(row: dict[str, Any], release: str) -> Comparison:
    """What becomes of experts on loading, on a CPU."""
    became = "unread" if row.get("missing") else "unscaled" if _unscaled(row) else "16 bits"
    recorded = Answer(row.get("error") or became)
    name = LOADED[row["loading"]]
    packages = dict.fromkeys(("accelerate", "compressed_tensors", "gptqmodel", "optimum", "triton"), "")
    cell = {
        "checkpoint": name, "device": "cpu", "packages": packages, "env": {},
        "arguments": {"implementation": None, "dequantize": False, "use_kernels": False, "dtype": "bfloat16"},
    }  # fmt: skip
    decision = decided(cell, release)
    assert decision.chosen is not None
    said = decision.error_kind
    if decision.error and not said:
        said = "unread" if decision.chosen.backend.dequantizes and "random" in decision.error else "unscaled"
    if not decision.error:
        said = "16 bits" if decision.chosen.backend.dequantizes else "as stored"
    return Comparison(row, recorded, Answer(said))


def _unscaled(row: dict[str, Any]) -> bool:
    return any("scale" in name and not name.startswith("input_") for name in row.get("unread", ()))


def _cell(row: dict[str, Any], release: str) -> ComparedCell:
    found = compared(row, release)
    axes = [
        ("device", row.get("device", "small checkpoints")),
        ("case", row.get("checkpoint") or row["loading"]),
    ]
    return ComparedCell(found.cell, axes, {"answer": (found.recorded, found.answer)})


def compare_recording(path: Path, release: str) -> ConformanceReport:
    """Agreement of the rules of `release` with a recording, by device and by checkpoint.

    Raises UsageError for a file that is no such recording.
    """
    return compare_rows(
        path, lambda row: "loading" in row or "arguments" in row, lambda row: _cell(row, release)
    )
