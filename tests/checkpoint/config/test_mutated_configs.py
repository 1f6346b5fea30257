"""Configs with anything in any place: an answer or an error that is explained, never another exception."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.checkpoint import TensorInfo, layer_groups
from moectl.checkpoint.config.fields import KEYS
from moectl.checkpoint.config.moe_layers import LAYER_RULES
from moectl.checkpoint.source.catalogue import read_entry
from moectl.checkpoint.source.open_checkpoint import QUANTIZATION_FILES
from moectl.dtypes import DTYPE_BITS
from moectl.errors import MoectlError
from moectl.files.tensor_table import table_of
from moectl.problem.moe_problem import MoEProblem

MODELS = (
    "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V4-Flash",
    "moonshotai/Kimi-K3",
    "databricks/dbrx-instruct",
    "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "amd/DeepSeek-V4-Pro-MXFP4",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ",
    "QuantTrio/Qwen3.6-35B-A3B-AWQ",
    "RedHatAI/Qwen3-Coder-Next-NVFP4",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "baidu/ERNIE-4.5-21B-A3B-PT",
)
WORDS = ("", "silu", "fp8", "re:(", "*", "layers.0.", "²", "-1", "E" * 9, "MIXED_PRECISION", "NVFP4", "dense")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([10**30, 2**63, -(10**9)]),
    st.floats(allow_nan=True),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*WORDS, "weights", "targets", "quant_algo"]), inner, max_size=3),
    ),
    max_leaves=6,
)
FOREIGN = sorted({*LAYER_RULES, *(key for keys in KEYS.values() for key in keys if "." not in key)})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a document; of long lists and objects only the first few."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for count, (key, inner) in enumerate(items):
        if count < 60:
            found += places(inner, (*path, key))
    return found


def put(document: Any, path: tuple[Any, ...], value: Any, drop: bool) -> None:
    """Changes one place of a document, or drops it; nothing where an earlier change took the place away."""
    try:
        for key in path[:-1]:
            document = document[key]
        if drop and isinstance(document, dict):
            document.pop(path[-1], None)
        else:
            document[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        return


@cache
def listing_of(model: str) -> dict[str, TensorInfo]:
    """The tensors of the model's first MoE layer."""
    entry = read_entry(model)
    return replace(entry, layers=entry.layers[:1]).listing()


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_change_of_a_config(model: str, data: st.DataObject) -> None:
    entry = read_entry(model)
    documents = {"config.json": entry.config, **entry.documents}
    changed: dict[str, Any] = copy.deepcopy(documents)
    everywhere = [(file, *path) for file, document in documents.items() for path in places(document)]
    inner = next((key for key in ("text_config",) if key in entry.config), None)
    foreign = [("config.json", *((inner,) if inner else ()), key) for key in FOREIGN]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(everywhere) | st.sampled_from(foreign))
        put(changed, path, data.draw(VALUES), data.draw(st.booleans()))
    file = next((name for name in QUANTIZATION_FILES if name in changed), "")
    beside = changed.get(file)
    quantization = {"quant_method": QUANTIZATION_FILES[file], **beside} if isinstance(beside, dict) else None
    for tensors in (None, listing_of(model)) if data.draw(st.booleans()) else (None,):
        try:
            groups = layer_groups(
                changed["config.json"], tensors, quantization=quantization, quantization_file=file
            )
        except MoectlError as error:
            assert str(error)
            continue
        assert groups
        for group in groups:
            assert isinstance(group.problem, MoEProblem)
            assert group.problem.top_k <= group.problem.experts
            assert group.layers
            assert group.problem.expert_bytes() > 0


FEW_EXPERTS = (
    "openai/gpt-oss-20b",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ",
    "nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "databricks/dbrx-instruct",
    "google/gemma-4-26B-A4B",
)
SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 16, 32, 64, 128, 2816, 4096, 5120, 14336, 1 << 20])
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
PARTS = (".experts.", ".0.", ".gate_proj", ".w1", ".weight", "_scale", "layers", ".gate", "router", ".mlp")


@pytest.mark.parametrize("model", FEW_EXPERTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_change_of_headers(model: str, data: st.DataObject) -> None:
    """Tensors of other dtypes, shapes and names, or missing ones: likewise."""
    tensors = dict(listing_of(model))
    names = sorted(tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        info = tensors.pop(name, None)
        if info is None or (data.draw(st.booleans()) and len(tensors) < 3):
            continue
        change = data.draw(st.sampled_from(("dtype", "shape", "name", "gone")))
        if change == "dtype":
            info = replace(info, dtype=data.draw(st.sampled_from(sorted(DTYPE_BITS))))
        elif change == "shape":
            info = replace(info, shape=data.draw(SHAPES))
        elif change == "name":
            old, new = data.draw(st.sampled_from(PARTS)), data.draw(st.sampled_from((*PARTS, ".", "x")))
            info = replace(info, name=name.replace(old, new))
        if change != "gone":
            tensors[info.name] = info
    for named in (tensors, table_of(tensors.values())):
        try:
            groups = layer_groups(read_entry(model).config, named)
        except MoectlError as error:
            assert str(error)
            continue
        for group in groups:
            assert group.problem.expert_bytes() > 0
            assert group.names.experts
