"""The directories of several ranks as a source of layers, of which every rank reads its own alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.source.open_checkpoint import rank_folder
from ..convert.manifest.manifest import Deployment, load_directory
from ..convert.rank_slice import RankShard
from ..errors import CheckpointError
from .layer_source import ConvertedLayers

if TYPE_CHECKING:
    from .experts import ExpertLayer


@dataclass(frozen=True)
class ConvertedRanks:
    """The layers of the ranks whose directories are in `folder`; `check` as of `ConvertedLayers`.

    What needs `deployment` raises CheckpointError for directories of version 1, which have nothing above
    those of the ranks.
    """

    folder: Path
    check: bool = True
    _opened: dict[int, ConvertedLayers] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def deployment(self) -> Deployment:
        """What all ranks share."""
        found = load_directory(self.folder)
        if not isinstance(found, Deployment):
            raise CheckpointError(f"{self.folder} is not the directory of several ranks.")
        return found

    def rank(self, number: int) -> ConvertedLayers:
        """The layers of one rank, opened once; CheckpointError if its directory is not here."""
        if number not in self._opened:
            folder = rank_folder(self.folder, number)
            if not folder.is_dir():
                raise CheckpointError(
                    f"{self.folder} has no {folder.name}.",
                    hint=f"Put the directory of that rank there, or convert it with --rank {number}.",
                )
            self._opened[number] = ConvertedLayers(folder, self.check)
        return self._opened[number]

    @property
    def notes(self) -> Sequence[str]:
        """Empty, as of `ConvertedLayers`."""
        return ()

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """All layers: which of them have the same problem, the ranks' manifests say."""
        return [self.layers()]

    @property
    def shard(self) -> RankShard:
        """The first rank; see `rank` for the others."""
        return self.deployment.record.shard(0)

    def layers(self) -> list[int]:
        """Numbers of all MoE layers, ascending."""
        return list(self.deployment.record.layers)

    def layer(self, number: int | None = None) -> ExpertLayer:
        """The first rank's share of a layer; raises like `converted_layer`."""
        return self.rank(0).layer(number)
