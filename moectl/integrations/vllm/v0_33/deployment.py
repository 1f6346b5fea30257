"""This process's place in a deployment of vLLM: its rank, and what is refused there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from ....convert.rank_slice import RankShard
from ....errors import NoBackend, UsageError
from ....kernels.prepared_layer import local_ids
from ....problem.moe_problem import MoEProblem
from ..limits import LIMITS, refusals, sentence


def shard_of(moe: FusedMoEConfig) -> RankShard:
    """This rank among those that share the layer's experts."""
    parallel = moe.moe_parallel_config
    return RankShard(parallel.tp_size, parallel.tp_rank, parallel.ep_size, parallel.ep_rank)


def options_of(config: VllmConfig | None, moe: FusedMoEConfig) -> Mapping[str, object]:
    """What vLLM was told, by the options of `LIMITS`."""
    parallel = moe.moe_parallel_config
    batched = "deepep_low_latency" if parallel.use_batched_activation_format else None
    options: dict[str, object] = {
        "--enable-eplb": parallel.enable_eplb,
        "--enable-lora": moe.is_lora_enabled,
        "--all2all-backend": batched,
        "--moe-backend": moe.moe_backend,
    }
    if config is not None:
        world, offload = config.parallel_config, config.offload_config
        options |= {
            "--enable-elastic-ep": world.enable_elastic_ep,
            "--expert-placement-strategy": world.expert_placement_strategy if parallel.ep_size > 1 else None,
            "--all2all-backend": batched or (world.all2all_backend if parallel.use_all2all_kernels else None),
            "--load-format": config.load_config.load_format,
            "--weight-transfer-config": config.weight_transfer_config is not None,
            "--cpu-offload-gb": offload.uva.cpu_offload_gb > 0,
            "--offload-group-size": offload.prefetch.offload_group_size > 0,
        }
    assert options.keys() <= LIMITS.keys()
    return options


def refuse(moe: FusedMoEConfig, problem: MoEProblem, number: int) -> None:
    """Raises NoBackend with every reason why moectl's experts cannot serve this deployment."""
    options = options_of(get_current_vllm_config_or_none(), moe)
    if limits := refusals(options):
        says, hint = sentence(limits)
        raise NoBackend(says, hint=hint)
    ours = (problem.experts, problem.top_k, problem.dims.hidden)
    theirs = (moe.num_experts, moe.experts_per_token, moe.hidden_dim)
    if ours != theirs:
        raise UsageError(f"layer {number} has experts, top-k, hidden size {ours}; vLLM's model has {theirs}")


def dummy() -> bool:
    """Whether vLLM was told to load nothing (``--load-format dummy``)."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def download_folder() -> str | None:
    """Where vLLM downloads weights to (``--download-dir``); None for the Hub's own cache."""
    config = get_current_vllm_config_or_none()
    return None if config is None else config.load_config.download_dir


def most_tokens() -> int:
    """The most tokens that vLLM's scheduler gives a layer of experts, those of all data-parallel ranks."""
    config = get_current_vllm_config()
    return int(config.scheduler_config.max_num_batched_tokens * config.parallel_config.data_parallel_size)


def check_map(expert_map: Tensor | None, problem: MoEProblem, first: int, number: int) -> None:
    """NoBackend unless vLLM gives this rank the consecutive experts from `first`."""
    ids = torch.arange(problem.experts)
    if expert_map is not None and not torch.equal(
        expert_map.cpu().to(ids.dtype), local_ids(ids, first, problem.local_experts)
    ):
        raise NoBackend(
            f"vLLM places the experts of layer {number} otherwise than in consecutive ranges",
            hint=LIMITS["--expert-placement-strategy"].hint,
        )
