"""Every spelling of a dtype against the libraries that have it."""

import json

import pytest
import safetensors.torch
import torch

from moectl.dtypes import (
    CONFIG_DTYPES,
    DTYPE_BITS,
    DTYPES,
    MODEL_DTYPES,
    SHORT_NAMES,
    WIDE_CONFIG_DTYPES,
)
from moectl.torch_dtypes import MODEL_TORCH_DTYPES, TORCH_DTYPES


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_safetensors_writes_torch_tensors_under_these_names(name: str) -> None:
    tensor = torch.zeros(4, dtype=torch.uint8).repeat(8).view(TORCH_DTYPES[name])
    data = safetensors.torch.save({"t": tensor})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["t"]["dtype"] == name
    assert tensor.element_size() * 8 == DTYPE_BITS[name]


def test_torch_names_are_unique() -> None:
    assert len(set(TORCH_DTYPES.values())) == len(TORCH_DTYPES)


@pytest.mark.parametrize("name", [name for name in DTYPES if name[0] in "IU" and name[1:].isdigit()])
def test_integer_names_say_their_bits(name: str) -> None:
    assert DTYPE_BITS[name] == int(name[1:])


def test_model_dtypes_are_spelled_alike_everywhere() -> None:
    assert MODEL_DTYPES == {"bf16": "BF16", "fp16": "F16"}
    assert SHORT_NAMES == {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    assert {"bf16": torch.bfloat16, "fp16": torch.float16} == MODEL_TORCH_DTYPES
    assert {name: TORCH_DTYPES[MODEL_DTYPES[short]] for name, short in CONFIG_DTYPES.items()} == {
        "bfloat16": torch.bfloat16,
        "torch.bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "torch.float16": torch.float16,
    }
    assert WIDE_CONFIG_DTYPES == ("float32", "torch.float32")
