"""Where layers come from: a checkpoint and a converted folder, opened the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..convert.manifest.manifest import Manifest
    from ..convert.rank_slice import RankShard
    from .experts import ExpertLayer


class LayerSource(Protocol):
    """MoE layers that are stored together.

    Making one reads nothing and imports no torch; what it raises comes when layers are asked for.
    """

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know before the weights are used, each once."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Numbers of the layers that are alike, by group."""

    @property
    def shard(self) -> RankShard:
        """What is stored of each layer: all of it, or one rank's share."""

    def layers(self) -> list[int]:
        """Numbers of all MoE layers, rising."""

    def layer(self, number: int | None = None) -> ExpertLayer:
        """One layer, the first for None; what `checkpoint_layer` and `converted_layer` raise."""


@dataclass(frozen=True)
class CheckpointLayers:
    """The layers of a checkpoint as it was published."""

    checkpoint: Checkpoint

    @property
    def notes(self) -> Sequence[str]:
        """Where its config is wrong, and what was assumed."""
        return self.checkpoint.notes

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """As of `LayerSource`."""
        return [group.layers for group in self.checkpoint.groups]

    @property
    def shard(self) -> RankShard:
        """The whole layer."""
        from ..convert.rank_slice import RankShard

        return RankShard()

    def layers(self) -> list[int]:
        """As of `LayerSource`."""
        return sorted(number for layers in self.groups for number in layers)

    def layer(self, number: int | None = None) -> ExpertLayer:
        """As of `LayerSource`."""
        from .prepare import checkpoint_layer

        return checkpoint_layer(self.checkpoint, number)


@dataclass(frozen=True)
class ConvertedLayers:
    """The layers of a converted folder, whose manifest is read once.

    Raises CheckpointError, when layers are asked for, where the folder is not complete.
    """

    folder: Path

    @cached_property
    def manifest(self) -> Manifest:
        """The checked manifest."""
        from ..convert.manifest.manifest import load_manifest

        return load_manifest(self.folder)

    @property
    def notes(self) -> Sequence[str]:
        """None: the manifest says it all."""
        return ()

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """As of `LayerSource`."""
        return [group.layers for group in self.manifest.record.groups]

    @property
    def shard(self) -> RankShard:
        """Of the rank whose folder it is."""
        return self.manifest.record.shard

    def layers(self) -> list[int]:
        """As of `LayerSource`."""
        return list(self.manifest.layers)

    def layer(self, number: int | None = None) -> ExpertLayer:
        """As of `LayerSource`."""
        from .prepare import converted_layer

        return converted_layer(self.manifest, number)
