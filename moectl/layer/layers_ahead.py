"""Layers that a model's builder asks for one after the other, the next being read while one is made ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..convert.rank_slice import RankShard
from ..convert.stream.tensor_reading import TensorReading
from .experts import ExpertLayer
from .prepare import ConvertedTensors


class LayerRequest(NamedTuple):
    """What `ModelExperts.prepared` is asked for."""

    layer: int
    device: torch.device
    dtype: str
    backend: str
    shard: RankShard


class LayersAhead:
    """Begins to read the layer after the one that is asked for, if it was said that it will be (`expect`).

    Its tensors are the final ones, allocated by the caller's thread when the layer before is asked for. No
    more than one layer is ahead: a layer out of turn gives up the one that was begun.

    Args:
        open_layer: the layer of a request and its backend's name; raises what opening it does.
    """

    def __init__(self, open_layer: Callable[[LayerRequest], tuple[ExpertLayer, str]]) -> None:
        self._open = open_layer
        self._expected: dict[LayerRequest, None] = {}
        self._begun: tuple[LayerRequest, ExpertLayer, str, BegunTensors] | None = None

    def expect(self, request: LayerRequest) -> None:
        """Says that `request` will be asked for, in the order of layers."""
        self._expected[request] = None

    def take(self, request: LayerRequest) -> tuple[ExpertLayer, str]:
        """The layer of `request`, and its backend; the layer after it is being read now."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] != request:
            begun[3].stop()
            begun = None
        expected = request in self._expected
        self._expected.pop(request, None)
        if not expected:
            return self._open(request) if begun is None else begun[1:3]
        # Before what follows, so that its bytes are read first.
        begun = begun or self._begin(request)
        following = min((r for r in self._expected if r.layer > request.layer), default=None, key=_number)
        if following is not None and begun is not None:
            self._begun = self._begin(following)
        return self._open(request) if begun is None else begun[1:3]

    def close(self) -> None:
        """Gives up what was begun and what is expected."""
        self._expected.clear()
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[3].stop()

    def _begin(self, request: LayerRequest) -> tuple[LayerRequest, ExpertLayer, str, BegunTensors] | None:
        """`request` being read, if its tensors go to the device as they are stored.

        Whatever is wrong with a layer is raised when it is asked for.
        """
        try:
            layer, backend = self._open(request)
            if not isinstance(layer.stored, ConvertedTensors) or not layer.is_read_as_stored(backend):
                return None
            reading = layer.stored.begin(request.device)
        except Exception:
            return None
        if reading is None:
            return None
        tensors = BegunTensors(reading, layer.stored, request.device)
        return request, replace(layer, stored=tensors), backend, tensors


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


def _number(request: LayerRequest) -> int:
    return request.layer
