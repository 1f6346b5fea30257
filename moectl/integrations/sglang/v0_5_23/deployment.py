"""This process's place in a deployment of SGLang: its rank, and how many tokens it is given."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel, get_schedule, max_prefill_buffer_tokens

from ....convert.rank_slice import RankShard

MOST_REQUESTS = 4096
"""SGLang's own limit of requests that a rank of attention decodes at a time."""


def shard_of(place: Any) -> RankShard:
    """The rank among those that share experts of `place`: a layer of them, or SGLang's parallel context."""
    return RankShard(place.moe_tp_size, place.moe_tp_rank, place.moe_ep_size, place.moe_ep_rank)


def most_tokens() -> int:
    """The most tokens that SGLang's scheduler gives a layer of experts, those of all ranks of attention.

    Only a prompt that is longer than ``--max-prefill-tokens`` and is not cut into chunks has more.
    """
    schedule, ranks = get_schedule(), get_parallel().attn_dp_size
    prompts = max_prefill_buffer_tokens() or schedule.max_prefill_tokens  # 0 without chunks
    requests = schedule.max_running_requests or ranks * MOST_REQUESTS
    return int(max(ranks * prompts, requests))
