"""An engine's own code, asked in another process: its answer compared, and why it gives none."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.environment.python_environments import python_environment
from moectl.errors import Unavailable, UsageError
from moectl.explain import Question, explain
from moectl.explain.engine_answer import ask_engine, complete
from moectl.oracle import engine_named, packages_from
from moectl.oracle.engine import OwnCode
from moectl.oracle.engines.vllm_0_33_0.own_code import ask, question
from oracle.acme_1_0 import ACME
from support.engine_environments import environment

GPT = "openai/gpt-oss-20b"
VLLM = engine_named("vllm")


def explained(name=GPT, gpu="h200", engine=VLLM, **options):
    checkpoint = open_checkpoint(name, offline=True)
    profile = packages_from("full", {}, engine)
    return checkpoint, explain(checkpoint, find_device(gpu), profile, Question(engine.policy, **options))


@pytest.fixture
def asked(tmp_path):
    """Asks an engine whose package has these files; returns its answer."""

    def ask_it(files, engine=VLLM, timeout_s=30.0, name=GPT):
        where = python_environment(environment(tmp_path / "env", files))
        checkpoint, explanation = explained(name, engine=engine)
        return ask_engine(explanation, checkpoint, engine, where, timeout_s)

    return ask_it


def row(group, **changes):
    """What an engine that decides as moectl does would record."""
    decision = group.decision
    chosen, dims = decision.chosen, decision.problem.dims
    return {
        "selected": chosen.engine_name,
        "experts_cls": chosen.variant.experts,
        "monolithic": chosen.variant.monolithic,
        "padded": {"hidden": dims.padded_hidden, "intermediate_per_partition": dims.padded_intermediate},
        "error": None,
        "gates": [],
        "rejected": [],
        "priority": list(decision.order),
        "forced": None,
    } | changes


def answering(tmp_path, reply):
    """vLLM with a script of ours, which writes `reply` after it checked its question."""
    script = tmp_path / "answers.py"
    script.write_text(
        "import json, sys\n"
        "asked = json.load(sys.stdin)\n"
        "assert asked['cells'] and asked['packages'] and asked['bare'] is False\n"
        "print('words that are no answer')\n"
        f"open(asked['out'], 'w').write({json.dumps(reply)!r})\n"
    )
    return replace(VLLM, own_code=OwnCode(script, question))


INSTALLED = {"vllm/__init__.py": "__version__ = '0.33.0'\n", "vllm/_C.abi3.so": ""}


def test_the_same_answer_has_no_differences(asked, tmp_path):
    (group,) = explained()[1].groups
    reply = {"version": "0.33.0", "own_device": True, "rows": [row(group)]}
    answer = asked(INSTALLED, answering(tmp_path, reply))
    assert answer.same and answer.own_device and not answer.bare and answer.title == "vLLM 0.33.0"
    assert answer.groups[0].layers == group.layers and answer.python.endswith("env/bin/python")


def test_each_field_that_differs_is_named(asked, tmp_path):
    (group,) = explained()[1].groups
    refusal = {"backend": "TRITON", "experts_cls": "OAITritonExperts", "reason": "no", "code": "shape"}
    other = {"selected": "MARLIN", "experts_cls": "MarlinExperts", "monolithic": False, "rejected": [refusal]}
    reply = {"version": "0.40.0", "own_device": False, "rows": [row(group, **other)]}
    answer = asked(INSTALLED, answering(tmp_path, reply))
    assert {each.field for each in answer.groups[0].differences} >= {"selected", "experts_cls", "rejected"}
    first = answer.to_json()["groups"][0]["differences"][0]
    assert first == {"field": "selected", "engine": "MARLIN", "moectl": group.decision.chosen.engine_name}


NO_ANSWER = {
    "a package whose modules have moved": (
        INSTALLED,
        "vLLM could not be asked: ModuleNotFoundError: No module named 'vllm.platforms'. Its installation",
    ),
    "an API that has moved": (
        INSTALLED | {"vllm/platforms/__init__.py": "current_platform = None\n"},
        "vLLM could not be asked: ",
    ),
    "a process that prints and ends": (
        INSTALLED
        | {
            "vllm/platforms/__init__.py": "import os, sys\nprint('{' * 9**6, flush=True)\n"
            "print('first\\nlast words', file=sys.stderr, flush=True)\nos._exit(7)\n"
        },
        "bin/python ended with exit code 7: last words",
    ),
    "a process that is killed": (
        INSTALLED | {"vllm/platforms/__init__.py": "import os\nos.kill(os.getpid(), 11)\n"},
        "bin/python was ended by signal 11",
    ),
    "no package": ({}, "vLLM is not installed in "),
}


@pytest.mark.parametrize("case", NO_ANSWER)
def test_no_answer_is_one_sentence(asked, case):
    files, says = NO_ANSWER[case]
    with pytest.raises(Unavailable) as refused:
        asked(files)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_an_engine_that_hangs_is_stopped_with_what_it_started(asked, tmp_path):
    left = tmp_path / "child"
    hangs = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(left)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    with pytest.raises(Unavailable, match="vLLM did not answer within 3 s and was stopped"):
        asked(INSTALLED | {"vllm/platforms/__init__.py": hangs}, timeout_s=3.0)
    assert time.monotonic() - start < 30
    deadline = time.monotonic() + 10
    while running(int(left.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(int(left.read_text()))


def running(process):
    """True unless the process has ended, whether or not somebody has asked for its exit code."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ([1], "gave an answer that is not an object, but a list"),
        ({"version": "1"}, "without a row for each group of layers"),
        ({"rows": []}, "without a row for each group of layers"),
        ({"rows": [{"selected": "TRITON"}]}, "gave an answer without experts_cls"),
        ({"rows": ["TRITON"]}, "gave an answer without a decision"),
        ({"absent": True}, "vLLM cannot be imported by "),
        ({"failed": "TypeError: select() got an unexpected argument"}, "asked: TypeError: select() got an"),
    ],
)
def test_an_answer_of_another_form_is_one_sentence(asked, tmp_path, reply, says):
    with pytest.raises(Unavailable) as refused:
        asked(INSTALLED, answering(tmp_path, reply))
    assert says in str(refused.value)


WRONG_VALUES = (
    {"padded": [1]},
    {"rejected": [3]},
    {"rejected": [{"backend": "TRITON", "experts_cls": None, "code": "shape"}]},
    {"gates": 5},
    {"not_run": "AttributeError: no"},
)


def test_values_of_another_form_are_one_sentence(asked, tmp_path):
    (group,) = explained()[1].groups
    for changes in WRONG_VALUES:
        reply = {"version": "0.40.0", "rows": [row(group, **changes)]}
        with pytest.raises(Unavailable):
            asked_again(asked, tmp_path, reply)


def asked_again(asked, tmp_path, reply):
    """Another question in the same environment."""
    where = tmp_path / "env"
    if where.exists():
        checkpoint, explanation = explained()
        return ask_engine(
            explanation, checkpoint, answering(tmp_path, reply), python_environment(where), 30.0
        )
    return asked(INSTALLED, answering(tmp_path, reply))


def test_garbage_instead_of_json_is_one_sentence(asked, tmp_path):
    script = tmp_path / "garbage.py"
    script.write_text(
        "import json, sys\nopen(json.load(sys.stdin)['out'], 'w').write('Segmentation fault')\n"
    )
    with pytest.raises(Unavailable, match="gave an answer that is no JSON"):
        asked(INSTALLED, replace(VLLM, own_code=OwnCode(script, question)))


def test_an_engine_that_moectl_cannot_ask_is_refused():
    with pytest.raises(UsageError, match="--ask-engine cannot ask Acme, only vLLM"):
        complete(ACME, None)


def test_the_question_is_the_checkpoints_own_config_and_the_whole_layer():
    checkpoint, explanation = explained("nvidia/Qwen3-30B-A3B-NVFP4", "b200")
    group = checkpoint.groups[0]
    asked = question(checkpoint, [(group, explanation.groups[0].decision.inputs)])
    config = asked["grid"]["SCHEMES"]["asked"][0]
    assert config["quant_method"] == "modelopt_fp4" and config["quantization"]["group_size"] == 16
    model = asked["grid"]["MODELS"]["0"]
    assert (model["E"], model["topk"], model["hidden"], model["inter"]) == (128, 8, 2048, 768)
    assert model["prefix"] == "model.layers.0.mlp.experts" and model["activation"] == "silu"
    assert asked["device"]["cc"] == (10, 0) and asked["device"]["name"] == "NVIDIA B200"


@pytest.mark.parametrize(
    ("name", "gpu", "options", "error", "says"),
    [
        (GPT, "tpu", {}, UsageError, "can be asked about cuda, rocm, cpu, xpu, not tpu devices"),
        (
            GPT,
            "h200",
            {"lora": "yes"},
            UsageError,
            "is asked about the checkpoint as its config describes it",
        ),
        ("nvidia/DeepSeek-R1-0528-FP4", "h200", {}, Unavailable, "none is known here"),
        ("moonshotai/Kimi-K3", "h200", {}, Unavailable, "model kimi_k3 chooses quantization methods itself"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(name, gpu, options, error, says):
    checkpoint = open_checkpoint(name, offline=True)
    inputs = Question(VLLM.policy, assumptions=options).inputs(
        checkpoint.groups[0].problem, find_device(gpu), packages_from("none"), checkpoint.model
    )
    with pytest.raises(error, match=says):
        question(checkpoint, [(checkpoint.groups[0], inputs)])


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (("NVIDIA H200", (9, 0)), {"kind": "cuda", "name": "NVIDIA H200", "cc": [9, 0]}, True),
        (("NVIDIA H200", (9, 0)), {"kind": "cuda", "name": "NVIDIA B200", "cc": [10, 0]}, False),
        (("NVIDIA H200", (9, 0)), {"kind": "rocm", "name": "NVIDIA H200"}, False),
        ((None, None), {"kind": "cuda", "name": "NVIDIA H200", "cc": [9, 0]}, False),
    ],
)
def test_a_device_is_its_own_if_name_and_capability_are(monkeypatch, found, wanted, same):
    name, capability = found
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        get_device_name=lambda: name,
        get_device_capability=lambda: capability,
    )
    module = ModuleType("vllm.platforms")
    module.current_platform = platform
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    assert ask.found_itself(wanted) is same


def test_the_script_needs_nothing_of_moectl(tmp_path):
    """It runs in environments without moectl: it imports the standard library and the files beside it."""
    folder = Path(ask.__file__).parent
    for file in folder.glob("*.py"):
        if file.name != "__init__.py":
            assert "from ." not in file.read_text() and "import moectl" not in file.read_text(), file
    assert os.access(folder / "ask.py", os.R_OK)
