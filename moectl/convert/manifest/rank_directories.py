"""The directories of several ranks: ``OUT/rank-00``, ``OUT/rank-01``, ...

Each has its layers' files and a manifest; what they share is in ``OUT``, with a manifest that has the hash of
theirs. In version 1 each rank's is a whole converted directory, and nothing is above them. The source can be
restored from all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...checkpoint.source.open_checkpoint import rank_folder, rank_number
from ...errors import CheckpointError, UsageError
from ...files.records import to_json
from ..rank_slice import RankShard, shard_of
from .manifest import Deployment, Manifest, load_directory, load_manifest
from .manifest_records import MANIFEST, READY, ManifestRecord, RankRecord


def rank_numbers(folder: Path) -> tuple[int, ...]:
    """Ascending numbers of the ranks whose directories are in `folder`; empty for a converted directory."""
    if not folder.is_dir():
        return ()
    numbers = {rank_number(path): path for path in folder.iterdir()}
    return tuple(
        sorted(
            number for number, path in numbers.items() if number is not None and (path / MANIFEST).exists()
        )
    )


def load_rank(folder: Path, rank: int) -> Manifest:
    """The manifest of one of the ranks whose directories are in `folder`; reads nothing of the others.

    Raises CheckpointError if there is no such rank, or what is read is incomplete or inconsistent.
    """
    if (folder / MANIFEST).exists():
        found = load_directory(folder)
        if isinstance(found, Deployment):
            return found.rank(rank)
    return load_manifest(rank_folder(folder, rank))


def load_rank_manifests(folder: Path) -> tuple[Manifest, ...]:
    """The manifest of a converted directory, or those of all ranks' directories in `folder`, in rank order.

    Raises CheckpointError if `folder` is neither, a rank's directory is missing or incomplete, or the
    directories belong to different conversions; the fields that differ are named.
    """
    if (folder / MANIFEST).exists() or not (ranks := rank_numbers(folder)):
        found = load_directory(folder)
        if isinstance(found, Manifest):
            return (found,)
        missing = [number for number in range(found.ranks) if not rank_folder(folder, number).exists()]
        _refuse_missing(folder, missing, found.ranks)
        below = tuple(found.rank(number) for number in range(found.ranks))
        check_one_conversion([manifest.record for manifest in below])
        return below
    if not (rank_folder(folder, ranks[0]) / READY).exists():
        load_directory(folder)  # refuses what is above the ranks: it is missing
    manifests = tuple(load_manifest(rank_folder(folder, rank)) for rank in ranks)
    shard = manifests[0].record.shard
    missing = sorted(set(range(shard.ranks)) - set(ranks))
    _refuse_missing(folder, missing, shard.ranks)
    for rank, manifest in zip(ranks, manifests, strict=True):
        expected = shard_of(rank, shard.tp_size, shard.ep_size) if rank < shard.ranks else None
        if manifest.record.shard != expected:
            raise CheckpointError(
                f"{manifest.folder} holds {manifest.record.shard}; its name and {manifests[0].folder.name} "
                f"ask for rank {rank} of {shard.ranks} (tp {shard.tp_size}, ep {shard.ep_size}).",
                hint="Put the directories of one conversion together, each under its own rank.",
            )
    check_one_conversion([manifest.record for manifest in manifests])
    return manifests


def _refuse_missing(folder: Path, missing: Sequence[int], ranks: int) -> None:
    """Raises CheckpointError if the directories of ranks are `missing`."""
    if missing:
        names = ", ".join(rank_folder(folder, rank).name for rank in missing[:8])
        raise CheckpointError(
            f"{folder} lacks {names} of {ranks} ranks.", hint="Convert the missing ranks with --rank."
        )


def check_one_conversion(records: Sequence[RankRecord]) -> None:
    """Raises CheckpointError naming the fields in which manifests of all ranks, in order, differ wrongly."""
    for rank, record in enumerate(records):
        first = rank - rank % record.shard.tp_size
        _check_pair(records[0], record)
        _check_pair(records[first], record)


def _check_pair(first: RankRecord, other: RankRecord) -> None:
    facts = [_shared_facts(record) for record in (first, other)]
    differing = [name for name in facts[0] if facts[0][name] != facts[1][name]]
    if not differing and first.shard.ep_rank == other.shard.ep_rank:
        sources = [[item.source for item in record.layers] for record in (first, other)]
        differing = ["the bytes of the source's experts"] if sources[0] != sources[1] else []
    if not differing and (changed := first.source.resampled(other.source)):
        differing = [f"the bytes of the source's {changed[0]}"]
    if differing:
        names = [rank_folder(Path(), record.shard.rank).name for record in (first, other)]
        raise CheckpointError(
            f"{' and '.join(names)} are not of one conversion: they differ in {', '.join(differing)}.",
            hint="Convert all ranks from one checkpoint with the same arguments.",
        )


def _shared_facts(record: RankRecord) -> Mapping[str, object]:
    facts: dict[str, object] = {
        "source": (record.source.config_sha256, record.source.headers),
        "layout": record.layout,
        "experts only": record.experts_only,
        "layers": sorted(layer.layer for layer in record.layers),
        "layer groups": [(g.layers, g.whole_intermediate, g.prefix, to_json(g.parts)) for g in record.groups],
    }
    if isinstance(record, ManifestRecord):
        facts["other files"] = [(item.file, item.sha256) for item in (*record.rest, *record.files)]
    return facts


def refuse_one_rank(manifest: Manifest) -> None:
    """Raises UsageError for the directory of one of several ranks, from which no source can be restored."""
    shard: RankShard = manifest.record.shard
    if shard.ranks > 1:
        raise UsageError(
            f"{manifest.folder} holds {shard} alone; the source is restored from all of them together.",
            hint="Give the directory that contains rank-00 and the others.",
        )
