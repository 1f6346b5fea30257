"""The experts of a model that another library builds, by the numbers of their layers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..capabilities.own_kernels import TRITON
from ..checkpoint import open_checkpoint
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config.model_shape import model_shape
from ..checkpoint.source.catalogue import weights_missing
from ..checkpoint.source.open_checkpoint import MANIFEST
from ..convert.manifest.checked_files import source_config
from ..convert.manifest.manifest_records import expert_names, unpadded
from ..convert.manifest.rank_directories import rank_numbers
from ..convert.rank_slice import RankShard, RankSlice
from ..errors import CheckpointError, NoBackend, UsageError
from ..kernels.prepared_layer import PreparedMoE
from ..layer.converted_ranks import ConvertedRanks
from ..layer.experts import CPU, ExpertLayer, LayerForm, layout_recipe
from ..layer.layer_source import CheckpointLayers, ConvertedLayers, LayerSource
from ..layer.layers_ahead import LayerRequest, LayersAhead
from ..layer.random_layer import RandomLayer
from ..layer.rank_share import rank_share
from ..problem.model_shape import UNKNOWN_MODEL, ModelShape
from ..problem.moe_problem import MoEProblem, expert_range
from ..run.layer_variants import in_dtype
from ..run.run_machine import RunMachine, choose_backends
from ..run.run_machine import machine_of as look_at_machine

machine_of: Callable[[torch.device], RunMachine] = cache(look_at_machine)
"""The machine, looked at once: packages and drivers stay the same while a model's layers are loaded."""

WHOLE = RankShard()
"""The only rank of a deployment on one GPU."""

OWN = ("moectl", "moectl_marlin")
"""Backends that are faster than the engines' own; what has none of them is left to the engine."""


BACKEND = "MOECTL_BACKEND"
"""Environment variable that names the backend of every layer."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of the dtypes that tokens may have."""

QUANTIZED_NAMES = re.compile(r"(_packed|_scale|_scale_inv|_scale_2|scales|_blocks|qweight|qzeros|g_idx)$")
"""Ends of the names of tensors that belong to quantized matrices."""


@dataclass(frozen=True)
class ModelExperts:
    """The MoE layers of a published checkpoint or a converted directory, as a model's builder sees them.

    Attributes:
        source: the layers.
        published: the ``quantization_config`` that the checkpoint was published with; empty without one.
        expert_names: regular expressions of the full names of the experts' tensors in its files.
        others_quantized: whether other tensors than experts are quantized, and need another loader.
        model: sizes outside the experts, where the config tells them.
        random: whether layers get random weights of the same kind instead of their own; nothing is read then.
        hub_cache: the folder that takes weights from the Hub; None for the Hub's own cache.
    """

    source: LayerSource
    published: dict[str, Any]
    expert_names: tuple[str, ...]
    others_quantized: bool
    model: ModelShape = UNKNOWN_MODEL
    random: bool = False
    hub_cache: str | None = None

    @property
    def converted(self) -> bool:
        """Whether the experts are in a kernel's layout already."""
        return not isinstance(self.source, CheckpointLayers)

    @cached_property
    def at_random(self) -> ModelExperts:
        """The same layers with random weights."""
        return replace(self, random=True)

    def in_cache(self, folder: str | None) -> ModelExperts:
        """The same layers; weights that are still to come from the Hub go to `folder` (`hub_cache`)."""
        return self if folder == self.hub_cache else replace(self, hub_cache=folder)

    @cached_property
    def _here(self) -> CheckpointLayers:
        """The layers of a published checkpoint with their weights, which are downloaded unless they are here.

        Engines download them to the same place, so that there is nothing left to download once they have.
        """
        assert isinstance(self.source, CheckpointLayers)
        checkpoint = self.source.checkpoint
        if checkpoint.folder is not None:
            return self.source
        from ..checkpoint.source.hub import download_files

        name, commit = checkpoint.origin.name, checkpoint.origin.revision
        assert commit is not None, "open_experts takes no headers without a commit"
        files = sorted({info.file for info in checkpoint.tensors.values()})
        return CheckpointLayers(
            replace(checkpoint, folder=download_files(name, commit, files, self.hub_cache))
        )

    @cached_property
    def layers(self) -> frozenset[int]:
        """Numbers of the layers whose experts are here."""
        return frozenset(self.source.layers())

    def problem_of(self, layer: int, shard: RankShard = WHOLE) -> MoEProblem:
        """What rank `shard` computes of `layer`; reads no weights."""
        if isinstance(self.source, CheckpointLayers):
            return RankSlice(self.source.checkpoint.group_of(layer).problem, shard).problem
        return unpadded(self._of_rank(shard).manifest.problem_of(layer))

    def refuse_weight_on_input(
        self, library: str, layers: Iterable[int] | None = None, shard: RankShard = WHOLE
    ) -> None:
        """NoBackend if one of `layers`, by default all, applies router weights to its input, as Llama 4 does.

        Libraries multiply tokens by the weights themselves then, or have no way to say it.
        """
        for number in sorted(self.layers if layers is None else layers):
            if self.problem_of(number, shard).routing.weight_on_input:
                raise NoBackend(
                    f"layer {number} applies router weights to its input, which moectl's experts in "
                    f"{library} do not do",
                    hint=f"use {library} without moectl",
                )

    def prepared(
        self,
        layer: int,
        device: torch.device,
        dtype: str,
        backend: str = "",
        shard: RankShard = WHOLE,
    ) -> PreparedMoE:
        """The experts of `layer` on `device`, for tokens of `dtype` (``bf16`` or ``fp16``).

        Args:
            backend: a name of ``moectl list backends``; if empty, the fastest that supports the layer here.
            shard: the rank whose share of the layer is wanted.

        Raises NoBackend if no backend supports it, and what reading the layer raises.
        """
        request = LayerRequest(layer, device, dtype, backend, shard)
        if not self.random:
            self._expect_after(layer, shard)
        experts, name = self._ahead.take(request, self._opened)
        prepared = experts.prepared(name, device)
        return replace(prepared, first_expert=self.first_expert(layer, shard))

    def expect(
        self,
        layer: int,
        device: torch.device,
        dtype: str,
        backend: str = "",
        shard: RankShard = WHOLE,
    ) -> None:
        """Says that `prepared` will be asked for this.

        Tensors that go to a GPU as they are stored are allocated now, and read while the caller does other
        things; so it is called where a model's builder allocates, and in the order of layers.
        """
        if self.converted and not self.random:
            self._ahead.expect(LayerRequest(layer, device, dtype, backend, shard), self._opened)

    @cached_property
    def _ahead(self) -> LayersAhead:
        return LayersAhead()

    def _opened(self, request: LayerRequest) -> tuple[ExpertLayer, str]:
        """The layer of `request` in its dtype, and the backend for it."""
        layer, device, dtype, backend, shard = request
        experts = in_dtype(self._experts(layer, shard, device), dtype)
        supporting = self.backends(experts.problem, device, experts.layout, backend)
        return experts, backend or supporting[0]

    def stored(self, layer: int, device: torch.device, shard: RankShard = WHOLE) -> Mapping[str, Tensor]:
        """The tensors of `layer` by role on `device`, in the layout of a converted directory.

        Raises UsageError if the directory was written by another version of its layout, or for another
        deployment.
        """
        if not self.random:
            return self._current(layer, device, shard).stored(device)
        experts = self._experts(layer, shard, device)
        recipe = layout_recipe(self.layout_of(shard), RankSlice(experts.problem), experts.recipe.shapes)
        return experts.repack(recipe, device)

    def _current(self, layer: int, device: torch.device, shard: RankShard) -> ExpertLayer:
        """`layer` of a converted directory; UsageError if its layout's version is another than today's."""
        manifest, experts = self._of_rank(shard).manifest, self._experts(layer, shard, device)
        rank_slice = experts.rank_slice or RankSlice(experts.problem)
        if layout_recipe(experts.layout, rank_slice, experts.recipe.shapes) != experts.recipe:
            raise UsageError(
                f"{manifest.folder} has an older version of {experts.layout}, which no kernel reads as it is",
                hint="convert it again",
            )
        return experts

    def form_of(self, layer: int, dtype: str, backend: str, shard: RankShard = WHOLE) -> LayerForm:
        """What `prepared` would return with these arguments; reads no weights."""
        return in_dtype(self._experts(layer, shard, CPU), dtype).form_for(backend)

    def stored_form(self, layer: int, shard: RankShard = WHOLE) -> LayerForm:
        """What `stored` would return; reads no weights, and raises as it does."""
        return self._current(layer, CPU, shard).form

    def layout_of(self, shard: RankShard = WHOLE) -> str:
        """Name of the layout of a converted directory; empty for a published checkpoint."""
        return self._of_rank(shard).manifest.layout.name if self.converted else ""

    def first_expert(self, layer: int, shard: RankShard = WHOLE) -> int:
        """The number in the whole layer of the rank's first expert."""
        problem = self.problem_of(layer, shard)
        return expert_range(problem.experts, shard.ep_size, shard.ep_rank)[0]

    def _expect_after(self, layer: int, shard: RankShard) -> None:
        """Has the layer after `layer` read into the page cache while this one is loaded."""
        following = min((number for number in self.layers if number > layer), default=None)
        if following is None or self.random:
            return
        if isinstance(self.source, CheckpointLayers):
            self._here.expect(following, shard)
        else:
            self._of_rank(shard).expect(following)

    def backends(
        self, problem: MoEProblem, device: torch.device, stored: str = "", asked: str = ""
    ) -> tuple[str, ...]:
        """Backends that support `problem` on `device`, best first, or `asked` alone.

        Those that read the layout `stored` come first. They are chosen once for equal layers.

        Raises NoBackend if there is none.
        """
        key, chosen = (problem, device, stored, asked), self._chosen
        if key not in chosen:
            names = (asked,) if asked else ()
            chosen[key] = choose_backends(problem, machine_of(device), names, stored).require().names
        return chosen[key]

    @cached_property
    def _chosen(self) -> dict[tuple[MoEProblem, torch.device, str, str], tuple[str, ...]]:
        """Backends by what they were chosen for."""
        return {}

    def directory(self, shard: RankShard = WHOLE) -> ConvertedLayers:
        """The converted directory that rank `shard` reads; UsageError if there is none for it."""
        return self._of_rank(shard)

    def own_backends(
        self, device: torch.device, shard: RankShard = WHOLE
    ) -> tuple[dict[int, str], dict[str, list[int]]]:
        """Who computes the layers of rank `shard` in an engine that has experts of its own.

        Returns moectl's backend of each layer that has one of `OWN`, or the one that `BACKEND` names; and the
        layers left to the engine, by their scheme. Raises NoBackend if a layer of a converted directory would
        be left: no engine reads it itself.
        """
        asked, chosen, ours = os.environ.get(BACKEND, ""), dict[MoEProblem, str](), dict[int, str]()
        left: dict[str, list[int]] = {}
        for number in sorted(self.layers):
            problem = self.problem_of(number, shard)
            if problem not in chosen:
                chosen[problem] = asked or self._own_backend(problem, device)
            if name := chosen[problem]:
                ours[number] = name
            else:
                left.setdefault(str(problem.scheme), []).append(number)
        if left and self.converted:
            schemes = " and ".join(left)
            raise NoBackend(
                f"moectl has no kernel for {schemes} here, and no engine reads a converted directory alone",
                hint=f"serve the published checkpoint, or set {BACKEND}",
            )
        return ours, left

    def _own_backend(self, problem: MoEProblem, device: torch.device) -> str:
        try:
            name = self.backends(problem, device)[0]
        except NoBackend:
            return ""
        return name if takes_over(name, problem) or (name in OWN and self.converted) else ""

    def tensor_names(self, layers: Iterable[int]) -> re.Pattern[str]:
        """Matches the full names of the experts' tensors of `layers`, and nothing if there are none."""
        numbers = "|".join(map(str, sorted(layers)))
        names = [name.replace(r"\d+", f"(?:{numbers})", 1) for name in self.expert_names if numbers]
        return re.compile("|".join(names) or r"(?!)")

    def _experts(self, layer: int, shard: RankShard, device: torch.device) -> ExpertLayer:
        if self.random:
            return RandomLayer(self.problem_of(layer, shard), device).experts
        if isinstance(self.source, CheckpointLayers):
            return rank_share(self._here.layer(layer), shard)
        return self._of_rank(shard).layer(layer)

    def _of_rank(self, shard: RankShard) -> ConvertedLayers:
        """The converted directory of rank `shard`: this one, or one beside or below it."""
        source = self.source
        assert isinstance(source, (ConvertedLayers, ConvertedRanks))
        here = source.shard
        if (here.tp_size, here.ep_size) == (shard.tp_size, shard.ep_size):
            if isinstance(source, ConvertedRanks) or here != shard:
                source = self._ranks.rank(shard.rank)
            here = source.shard
        if here != shard or isinstance(source, ConvertedRanks):
            raise UsageError(
                f"{source.folder} was converted for {here}, this is {shard}",
                hint=f"convert with --tp-size {shard.tp_size} --ep-size {shard.ep_size}",
            )
        return source

    @cached_property
    def _ranks(self) -> ConvertedRanks:
        """The directories of all ranks: `source`, or what is above the one of a single rank."""
        source = self.source
        if isinstance(source, ConvertedRanks):
            return source
        assert isinstance(source, ConvertedLayers)
        return ConvertedRanks(source.folder.absolute().parent, source.check)


def takes_over(backend: str, problem: MoEProblem) -> bool:
    """Whether `backend` is one of `OWN`, and its kernels for such layers were checked on a GPU.

    Engines keep what nobody has checked, unless `BACKEND` says otherwise.
    """
    return backend in OWN and not TRITON.untried(problem.scheme)


def hold_nothing(layer: torch.nn.Module) -> None:
    """Gives `layer` parameters without elements where an engine expects experts that it is not to load."""
    for name in ("w13_weight", "w2_weight"):
        empty = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        layer.register_parameter(name, empty)


def default_device() -> torch.device:
    """The GPU that this process uses, else the CPU."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def open_experts(
    name: str | Path,
    *,
    revision: str | None = None,
    offline: bool = True,
    download: bool = False,
    described: bool = False,
) -> ModelExperts:
    """The experts of `name`: a converted directory, a checkpoint's directory, or a Hub id in the local cache.

    Args:
        revision: a branch, tag or commit of a Hub id; of no meaning for directories, as engines have it.
        offline: do not use the network, as with HF_HUB_OFFLINE.
        download: of a Hub id whose weights are not on this machine, config and headers are enough: weights
            are downloaded when the first are read (`ModelExperts.in_cache` says where to).
        described: nothing will be loaded: headers are enough, or the description of a built-in model.

    Raises:
        CheckpointError: it has no MoE layers, is damaged, or has tensors of a kind that is not supported.
        Unavailable: its weights are not on this machine; with `download`, not even their headers can be had.
    """
    folder = Path(name)
    if (folder / MANIFEST).exists():
        return _converted(folder)
    return _published(
        f"{name}@{revision}" if revision and not folder.is_dir() else str(name), offline, download, described
    )


def _converted(folder: Path) -> ModelExperts:
    # `moectl verify` hashes everything; a server that starts does not.
    if rank_numbers(folder):
        ranks = ConvertedRanks(folder, check=False)
        record, others = ranks.deployment.record, ranks.deployment.passthrough
        return _with_config(ranks, record.experts, source_config(folder, record), others)
    source = ConvertedLayers(folder, check=False)
    manifest = source.manifest
    names, config = expert_names(manifest.record.groups), source_config(manifest.top, manifest.record)
    return _with_config(source, names, config, manifest.passthrough)


def _with_config(
    source: LayerSource, names: Iterable[str], config: Mapping[str, Any], others: Iterable[str]
) -> ModelExperts:
    """The experts of a converted directory, with the source's `config`."""
    patterns = sorted({_pattern(name) for name in names})
    published, model = quantization_of(config), model_shape(config)
    return ModelExperts(source, published, tuple(patterns), _quantized(others), model)


def _published(name: str, offline: bool, download: bool, described: bool) -> ModelExperts:
    checkpoint = open_checkpoint(name, offline=offline)
    loadable = download and checkpoint.origin.kind in ("hub", "cache")
    if checkpoint.folder is None and not (checkpoint.tensors and (described or loadable)):
        raise weights_missing(checkpoint.origin.name)
    if not checkpoint.groups:
        raise CheckpointError(f"{name} has no MoE layers", hint="load it without moectl")
    names = tuple(sorted(set(_expert_names(checkpoint))))
    known = re.compile("|".join(names))
    others = (tensor for tensor in checkpoint.tensors if not known.fullmatch(tensor))
    published = quantization_of(checkpoint.config)
    layers, model = CheckpointLayers(checkpoint), model_shape(checkpoint.config)
    return ModelExperts(layers, published, names, _quantized(others), model)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of a config.json or of the text model in it; empty without one."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        if found := place.get("quantization_config"):
            return dict(found)
    return {}


def _expert_names(checkpoint: Checkpoint) -> Iterable[str]:
    for group in checkpoint.groups:
        for template in group.names.experts.values():
            yield _pattern(template)


def _pattern(template: str) -> str:
    escaped = re.escape(template)
    return escaped.replace(re.escape("{layer}"), r"\d+").replace(re.escape("{expert}"), r"\d+")


def _quantized(names: Iterable[str]) -> bool:
    return any(QUANTIZED_NAMES.search(name) for name in names)
