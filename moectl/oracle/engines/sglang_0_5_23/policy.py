"""Which runner SGLang 0.5.23 chooses: server arguments first, then one layer of experts."""

from ...backend import SupportQuery, only
from ...policy import Policy, ServeOptions
from .arguments import RUNNERS, resolve
from .routes import ROUTES
from .terms import EXCHANGES, VARIABLES, activation, dtype, routing

_RECORDED = frozenset(
    {
        "unquantized", "FP8", "MXFP8", "MXFP4 experts of FP8 checkpoints", "MXFP4", "NVFP4 of ModelOpt",
        "FP8 of ModelOpt", "FP8 of compressed-tensors", "integers of compressed-tensors",
        "int4 of compressed-tensors in groups of 32 on SM100", "int4 of compressed-tensors in groups of 32",
        "int4 of compressed-tensors on SM100", "GPTQ", "AWQ", "MXFP4 of Quark",
    }
)  # fmt: skip
"""Routes with recorded decisions."""


def _unrecorded(ask: SupportQuery) -> str:
    """What of an answer no recorded decision was compared with."""
    names = {
        route.name
        for route in ROUTES
        if route.storages.allows(ask.problem.storage) and ask.problem.scheme.weight.name in route.weights
    }
    parts = []
    if not names & _RECORDED:
        parts.append(f"experts of this format ({ask.problem.scheme.weight}, {ask.problem.storage})")
    if ask.device.platform not in ("cuda", "rocm", "cpu"):
        parts.append(f"{ask.device.platform} devices")
    if ask.problem.lora:
        parts.append("LoRA adapters on experts")
    if ask.problem.parallel.eplb:
        parts.append("expert load balancing")
    return ", ".join(parts)


POLICY = Policy(
    name="sglang-0.5.23",
    routes=ROUTES,
    platforms=frozenset({"cuda", "rocm", "cpu"}),
    accepted_names=only("auto", *RUNNERS),
    dtype=dtype,
    activation=activation,
    routing=routing,
    exchanges=EXCHANGES | {"none"},
    default_exchange="none",
    serve=ServeOptions(
        command="python -m sglang.launch_server --model-path {}",
        backend="python -m sglang.launch_server --moe-runner-backend {}",
        tensor="--tp-size {}",
        data="--attn-dp-size {}",
        expert="--ep-size {}",
        exchange="--moe-a2a-backend {}",
        dtype="--dtype {}",
        pipeline="--pp-size {}",
        adapters="--enable-lora",
        tensor_spans_all=True,
    ),
    arguments=resolve,
    unrecorded=_unrecorded,
    variables=VARIABLES,
)
