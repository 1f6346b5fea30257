"""What a layer is given to compute: tokens from a file or at random, and how they were routed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..files.safe_reading import unreadable
from ..kernels.layer_inputs import LayerInputs, check_ids, check_tokens, make_inputs, no_bias
from ..kernels.prepared_layer import PreparedMoE
from ..kernels.reference import moe_reference
from ..kernels.routing import route_by
from ..layer.experts import ExpertLayer
from ..problem.moe_problem import MoEProblem
from ..seeds import seed_of
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .layer_variants import experts_on


@dataclass(frozen=True)
class Workload:
    """One call's inputs on the CPU, with the layer's own expert ids.

    Attributes:
        routed_by: ``router`` (the checkpoint's), ``input`` (ids given) or ``random``.
        correction_bias: ``[experts]`` that a kernel which routes needs beside the logits, or None.
    """

    inputs: LayerInputs
    routed_by: str
    correction_bias: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.inputs.x)

    def at(self, prepared: PreparedMoE) -> tuple[LayerInputs, Tensor | None]:
        """Copies as `prepared` takes them, ids of experts elsewhere being -1, and of the bias, where it is.

        What a backend writes into them by mistake, no other one sees.
        """
        made = self.inputs
        tensors = (made.x, prepared.local_ids(made.ids), made.weights, made.logits)
        moved = LayerInputs(*(t.to(prepared.device, copy=True) for t in tensors))
        bias = self.correction_bias
        return moved, None if bias is None else bias.to(prepared.device, copy=True)


def workload_of(layer: ExpertLayer, tokens: int = 8, seed: int = 0, source: Path | None = None) -> Workload:
    """The inputs of a run of `layer`.

    Args:
        tokens, seed: of random tokens, N(0, 1); `source` is a safetensors file with ``x``
            [tokens, hidden] instead, and optionally ``ids`` and ``weights`` [tokens, top_k]; -1 is no expert.

    Raises:
        UsageError: `source` cannot be read, or its tensors do not fit the layer.
    """
    made = make_inputs(layer.problem, tokens if source is None else 0, seed)
    if source is not None:
        x, ids, weights = _read_input(source, layer.problem)
        if ids is not None and weights is not None:
            logits = torch.zeros(len(x), layer.problem.experts)
            return Workload(LayerInputs(x, ids, weights, logits), "input")
        made = replace(make_inputs(layer.problem, len(x), seed), x=x)
    # Experts of a hidden size of their own get what a projection makes of the router's input.
    if layer.router is None or layer.problem.model_hidden != layer.problem.dims.hidden:
        return Workload(made, "random", no_bias(layer.problem))
    token_ids = None
    if layer.router.table is not None:
        # Tokens of no text have no ids: random ones.
        generator = torch.Generator().manual_seed(seed_of("token ids", seed))
        token_ids = torch.randint(len(layer.router.table), (len(made.x),), generator=generator)
    ids, weights, logits = route_by(layer.router, made.x, layer.problem, token_ids)
    return Workload(LayerInputs(made.x, ids, weights, logits), "router", layer.router.correction_bias)


def expected_of(layer: ExpertLayer, inputs: LayerInputs, device: torch.device) -> Tensor:
    """``[tokens, hidden]`` fp32 reference on the CPU of `inputs`, whose ids are the layer's, or -1.

    Experts are decoded from what is stored, without any backend's layout in between, on `device`.
    """
    x, weights = inputs.x.to(device), inputs.weights.to(device)
    ids = layer.local_ids(inputs.ids).to(device)
    return moe_reference(x, ids, weights, experts_on(layer, device), layer.problem).cpu()


def _read_input(source: Path, problem: MoEProblem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(source)
    except (OSError, SafetensorError) as error:
        raise unreadable(f"--input {source}", source, error, "a safetensors file") from error
    if "x" not in found:
        raise UsageError(f"--input {source} must hold a tensor x, got {', '.join(sorted(found)) or 'none'}")
    x = found["x"]
    check_tokens(x, problem, f"x in {source}")
    ids, weights = found.get("ids"), found.get("weights")
    if (ids is None) != (weights is None):
        raise UsageError(f"{source} must hold ids and weights together, or neither")
    for name, given in (("ids", ids), ("weights", weights)):
        if given is not None and tuple(given.shape) != (len(x), problem.top_k):
            wanted = [len(x), problem.top_k]
            raise UsageError(f"{name} in {source} must be {wanted}, got {list(given.shape)}")
    if ids is None or weights is None:
        return x.to(MODEL_TORCH_DTYPES[problem.dtype]), None, None
    check_ids(ids, problem, f"ids in {source}", none=True)
    if weights.is_complex() or weights.dtype == torch.bool or not bool(torch.isfinite(weights.float()).all()):
        raise UsageError(f"weights in {source} must be finite numbers")
    return x.to(MODEL_TORCH_DTYPES[problem.dtype]), ids.to(torch.int32), weights.float()
