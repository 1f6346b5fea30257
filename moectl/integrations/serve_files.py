"""Whether an engine finds the files of a checkpoint or converted directory, whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.source.catalogue import weights_missing
from ..convert.manifest.manifest import Manifest
from ..convert.rank_slice import RankShard
from ..errors import MoectlError, UsageError
from ..files.folder_handle import file_findings
from ..layer.layer_source import CheckpointLayers, ConvertedLayers
from .model_experts import ModelExperts
from .serve_report import FINE, REFUSED, WARNING, ServeFinding
from .serve_request import ServeRequest, refusal_of

HASHED = 64 << 20
"""Largest size in bytes of a document or tokenizer's file that is always hashed."""


def findings_of_files(
    request: ServeRequest, experts: ModelExperts, shards: Iterable[RankShard]
) -> Iterator[ServeFinding]:
    """Whether each rank finds its own files, whole; sizes and headers only, unless hashes are asked for."""
    if isinstance(experts.source, CheckpointLayers):
        checkpoint = experts.source.checkpoint
        if checkpoint.folder is None:
            yield _download_finding(request, checkpoint)
        else:
            says = "every file of the checkpoint is there, with the sizes in its headers"
            yield ServeFinding("files", FINE, says)
        if checkpoint.origin.kind != "catalogue":  # which lists experts alone
            yield from _lone_experts(experts, checkpoint.tensors)
        return
    folders = []
    for shard in shards:
        try:
            source = experts.directory(shard)
            for number in source.layers():
                source.manifest.open_layer(number)
            _ = source.manifest.passthrough
        except UsageError as error:
            # Said once for all ranks.
            found = refusal_of("files", error)
            yield replace(found, do=_sizes_hint(request, experts, shard, found.do))
            return
        except MoectlError as error:
            yield refusal_of("files", error)
        else:
            folders.append(source)
    if not folders:
        return
    manifest = folders[0].manifest
    changed = tuple(_changed_documents(manifest))
    yield from changed
    if not changed:
        ranks = f"{len(folders)} ranks, " if len(folders) > 1 else ""
        says = f"{ranks}{len(manifest.layers)} layers as {manifest.layout.name}, complete"
        yield ServeFinding("files", FINE, says)
    if not manifest.passthrough:
        says = "the directory has experts only, no engine finds the other weights in it"
        yield ServeFinding("files", REFUSED, says, "convert without --experts-only")
    else:
        yield from _lone_experts(experts, manifest.passthrough)
    if request.verify:
        yield from _hash_findings(folders)


def _download_finding(request: ServeRequest, checkpoint: Checkpoint) -> ServeFinding:
    """What happens at a start without the weights of a model of the Hub."""
    missing = weights_missing(checkpoint.origin.name)
    if request.offline:
        return refusal_of("files", missing)
    size = sum(info.nbytes for info in checkpoint.tensors.values()) / 2**30
    says = f"{missing.what}: {request.engine.name} downloads them when it starts, experts of {size:.3g} GiB"
    return ServeFinding("files", WARNING, says, missing.hint)


def _changed_documents(manifest: Manifest) -> Iterator[ServeFinding]:
    """What is not as written of the files that engines read themselves: config.json, index, tokenizer."""
    record = manifest.record
    for item in (*record.documents, *record.files):
        sha256 = item.sha256 if item.size <= HASHED else ""
        for says in file_findings(manifest.top, item.file, item.size, sha256):
            yield ServeFinding("files", REFUSED, says, "put back what was written, or convert again")


def _sizes_hint(request: ServeRequest, experts: ModelExperts, shard: RankShard, hint: str) -> str:
    """What to do about a directory for another deployment: serve that one, if the engine has it."""
    here: RankShard = experts.source.shard
    tp, ep = here.ranks, here.ep_size
    sizes = (here.tp_size, here.ep_size)
    theirs = request.engine.shards(tp, ep, request.options)
    has = not isinstance(theirs, str) and (theirs[0].tp_size, theirs[0].ep_size) == sizes
    if not has or sizes == (shard.tp_size, shard.ep_size):
        return hint
    return f"use --tp {tp}{f' --ep {ep}' if ep > 1 else ''}, or {hint[:1].lower()}{hint[1:]}"


def _lone_experts(experts: ModelExperts, names: Iterable[str]) -> Iterator[ServeFinding]:
    """A warning if no MoE layer has weights outside its MoE block, as every model does: norms, attention.

    `names` are those of the tensors that are not converted.
    """
    patterns = set()
    for name in experts.expert_names:
        before, number, rest = name.partition(r"\d+")
        block = rest.split(r"\.")[1]
        patterns.add(rf"{before}{number}\.(?!{block}\.)")
    others = re.compile("|".join(patterns))
    if not any(others.match(name) for name in names):
        says = "its layers have no weights but those of experts and routers, and engines need all"
        yield ServeFinding("files", WARNING, says, "serve a whole checkpoint: `moectl synth` writes no more")


def _hash_findings(folders: Iterable[ConvertedLayers]) -> Iterator[ServeFinding]:
    from ..convert.restore.verify import verify

    for source in folders:
        report = verify(source.folder, None)
        for finding in report.findings:
            yield ServeFinding("hashes", REFUSED, str(finding), "convert again")
        if report.ok:
            yield ServeFinding("hashes", FINE, f"every byte of {source.folder} is as written")
