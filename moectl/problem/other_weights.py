"""The weights of a model that are no routed experts: their bytes by how an engine distributes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..files.records import Size

_IMAGE = re.compile(r"(?:^|[._])(?:visual|vision|vit|image|mm|multi_modal|audio|aligner|projector)(?=[._])")
"""Names of encoders and their projectors."""

_PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn|nextn_predict_layers)(?=[._])")
"""Names of layers for multi-token prediction that are numbered apart."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,5})\.")

_REPLICATED = re.compile(
    r"norm\w*\.(?:weight|bias)$|\.q_a_proj|\.wq_a\.|\.kv_a_proj|\.wkv\.|\.indexer\.|\.index_|\.compressor\.|\.router\.|\.gate\.|"
    r"shared_expert_gate|correction_bias|expert_bias|latent_proj"
)
"""Names in a layer that every tensor-parallel rank has whole: norms, routers, down projections of MLA."""

_KV = re.compile(r"\.[kv]_proj\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|head|output|embed_out)\.")


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """Bytes of a whole model outside the routed experts, as an engine distributes them.

    Layers for multi-token prediction are not among them, as engines load them only when asked to predict.
    The shares are those of vLLM, simplified: encoders of images count as sharded, whatever their heads are,
    and layers of several kinds as equal.

    Attributes:
        source: how they are known, ``headers`` or ``config`` (computed from config.json).
        layers: decoder layers over which pipeline stages divide.
        kv_heads: key and value heads; more ranks than these have copies.
        sharded: in layers, divided by the tensor-parallel size: projections, dense MLPs, shared experts.
        kv: key and value projections in layers.
        replicated: in layers, whole on each rank: norms, routers, the down projections of latent attention.
        first: outside layers, on the first pipeline stage: embedding and encoders; sharded.
        last: the output head, on the last stage; sharded.
    """

    source: str
    layers: Size
    kv_heads: Size
    sharded: Size = 0
    kv: Size = 0
    replicated: Size = 0
    first: Size = 0
    last: Size = 0

    @property
    def total(self) -> int:
        """All of them once."""
        return self.sharded + self.kv + self.replicated + self.first + self.last

    def on_rank(self, tp: int, stage: int, pipelined: bool) -> int:
        """Bytes on one tensor-parallel rank of a pipeline stage of `stage` layers.

        If the model is `pipelined`, the stage is taken for the one with the embedding or the head, whichever
        is larger.

        Example:
            >>> weights = OtherWeights("config", 2, 2, sharded=80, kv=8, replicated=4, first=16, last=16)
            >>> weights.on_rank(1, 2, False), weights.on_rank(4, 2, False), weights.on_rank(4, 1, True)
            (124, 36, 18)
        """
        in_layers = self.sharded // tp + self.kv // min(tp, self.kv_heads or tp) + self.replicated
        ends = max(self.first, self.last) if pipelined else self.first + self.last
        return in_layers * stage // max(1, self.layers) + ends // tp


def sum_weights(weights: Iterable[tuple[str, int]], layers: int, kv_heads: int, source: str) -> OtherWeights:
    """`OtherWeights` of tensors by name and bytes, of a model with `layers` decoder layers.

    Example:
        >>> sum_weights([("layers.0.mlp.gate.weight", 8), ("lm_head.weight", 64)], 1, 0, "headers").total
        72
    """
    sums = dict.fromkeys(("sharded", "kv", "replicated", "first", "last"), 0)
    for name, size in weights:
        place = _place(name, layers)
        if place:
            sums[place] += size
    return OtherWeights(source, layers, kv_heads, **sums)


def _place(name: str, layers: int) -> str:
    """The attribute of `OtherWeights` to which a tensor belongs; empty for one that engines do not load."""
    if _IMAGE.search(name):
        return "first"
    layer = _LAYER.search(name)
    if _PREDICTION.search(name) or (layer is not None and int(layer[1]) >= layers):
        return ""
    if layer is None:
        return "last" if _HEAD.search(name) else "first"
    return "replicated" if _REPLICATED.search(name) else "kv" if _KV.search(name) else "sharded"
