"""Sources of layers: checkpoints and converted directories behind one interface."""

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
    """The MoE layers of a model.

    Constructing one reads nothing and does not import torch; errors are raised when layers are accessed.
    """

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for the user to see before the weights are used."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Numbers of the layers in each group of layers with the same problem."""

    @property
    def shard(self) -> RankShard:
        """The rank whose slices are stored; rank 0 of 1 for whole layers."""

    def layers(self) -> list[int]:
        """Numbers of all MoE layers, ascending."""

    def layer(self, number: int | None = None) -> ExpertLayer:
        """One layer, the first for None; raises like `checkpoint_layer` and `converted_layer`."""


@dataclass(frozen=True)
class CheckpointLayers:
    """The layers of a checkpoint in its published format."""

    checkpoint: Checkpoint

    @property
    def notes(self) -> Sequence[str]:
        """Errors in its config, and what was assumed."""
        return self.checkpoint.notes

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """See `LayerSource`."""
        return [group.layers for group in self.checkpoint.groups]

    @property
    def shard(self) -> RankShard:
        """Rank 0 of 1: layers are whole."""
        from ..convert.rank_slice import RankShard

        return RankShard()

    def layers(self) -> list[int]:
        """See `LayerSource`."""
        return sorted(number for layers in self.groups for number in layers)

    def layer(self, number: int | None = None) -> ExpertLayer:
        """See `LayerSource`."""
        from .prepare import checkpoint_layer

        return checkpoint_layer(self.checkpoint, number)

    def expect(self, number: int, shard: RankShard) -> None:
        """Has the system read what rank `shard` needs of a layer into the page cache, without waiting."""
        from ..convert.rank_slice import RankSlice
        from ..convert.sources import map_layer
        from ..convert.stream.file_transfers import announce

        group, folder = self.checkpoint.group_of(number), self.checkpoint.folder
        if folder is not None:
            mapped = map_layer(self.checkpoint, group, number)
            mapped = mapped.of_experts(*RankSlice(group.problem, shard).experts)
            extents = (
                (info.file, info.start + first, info.start + last) for info, first, last in mapped.extents
            )
            announce(folder, extents)


@dataclass(frozen=True)
class ConvertedLayers:
    """The layers of a converted directory, whose manifest is read once.

    With `check`, tensors are checked against their SHA-256 when a layer is opened; sizes and headers always
    are. Raises CheckpointError on first access if the directory is incomplete.
    """

    folder: Path
    check: bool = True

    @cached_property
    def manifest(self) -> Manifest:
        """The validated manifest."""
        from ..convert.manifest.manifest import load_manifest

        return load_manifest(self.folder)

    @property
    def notes(self) -> Sequence[str]:
        """Empty: a converted directory assumes nothing."""
        return ()

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """See `LayerSource`."""
        return [group.layers for group in self.manifest.record.groups]

    @property
    def shard(self) -> RankShard:
        """The rank recorded in the manifest."""
        return self.manifest.record.shard

    def layers(self) -> list[int]:
        """See `LayerSource`."""
        return list(self.manifest.layers)

    def layer(self, number: int | None = None) -> ExpertLayer:
        """See `LayerSource`."""
        from .prepare import converted_layer

        return converted_layer(self.manifest, number, check=self.check)

    def expect(self, number: int) -> None:
        """Has the system read a layer's file into the page cache, without waiting."""
        from ..convert.stream.file_transfers import announce

        record = self.manifest.layer(number)
        announce(self.folder, [(record.file, 0, record.size)])
