"""One converted directory per rank: ``OUT/rank-00``, ``OUT/rank-01``, ...

Each is a converted directory with its own manifest and READY. The source can be restored from all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_folder
from ...errors import CheckpointError, UsageError
from ...files.records import to_json
from ..rank_slice import RankShard, shard_of
from .manifest import Manifest, load_manifest
from .manifest_records import MANIFEST

_RANK = re.compile(r"rank-(\d{2,5})")


def rank_numbers(folder: Path) -> tuple[int, ...]:
    """Ascending numbers of the ranks whose directories are in `folder`; empty for a converted directory."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return ()
    matches = (_RANK.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def load_rank_manifests(folder: Path) -> tuple[Manifest, ...]:
    """The manifest of a converted directory, or those of all ranks' directories in `folder`, in rank order.

    Raises CheckpointError if `folder` is neither, a rank's directory is missing or incomplete, or the
    directories belong to different conversions; the fields that differ are named.
    """
    ranks = rank_numbers(folder)
    if not ranks:
        return (load_manifest(folder),)
    manifests = tuple(load_manifest(rank_folder(folder, rank)) for rank in ranks)
    shard = manifests[0].record.shard
    missing = sorted(set(range(shard.ranks)) - set(ranks))
    if missing:
        names = ", ".join(rank_folder(folder, rank).name for rank in missing[:8])
        raise CheckpointError(
            f"{folder} lacks {names} of {shard.ranks} ranks.", hint="Convert the missing ranks with --rank."
        )
    for rank, manifest in zip(ranks, manifests, strict=True):
        expected = shard_of(rank, shard.tp_size, shard.ep_size) if rank < shard.ranks else None
        if manifest.record.shard != expected:
            raise CheckpointError(
                f"{manifest.folder} holds {manifest.record.shard}; its name and {manifests[0].folder.name} "
                f"ask for rank {rank} of {shard.ranks} (tp {shard.tp_size}, ep {shard.ep_size}).",
                hint="Put the directories of one conversion together, each under its own rank.",
            )
        _check_one_conversion(manifests[0], manifest)
        _check_one_conversion(manifests[rank - rank % shard.tp_size], manifest)
    return manifests


def _check_one_conversion(first: Manifest, other: Manifest) -> None:
    """Raises CheckpointError naming the fields in which two ranks' manifests must agree but differ."""
    facts = [_shared_facts(manifest) for manifest in (first, other)]
    differing = [name for name in facts[0] if facts[0][name] != facts[1][name]]
    same_experts = first.record.shard.ep_rank == other.record.shard.ep_rank
    if not differing and same_experts:
        sources = [[item.source for item in manifest.record.layers] for manifest in (first, other)]
        differing = ["the bytes of the source's experts"] if sources[0] != sources[1] else []
    if differing:
        raise CheckpointError(
            f"{first.folder.name} and {other.folder.name} are not of one conversion: they differ in "
            f"{', '.join(differing)}.",
            hint="Convert all ranks from one checkpoint with the same arguments.",
        )


def _shared_facts(manifest: Manifest) -> Mapping[str, object]:
    record = manifest.record
    return {
        "source": (record.source.config_sha256, record.source.files),
        "layout": record.layout,
        "experts only": record.experts_only,
        "layers": manifest.layers,
        "layer groups": [(g.layers, g.whole_intermediate, g.prefix, to_json(g.parts)) for g in record.groups],
        "other files": [(item.file, item.sha256) for item in (*record.rest, *record.files)],
    }


def refuse_one_rank(manifest: Manifest) -> None:
    """Raises UsageError for the directory of one of several ranks, from which no source can be restored."""
    shard: RankShard = manifest.record.shard
    if shard.ranks > 1:
        raise UsageError(
            f"{manifest.folder} holds {shard} alone; the source is restored from all of them together.",
            hint="Give the directory that contains rank-00 and the others.",
        )
