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


class _Opened(NamedTuple):
    """A layer and its backend, whose tensors are being read unless `tensors` is None."""

    layer: ExpertLayer
    backend: str
    tensors: BegunTensors | None


OpenLayer = Callable[[LayerRequest], tuple[ExpertLayer, str]]
"""The layer of a request and its backend's name; raises what opening it does."""


class LayersAhead:
    """Begins to read the layer after the one that is asked for, if it was said that it will be (`expect`).

    Its tensors are the final ones, allocated by the caller's thread when the layer before is asked for. No
    more than one layer is ahead: a layer out of turn gives up the one that was begun.
    """

    def __init__(self) -> None:
        self._expected: dict[LayerRequest, None] = {}
        self._begun: tuple[LayerRequest, _Opened] | None = None

    def expect(self, request: LayerRequest) -> None:
        """Says that `request` will be asked for, in the order of layers."""
        self._expected[request] = None

    def take(self, request: LayerRequest, open_layer: OpenLayer) -> tuple[ExpertLayer, str]:
        """The layer of `request`, and its backend; the layer after it is being read now."""
        found = self._given_up(unless=request)
        if request in self._expected:
            del self._expected[request]
            # Before what follows, so that its bytes are read first.
            found = found or _begin(request, open_layer)
            following = min((r for r in self._expected if r.layer > request.layer), default=None, key=_number)
            ahead = None if following is None or found.tensors is None else _tried(following, open_layer)
            if following is not None and ahead is not None:
                self._begun = following, ahead
        return found[:2] if found is not None else open_layer(request)

    def close(self) -> None:
        """Gives up what was begun and what is expected."""
        self._expected.clear()
        self._given_up()

    def _given_up(self, unless: LayerRequest | None = None) -> _Opened | None:
        """Stops what was begun; returns it instead if it is for the request `unless`."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] == unless:
            return begun and begun[1]
        if begun[1].tensors is not None:
            begun[1].tensors.stop()
        return None


def _begin(request: LayerRequest, open_layer: OpenLayer) -> _Opened:
    """`request`, being read if its tensors go to the device as they are stored."""
    layer, backend = open_layer(request)
    if not isinstance(layer.stored, ConvertedTensors) or not layer.is_read_as_stored(backend):
        return _Opened(layer, backend, None)
    try:
        reading = layer.stored.begin(request.device)
    except torch.OutOfMemoryError:  # told when the layer is prepared
        reading = None
    if reading is None:
        return _Opened(layer, backend, None)
    tensors = BegunTensors(reading, layer.stored, request.device)
    return _Opened(replace(layer, stored=tensors), backend, tensors)


def _tried(request: LayerRequest, open_layer: OpenLayer) -> _Opened | None:
    """`_begin` ahead of time: whatever is wrong with a layer is raised when it is asked for."""
    try:
        return _begin(request, open_layer)
    except Exception:
        return None


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
