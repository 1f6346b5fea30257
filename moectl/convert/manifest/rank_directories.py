"""Converted folders of every rank beside each other: ``OUT/rank-00``, ``OUT/rank-01``, ...

Each is a converted folder of its own, with its manifest and READY. Together they give the source back.
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


def ranks_in(folder: Path) -> tuple[int, ...]:
    """Numbers of the ranks whose folders `folder` has, in order; none for a converted folder itself."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return ()
    found = (_RANK.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return tuple(sorted(int(match[1]) for match in found if match))


def load_folders(folder: Path) -> tuple[Manifest, ...]:
    """The manifests of a converted folder, or of every rank's folder in `folder`, in order.

    Raises CheckpointError when `folder` is neither, a rank's folder is missing or not complete, or the
    folders are not of one conversion; the fields that differ are named.
    """
    ranks = ranks_in(folder)
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
        wanted = shard_of(rank, shard.tp_size, shard.ep_size) if rank < shard.ranks else None
        if manifest.record.shard != wanted:
            raise CheckpointError(
                f"{manifest.folder} holds {manifest.record.shard}; its name and {manifests[0].folder.name} "
                f"ask for rank {rank} of {shard.ranks} (tp {shard.tp_size}, ep {shard.ep_size}).",
                hint="Put the folders of one conversion together, each under its own rank.",
            )
        _check_one_conversion(manifests[0], manifest)
        _check_one_conversion(manifests[rank - rank % shard.tp_size], manifest)
    return manifests


def _check_one_conversion(first: Manifest, other: Manifest) -> None:
    """CheckpointError naming the fields in which two ranks' manifests may not differ and do."""
    facts = [_shared_facts(manifest) for manifest in (first, other)]
    wrong = [name for name in facts[0] if facts[0][name] != facts[1][name]]
    same_experts = first.record.shard.ep_rank == other.record.shard.ep_rank
    if not wrong and same_experts:
        sources = [[item.source for item in manifest.record.layers] for manifest in (first, other)]
        wrong = ["the bytes of the source's experts"] if sources[0] != sources[1] else []
    if wrong:
        raise CheckpointError(
            f"{first.folder.name} and {other.folder.name} are not of one conversion: they differ in "
            f"{', '.join(wrong)}.",
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
    """UsageError for the folder of one rank of several, which cannot give the source back alone."""
    shard: RankShard = manifest.record.shard
    if shard.ranks > 1:
        raise UsageError(
            f"{manifest.folder} holds {shard} alone; the source comes back from all of them together.",
            hint="Give the folder that holds rank-00 and the others.",
        )
