"""The kernels that `bench_peers` times beside moectl's: each the whole expert computation of a layer.

A column is built from a layer, told how many tokens come (`prepare`), and then called with a routing; it
gives the layer's output. Libraries are found installed, or in a folder: an unpacked vLLM wheel (`vllm/`), or
`moe_C.so.xz` (its `_moe_C_stable_libtorch.abi3.so`), `triton_kernels/` and `humming/` by themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import lzma
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from moectl.kernels.runners import runner_for
from moectl.problem import Activation
from moectl.random_layer import RandomLayer, Routed

MARLIN_LIBRARY = "_moe_C_stable_libtorch.abi3.so"
E2M1_TYPE, U4B8_TYPE = 562949953487106, 1125899907892224
"""vLLM's numbers for its scalar types E2M1 (bias free) and unsigned int4 with a bias of 8."""


class Absent(Exception):
    """A library, or what it would need to serve a layer, is not here; the message says which."""


class Column(Protocol):
    """One way to compute a layer, made for numbers of tokens that will come.

    Attributes:
        numerics: the activation that its result is to be checked with, or None when its weights are not
            the layer's.
        note: what a reader of its times has to know.
        ours: whether it is held to moectl's own tolerances.
    """

    numerics: Activation | None
    note: str
    ours: bool

    def prepare(self, x: Tensor) -> None: ...
    def __call__(self, routed: Routed) -> Tensor: ...


@triton.jit
def _activation_kernel(
    X, Y, N, alpha, limit, offset, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Y ``[rows, N]`` = (up + offset) * gate * sigmoid(alpha * gate), gates and ups in pairs or in halves."""
    row = tl.program_id(0).to(tl.int64)
    if PAIRS:
        at = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        both = tl.load(X + row * 2 * N + at, mask=at < 2 * N, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if not PAIRS:
        gate = tl.load(X + row * 2 * N + at, mask=at < N, other=0.0).to(tl.float32)
        up = tl.load(X + row * 2 * N + N + at, mask=at < N, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(Y + row * N + at, ((up + offset) * gate * tl.sigmoid(alpha * gate)).to(tl.bfloat16), mask=at < N)


def activate(x: Tensor, y: Tensor, activation: Activation, pairs: bool) -> None:
    """`y` ``[rows, n]`` from `x` ``[rows, 2 * n]``; one kernel, as the peers' engines have one."""
    rows, n = y.shape
    oai = activation.name == "swigluoai"
    limit = 3e38 if activation.limit is None else activation.limit
    _activation_kernel[(rows, triton.cdiv(n, 1024))](
        x, y, n, activation.alpha or 1.0, limit, float(oai), PAIRS=pairs, BLOCK=1024
    )


class Moectl:
    """moectl's own kernels, those of one of its backends."""

    note = ""
    ours = True

    def __init__(self, backend: str, layer: RandomLayer, folder: Path | None, tokens: Sequence[int]) -> None:
        self.runner = runner_for(backend)
        reason = self.runner.refusal(layer.problem, layer.device)
        if reason:
            raise Absent(reason)
        self.layer = layer.experts.prepared(backend, layer.device)
        self.numerics = layer.problem.activation

    def prepare(self, x: Tensor) -> None:
        self.x = x

    def __call__(self, routed: Routed) -> Tensor:
        return self.runner.run(self.layer, self.x, routed.ids, routed.weights)


def _package(name: str, folder: Path | None, inside: str) -> Path:
    """Where `name` lies: in `folder`, in `folder`/`inside`, or where `inside` is installed."""
    for place in () if folder is None else (folder, folder / inside):
        if (place / name).exists():
            return place
    top, *rest = Path(inside).parts
    found = importlib.util.find_spec(top)
    for root in (found.submodule_search_locations or ()) if found else ():
        place = Path(root, *rest)
        if (place / name).exists():
            return place
    raise Absent(f"no {name} in {folder or 'a folder (give --peers)'}, and no installed {top} has it")


@cache
def marlin_operators(folder: Path | None) -> Any:
    """vLLM's operators for MoE layers, loaded into torch."""
    packed = None if folder is None else folder / "moe_C.so.xz"
    if packed is not None and packed.exists():
        library = (
            Path(tempfile.gettempdir()) / f"moe_C-{packed.stat().st_size}-{packed.stat().st_mtime_ns}.so"
        )
        if not library.exists():
            with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as file:
                file.write(lzma.decompress(packed.read_bytes()))
            Path(file.name).rename(library)
    else:
        library = _package(MARLIN_LIBRARY, folder, "vllm") / MARLIN_LIBRARY
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise Absent(f"{library} does not load into torch {torch.__version__}: {error}") from error
    return torch.ops._moe_C


def _aligned(operators: Any, ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots sorted by expert in blocks of `block`, the experts of the blocks, and how many slots."""
    slots = ids.numel()
    most = slots + experts * (block - 1)
    if slots < experts:
        most = min(slots * block, most)
    ordered = ids.new_empty(most)
    of_block = ids.new_empty(triton.cdiv(most, block))
    total = ids.new_empty(1)
    operators.moe_align_block_size(ids, experts, block, ordered, of_block, total, None, None)
    return ordered, of_block, total


class Marlin:
    """vLLM's Marlin MoE, called as vLLM 0.33 calls it: align, GEMM, activation, GEMM, sum."""

    LAYOUTS: Mapping[str, tuple[str, int]] = {
        "mxfp4": ("marlin-mxfp4", E2M1_TYPE),
        "int4": ("marlin-int4", U4B8_TYPE),
    }
    BLOCKS = (8, 16, 32, 48, 64)
    note = "padded as vLLM pads it"
    ours = False

    def __init__(self, layer: RandomLayer, folder: Path | None, tokens: Sequence[int]) -> None:
        self.operators = marlin_operators(folder)
        layout, self.type = self.LAYOUTS[layer.problem.scheme.weight.name]
        self.problem, self.weights = layer.laid_out(layout)
        self.numerics = layer.problem.activation
        if self.type == E2M1_TYPE:
            for role in ("w13_scale", "w2_scale"):
                self.weights[role] = self.weights[role].view(torch.float8_e8m0fnu)
        multiprocessors = torch.cuda.get_device_properties(layer.device).multi_processor_count
        self.locks = torch.zeros(4 * multiprocessors, dtype=torch.int32, device=layer.device)

    def prepare(self, x: Tensor) -> None:
        dims, slots = self.problem.dims, len(x) * self.problem.top_k
        self.x = torch.nn.functional.pad(x, (0, dims.padded_hidden - dims.hidden))
        self.first = x.new_empty(slots, 2 * dims.padded_intermediate)
        self.hidden = x.new_empty(slots, dims.padded_intermediate)
        self.second = x.new_empty(slots, dims.padded_hidden)
        self.y = torch.empty_like(self.x)
        each = slots / self.problem.experts
        self.block = next((b for b in self.BLOCKS if each / b < 0.9), self.BLOCKS[-1])

    def _gemm(self, role: str, x: Tensor, y: Tensor, aligned: Any, routed: Routed, weigh: bool) -> None:
        w, top_k = self.weights, 1 if weigh else self.problem.top_k
        self.operators.moe_wna16_marlin_gemm(
            x, y, w[role], w.get(f"{role}_bias"), w[f"{role}_scale"], None, None, None, self.locks,
            *aligned, routed.weights, self.block, top_k, weigh, self.type,
            len(x), y.shape[1], x.shape[1], False, True, False, -1, -1, -1,
        )  # fmt: skip

    def __call__(self, routed: Routed) -> Tensor:
        p = self.problem
        aligned = _aligned(self.operators, routed.ids, self.block, p.experts)
        self._gemm("w13", self.x, self.first, aligned, routed, False)
        activate(self.first, self.hidden, p.activation, p.rows == "interleaved")
        self._gemm("w2", self.hidden, self.second, aligned, routed, True)
        self.operators.moe_sum(self.second.view(len(self.x), p.top_k, -1), self.y, None, None)
        return self.y[:, : p.dims.hidden]


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


class TritonKernels:
    """OpenAI's triton_kernels as vLLM 0.33 calls them: routing from logits, then two GEMMs."""

    note = "its routing starts from logits"
    ours = False

    def __init__(self, layer: RandomLayer, folder: Path | None, tokens: Sequence[int]) -> None:
        if layer.problem.scheme.weight.name != "mxfp4":
            raise Absent("it has MXFP4 weights alone")
        if importlib.util.find_spec("triton_kernels") is None:
            _on_path(_package("triton_kernels", folder, "vllm/third_party"))
        flags = importlib.import_module("triton_kernels.matmul_ogs_details.opt_flags")
        self.gemm = importlib.import_module("triton_kernels.matmul_ogs")
        self.routing = importlib.import_module("triton_kernels.routing").routing
        swiglu = importlib.import_module("triton_kernels.swiglu").swiglu_fn
        flags.update_opt_flags_constraints({"split_k": 1})
        self.problem, w = layer.laid_out("triton-hopper")
        activation = layer.problem.activation
        if activation.name != "swigluoai":
            self.note += "; its SwiGLU adds 1 to the up half, which SiLU does not: checked against that"
            activation = Activation("swigluoai", alpha=1.0, limit=1e30)
        self.numerics = activation
        parts = (activation.alpha, activation.limit)
        self.fused = self.gemm.FusedActivation(
            self.gemm.FnSpecs("swiglu", swiglu, ("alpha", "limit")), parts, 2
        )
        dims = self.problem.dims
        self.w13 = self._matrix(w, "w13", 2 * dims.padded_intermediate, dims.padded_hidden)
        self.w2 = self._matrix(w, "w2", dims.padded_hidden, dims.padded_intermediate)

    def _matrix(
        self, weights: Mapping[str, Tensor], role: str, n: int, k: int
    ) -> tuple[Any, Tensor | None, Any]:
        """Weights, bias and precision as the GEMM takes them; their tensors are seen transposed."""
        numerics = importlib.import_module("triton_kernels.numerics")
        tensors = importlib.import_module("triton_kernels.tensor")
        layouts = importlib.import_module("triton_kernels.tensor_details.layout")
        experts = self.problem.experts
        groups = 4 * triton.cdiv(k // 32, 4)
        codes = layouts.HopperMXValueLayout([experts, k // 2, n], mx_axis=1)
        steps = layouts.HopperMXScaleLayout([experts, groups, n], mx_axis=1, num_warps=8)
        value = tensors.Tensor(
            tensors.Storage(weights[role].mT, codes), dtype=tensors.FP4, shape=[experts, k, n]
        )
        scale = tensors.Tensor(
            tensors.Storage(weights[f"{role}_scale"].mT, steps), dtype=torch.uint8, shape=[experts, groups, n]
        )
        context = self.gemm.FlexCtx(rhs_data=numerics.InFlexData())
        precision = self.gemm.PrecisionConfig(weight_scale=scale, flex_ctx=context)
        return value, weights.get(f"{role}_bias"), precision

    def prepare(self, x: Tensor) -> None:
        dims = self.problem.dims
        self.x = torch.nn.functional.pad(x, (0, dims.padded_hidden - dims.hidden))

    def __call__(self, routed: Routed) -> Tensor:
        data, gather, scatter = self.routing(routed.logits, self.problem.top_k)
        w, b, precision = self.w13
        h = self.gemm.matmul_ogs(
            self.x, w, b, data, gather_indx=gather, precision_config=precision, fused_activation=self.fused
        )
        w, b, precision = self.w2
        y = self.gemm.matmul_ogs(
            h, w, b, data, scatter_indx=scatter, precision_config=precision, gammas=data.gate_scal
        )
        return y[:, : self.problem.dims.hidden]


class Humming:
    """Humming's indexed GEMMs, with the align, activation and sum kernels of the others around them."""

    note = "random weights of its own, not checked; its sum leaves out the router weights"
    numerics = None
    ours = False
    SIZES: Mapping[str, int] = {"mxfp4": 128, "int4": 1}
    """What sizes are padded to."""

    def __init__(self, layer: RandomLayer, folder: Path | None, tokens: Sequence[int]) -> None:
        self.operators = marlin_operators(folder)
        if importlib.util.find_spec("humming") is None:
            _on_path(_package("humming", folder, "humming"))
        self.module = importlib.import_module("humming.layer")
        self.problem, self.device = layer.problem, layer.device
        unit = self.SIZES[layer.problem.scheme.weight.name]
        dims = layer.problem.dims
        self.k, self.n = (unit * triton.cdiv(size, unit) for size in (dims.hidden, dims.intermediate))
        slots = [layer.problem.top_k * n for n in tokens]
        self.layers = (self._layer(2 * self.n, self.k, slots), self._layer(self.k, self.n, slots))
        self.compute = json.dumps({"gemm_type": "indexed"})

    def _layer(self, n: int, k: int, slots: list[int]) -> tuple[Any, list[Any], str]:
        """A layer of theirs, the rows of its tuning table that are for `slots`, and those as text.

        They compile all rows that they are given, at once.
        """
        weight = self.problem.scheme.weight
        config = (
            {"quant_method": "mxfp4"}
            if weight.name == "mxfp4"
            else {"quant_method": "humming", "dtype": weight.name, "group_size": weight.group}
        )
        layer = self.module.HummingLayer(
            shape_n=n, shape_k=k, weight_config=config, num_experts=self.problem.experts,
            has_bias=self.problem.bias, torch_dtype=torch.bfloat16,
        ).to(self.device)  # fmt: skip
        for name, parameter in layer.named_parameters():
            _randomize(name, parameter.data)
        layer.transform()
        method = self.module.HummingLayerMethod
        rows = method.get_default_tuning_configs(layer, gemm_type="indexed")
        tuning = rows_for(rows, slots)
        return layer, tuning, json.dumps(tuning)

    def _block(self, at: int, slots: int) -> int:
        (row,) = (row for row in self.layers[at][1] if row[0] < slots <= row[1])
        return int(row[2]["block_shape"][0])

    def prepare(self, x: Tensor) -> None:
        slots = len(x) * self.problem.top_k
        self.x = torch.nn.functional.pad(x, (0, self.k - x.shape[1]))
        self.first, self.hidden = x.new_empty(slots, 2 * self.n), x.new_empty(slots, self.n)
        self.second, self.y = x.new_empty(slots, self.k), torch.empty_like(self.x)
        self.blocks = self._block(0, slots), self._block(1, slots)

    def _gemm(self, at: int, x: Tensor, y: Tensor, aligned: Any, top_k: int) -> None:
        layer, _, tuning = self.layers[at]
        ordered, of_block, total = aligned
        self.module.HummingLayerMethod.forward_layer(
            layer, x, y, sorted_ids=ordered, expert_ids=of_block, num_tokens_padded=total, top_k=top_k,
            valid_shape_m=len(y), compute_config=self.compute, tuning_config=tuning,
        )  # fmt: skip

    def __call__(self, routed: Routed) -> Tensor:
        p = self.problem
        aligned = [_aligned(self.operators, routed.ids, self.blocks[0], p.experts)] * 2
        if self.blocks[1] != self.blocks[0]:
            aligned[1] = _aligned(self.operators, routed.ids, self.blocks[1], p.experts)
        self._gemm(0, self.x, self.first, aligned[0], p.top_k)
        activate(self.first, self.hidden, p.activation, False)
        self._gemm(1, self.hidden, self.second, aligned[1], 1)
        self.operators.moe_sum(self.second.view(len(self.x), p.top_k, -1), self.y, None, None)
        return self.y[:, : p.dims.hidden]


def rows_for(rows: Sequence[Any], slots: Sequence[int]) -> list[Any]:
    """Rows of Humming's tuning table for calls of so many slots, and for 1, which every call asks for."""
    return [row for row in rows if any(row[0] < count <= row[1] for count in (1, *slots))]


def _randomize(name: str, t: Tensor) -> None:
    """Fills one parameter of Humming's with values whose products stay small."""
    if t.dtype == torch.int32:
        t.random_(-(2**31), 2**31 - 1)
    elif t.dtype == torch.uint8:
        low, high = (118, 122) if "scale" in name else (0, 256)
        t.random_(low, high)
    elif t.element_size() >= 2:
        t.uniform_(0, 0.01)


COLUMNS: Mapping[str, Callable[[RandomLayer, Path | None, Sequence[int]], Column]] = {
    "moectl": partial(Moectl, "triton"),
    "moectl-marlin": partial(Moectl, "triton_marlin"),
    "marlin": Marlin,
    "triton_kernels": TritonKernels,
    "humming": Humming,
}
