"""What an engine checks of a whole model before it creates MoE layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UsageError
from ..files.records import Size


class BlockedMatrix(NamedTuple):
    """A block-quantized matrix outside the experts, whose sharded axis must keep to whole blocks.

    Attributes:
        module: its name from the layer's number on, such as ``layers.0.mlp.down_proj``.
        size: its sharded axis; `block`: the block's edge along it.
        rows: True for output features, False for input features.
    """

    module: str
    size: int
    block: int
    rows: bool = False

    @property
    def shared(self) -> bool:
        """True for a matrix of shared experts."""
        return ".shared_expert" in self.module


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model outside its experts that limit a deployment; 0 or ``""`` where unknown.

    Attributes:
        attention_heads: query heads of a layer.
        kv_heads: key and value heads of a layer that tensor parallelism shards or replicates; 0 also for
            latent attention (MLA), which does neither.
        vocabulary: entries of the embedding.
        layers: decoder layers, without those for multi-token prediction.
        architecture: the first of `architectures` in config.json.
        model_type: `model_type` in config.json of the whole model, whose text model may have another.
        blocked: block-quantized FP8 matrices outside the experts that engines shard, one for each kind.
    """

    attention_heads: Size = 0
    kv_heads: Size = 0
    vocabulary: Size = 0
    layers: Size = 0
    architecture: str = ""
    model_type: str = ""
    blocked: tuple[BlockedMatrix, ...] = ()


UNKNOWN_MODEL = ModelShape()


def pipeline_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, as in vLLM's partition: equal shares, and the rest one each.

    The rest goes to the stages before the last, from the back, as the last one has the output head.
    Raises UsageError for more stages than layers.

    Example:
        >>> pipeline_stages(61, 4)
        (15, 15, 16, 15)
    """
    if stages > layers:
        raise UsageError(
            f"{layers} layers cannot be distributed over {stages} pipeline stages",
            hint="choose --pp up to the number of layers",
        )
    share, rest = divmod(layers, stages)
    return tuple(share + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages))


def stated_stages(text: str) -> tuple[int, ...] | None:
    """The layers of each pipeline stage in a comma-separated list of integers; None if it is none.

    Example:
        >>> stated_stages("31,30"), stated_stages("31;30")
        ((31, 30), None)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return None
