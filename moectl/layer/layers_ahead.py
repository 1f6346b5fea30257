"""Layers that are read before a model's builder asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..convert.rank_slice import RankShard
from ..convert.stream.tensor_reading import TensorReading
from ..errors import MoectlError
from .experts import ExpertLayer
from .prepare import ConvertedTensors


class LayerRequest(NamedTuple):
    """What `ModelExperts.prepared` is asked for."""

    layer: int
    device: torch.device
    dtype: str
    backend: str
    shard: RankShard


OpenLayer = Callable[[LayerRequest], tuple[ExpertLayer, str]]
"""The layer of a request and its backend's name; raises what opening it does."""


class LayersAhead:
    """Begins to read layers as soon as it is said that they will be asked for (`expect`).

    Their tensors are the final ones, which `expect` allocates in its caller's thread; a model's builder says
    what it will ask for where it would allocate its own. They are read in the order in which they were
    expected.
    """

    def __init__(self) -> None:
        self._begun: dict[LayerRequest, tuple[ExpertLayer, str, BegunTensors]] = {}

    def expect(self, request: LayerRequest, open_layer: OpenLayer) -> None:
        """Begins to read `request`, if its tensors go to the device as they are stored.

        What is wrong with its files or the device's memory is raised when it is taken.
        """
        if request in self._begun:
            return
        with suppress(MoectlError, OSError, RuntimeError):
            layer, backend = open_layer(request)
            if isinstance(layer.stored, ConvertedTensors) and layer.is_read_as_stored(backend):
                reading = layer.stored.begin(request.device)
                if reading is not None:
                    tensors = BegunTensors(reading, layer.stored, request.device)
                    self._begun[request] = replace(layer, stored=tensors), backend, tensors

    def take(self, request: LayerRequest, open_layer: OpenLayer) -> tuple[ExpertLayer, str]:
        """The layer of `request`, and its backend; gives up what was begun of this layer for another one."""
        found = self._begun.pop(request, None)
        if found is not None:
            return found[:2]
        for other in [r for r in self._begun if (r.layer, r.shard) == (request.layer, request.shard)]:
            self._begun.pop(other)[2].stop()
        return open_layer(request)

    def close(self) -> None:
        """Gives up what was begun."""
        while self._begun:
            self._begun.popitem()[1][2].stop()


class BegunTensors:
    """`ExpertLayer.stored` of a layer that is being read; a second time, and elsewhere, it is read anew."""

    def __init__(self, reading: TensorReading, stored: ConvertedTensors, device: torch.device) -> None:
        self._reading: TensorReading | None = reading
        self._stored, self._device = stored, device

    def __call__(self, device: torch.device) -> Mapping[str, Tensor]:
        reading = self._reading
        if reading is None or device != self._device:
            return self._stored(device)
        self._reading = None
        return reading.tensors()

    def stop(self) -> None:
        """Lets go of the tensors, unless they were taken."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()
