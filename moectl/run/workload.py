"""The inputs of a run: tokens from a file or at random, and their routing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, UsageError
from ..files.safe_reading import open_given, unreadable
from ..files.safetensors_header import read_header
from ..kernels.layer_inputs import LayerInputs, check_ids, check_tokens, make_inputs, no_bias
from ..kernels.prepared_layer import PreparedMoE, Router
from ..kernels.reference import moe_reference
from ..kernels.routing import route_by
from ..layer.experts import ExpertLayer
from ..problem.moe_problem import MoEProblem
from ..seeds import seed_of
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .layer_variants import experts_on

MOST_TENSORS, MOST_BYTES = 1000, 1 << 36
"""Of a file of inputs."""


@dataclass(frozen=True)
class Workload:
    """One call's inputs on the CPU, with the layer's own expert ids.

    Attributes:
        routed_by: ``router`` (the checkpoint's), ``input`` (ids in a file) or ``random``.
        correction_bias: ``[experts]`` for kernels that route by themselves, or None.
    """

    inputs: LayerInputs
    routed_by: str
    correction_bias: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.inputs.x)

    def at(self, prepared: PreparedMoE) -> tuple[LayerInputs, Tensor | None]:
        """Copies of inputs and bias on the device of `prepared`, with -1 for experts that it does not have.

        They are copied so that a backend that writes into them by mistake cannot affect the next one.
        """
        inputs = self.inputs
        tensors = (inputs.x, prepared.local_ids(inputs.ids), inputs.weights, inputs.logits)
        moved = LayerInputs(*(t.to(prepared.device, copy=True) for t in tensors))
        bias = self.correction_bias
        return moved, None if bias is None else bias.to(prepared.device, copy=True)


def workload_of(layer: ExpertLayer, tokens: int = 8, seed: int = 0, source: Path | None = None) -> Workload:
    """The inputs of a run of `layer`, routed by its router if it has one.

    Args:
        tokens, seed: number and seed of random tokens, N(0, 1).
        source: instead, a safetensors file with ``x`` [tokens, hidden] and optionally ``ids`` and
            ``weights`` [tokens, top_k]; an id of -1 stands for no expert.

    Raises:
        UsageError: `source` cannot be read, or its tensors do not fit the layer.
    """
    inputs = make_inputs(layer.problem, tokens if source is None else 0, seed)
    if source is not None:
        x, ids, weights = _read_input(source, layer.problem)
        if ids is not None and weights is not None:
            logits = torch.zeros(len(x), layer.problem.experts)
            return Workload(LayerInputs(x, ids, weights, logits), "input")
        inputs = replace(make_inputs(layer.problem, len(x), seed), x=x)
    # Experts with their own hidden size take a projection of the router's input.
    if layer.router is None or layer.problem.model_hidden != layer.problem.dims.hidden:
        return Workload(inputs, "random", no_bias(layer.problem))
    token_ids = random_token_ids(layer.router, len(inputs.x), seed)
    ids, weights, logits = route_by(layer.router, inputs.x, layer.problem, token_ids)
    return Workload(LayerInputs(inputs.x, ids, weights, logits), "router", layer.router.correction_bias)


def random_token_ids(router: Router, tokens: int, *seed: int) -> Tensor | None:
    """``[tokens]`` token ids for a router that looks experts up by them; None for other routers."""
    if router.table is None:
        return None
    generator = torch.Generator().manual_seed(seed_of("token ids", *seed))
    return torch.randint(len(router.table), (tokens,), generator=generator)


def load_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file; UsageError, about `what`, if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    kind = "a safetensors file"
    with open_given(path, what, kind) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            tensors = len(read_header(file, size, path.name))
        except CheckpointError as error:
            raise unreadable(what, path, error, kind) from error
    if tensors > MOST_TENSORS or size > MOST_BYTES:
        raise UsageError(
            f"cannot read {what}: it has {tensors} tensors in {size} bytes, expected at most "
            f"{MOST_TENSORS} in {MOST_BYTES}",
            hint=f"give the path of {kind} with the tensors that are asked for",
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise unreadable(what, path, error, kind) from error


def expected_of(layer: ExpertLayer, inputs: LayerInputs, device: torch.device) -> Tensor:
    """The reference's result for `inputs`, ``[tokens, hidden]`` fp32 on the CPU; ids are the layer's, or -1.

    Experts are decoded on `device` from the stored tensors, without any backend's layout in between.
    """
    x, weights = inputs.x.to(device), inputs.weights.to(device)
    ids = layer.local_ids(inputs.ids).to(device)
    return moe_reference(x, ids, weights, experts_on(layer, device), layer.problem).cpu()


def _read_input(source: Path, problem: MoEProblem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    stored = load_tensors(source, f"--input {source}")
    if "x" not in stored:
        raise UsageError(f"--input {source} must hold a tensor x, got {', '.join(sorted(stored)) or 'none'}")
    x = stored["x"]
    check_tokens(x, problem, f"x in {source}")
    ids, weights = stored.get("ids"), stored.get("weights")
    if (ids is None) != (weights is None):
        raise UsageError(f"{source} must hold ids and weights together, or neither")
    for name, tensor in (("ids", ids), ("weights", weights)):
        if tensor is not None and tuple(tensor.shape) != (len(x), problem.top_k):
            expected = [len(x), problem.top_k]
            raise UsageError(f"{name} in {source} must be {expected}, got {list(tensor.shape)}")
    if ids is None or weights is None:
        return x.to(MODEL_TORCH_DTYPES[problem.dtype]), None, None
    check_ids(ids, problem, f"ids in {source}", none=True)
    if weights.is_complex() or weights.dtype == torch.bool or not bool(torch.isfinite(weights.float()).all()):
        raise UsageError(f"weights in {source} must be finite numbers")
    return x.to(MODEL_TORCH_DTYPES[problem.dtype]), ids.to(torch.int32), weights.float()
