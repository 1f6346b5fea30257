"""Reading checkpoints: config, quantization config and safetensors headers, but no weights."""

from ..files.safetensors_header import read_header
from ..files.tensor_table import TensorInfo
from .checkpoint import Checkpoint, ExpertNames, LayerGroup, Origin
from .source.open_checkpoint import open_checkpoint
from .tensors.layer_groups import layer_groups

__all__ = [
    "Checkpoint",
    "ExpertNames",
    "LayerGroup",
    "Origin",
    "TensorInfo",
    "layer_groups",
    "open_checkpoint",
    "read_header",
]
