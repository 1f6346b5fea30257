"""Recordings of other sizes than those published, made from index formulas: reproduced, and back."""

from __future__ import annotations

import json

import pytest
import torch
from devtools.vectors.compare_vectors import VectorStatus, check_file
from safetensors.torch import save_file

from support import kernel_recorder as recorder

INT8, FP8 = "torch.int8", "torch.float8_e4m3fn"
HALF = torch.float16

CASES = [
    *((recorder.marlin_int, (2, 256, 96), {"group": group}) for group in (32, -1)),
    (recorder.marlin_int, (3, 128, 160), {"zero": True, "dtype": HALF}),
    (recorder.marlin_int, (2, 256, 192), {"group": 64, "zero": True}),
    (recorder.marlin_int, (1, 256, 256), {"bits": 8, "group": 128, "zero": True}),
    (recorder.marlin_int, (2, 128, 96), {"bits": 8, "dtype": HALF}),
    (recorder.marlin_int, (2, 256, 160), {"act": INT8}),
    (recorder.marlin_int, (2, 256, 96), {"act": INT8, "group": -1, "dtype": HALF}),
    (recorder.marlin_int, (2, 128, 96), {"act": INT8, "bits": 8, "zero": True}),
    (recorder.marlin_int, (2, 256, 96), {"act": FP8, "dtype": HALF}),
    (recorder.awq, (2, 256, 96), {"dtype": torch.bfloat16}),
    (recorder.awq, (1, 128, 256), {"group": 64}),
    *((recorder.marlin_fp8, (2, 128, 96), {"mode": mode}) for mode in ("tensor", "tensor2", "channel")),
    (recorder.marlin_fp8, (2, 256, 192), {"mode": "block"}),
    (recorder.marlin_fp8, (1, 256, 128), {"mode": "block", "dtype": HALF}),
    *(
        (recorder.mxfp4, (2, 288, 96), {"backend": backend, "interleaved": interleaved})
        for backend in (
            "FLASHINFER_TRTLLM_MXFP4_MXFP8",
            "FLASHINFER_CUTLASS_MXFP4_BF16",
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        )
        for interleaved in (False, True)
    ),
    *((recorder.nvfp4, (3, 288, 96), {"backend": name}) for name in ("FLASHINFER_TRTLLM", "CUTEDSL")),
    (recorder.nvfp4, (3, 256, 96), {"backend": "FLASHINFER_TRTLLM", "gate": False}),
    *(
        (recorder.nvfp4, (2, 256, 96), {"backend": name, "gate": False, "twice": True})
        for name in ("FLASHINFER_TRTLLM", "VLLM_CUTLASS", "B12X")
    ),
    (recorder.nvfp4, (2, 512, 160), {"backend": "CUTEDSL", "gate": False}),
    *(
        (recorder.nvfp4, (2, 384, 192), {"backend": name})
        for name in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS", "B12X")
    ),
    *(
        (recorder.nvfp4, (2, 256, 96), {"backend": name, "gate": False})
        for name in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS", "B12X")
    ),
    *(
        (recorder.flashinfer_fp8, (2, 160, 72), {"trtllm": trtllm, "gate": gate})
        for trtllm in (True, False)
        for gate in (True, False)
    ),
    *(
        (recorder.flashinfer_fp8, (2, 256, 384), {"mode": "block", "trtllm": trtllm, "gate": gate})
        for trtllm in (True, False)
        for gate in (True, False)
    ),
    *((recorder.flashinfer_fp8, (2, 288, 96), {"mode": "mx", "gate": gate}) for gate in (True, False)),
    *((recorder.bf16, (2, 192, 96), {"gate": gate}) for gate in (True, False)),
]


def spelled(case):
    make, sizes, options = case
    return "-".join([make.__name__, *map(str, sizes), *(f"{k}={v}" for k, v in options.items())])


@pytest.mark.parametrize("case", CASES, ids=spelled)
def test_other_sizes_of_the_same_kinds(case, tmp_path):
    make, sizes, options = case
    generator = torch.Generator().manual_seed(len(spelled(case)))
    function, params, inputs, outputs = make(generator, *sizes, **options)
    tensors = {f"in.{name}": t for name, t in inputs.items()} | {
        f"out.{name}": t for name, t in outputs.items()
    }
    tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    path = tmp_path / "any.safetensors"
    save_file(tensors, path, {"function": function, "params": json.dumps(params)})
    found = check_file(path)
    assert found.status is VectorStatus.PASS, found.reason
