"""Which class TensorRT-LLM's resolver chooses: those of a backend in priority order, then CUTLASS'."""

from __future__ import annotations

from collections.abc import Callable

from ....problem.number_formats import NUMBER_FORMATS
from ...backend import ANY, Backend, SupportQuery, only
from ...decision import DEPLOYMENT, Candidate
from ...policy import Policy, ServeOptions
from ...route import Condition, Exclusion, LateFailure, Order, Route
from ...server_arguments import ServerArguments
from .automatic import falls_back
from .backends import BY_EXPERTS, FAMILIES, backends
from .quantization import ALGORITHMS, asked, read
from .terms import SITU_GROUPS, VARIABLES, activation, attention_dp, dtype, routing

COMMIT = "d1fce83"
"""The commit of NVIDIA/TensorRT-LLM whose resolver was read, in short."""


def _considered(backend: str) -> Callable[[SupportQuery], bool]:
    """Whether the resolver asks the classes of `backend`."""

    def holds(ask: SupportQuery) -> bool:
        family = asked(ask)
        return family == backend or (backend == "cutlass" and falls_back(ask, family))

    return holds


def _excluded(backend: Backend) -> Exclusion:
    considered = _considered(backend.name)
    return Exclusion(
        (backend,),
        f"only with moe_config.backend {backend.engine_name}",
        lambda ask: not considered(ask),
        by_name=True,
    )


WIDEEP = Condition(
    "deprecated backend",
    lambda ask: ask.request == "wideep",
    lambda ask: (
        "TensorRT-LLM has no backend WIDEEP any more: wide expert parallelism and load balancing are "
        "those of DEEPGEMM (FP8 in blocks), TRTLLM, CUTEDSL and CUTLASS"
    ),
)


def _unread(kind: str) -> Condition:
    return Condition("checkpoint", lambda ask: read(ask).kind == kind, lambda ask: read(ask).says, kind)


UNREAD = tuple(map(_unread, ("NotImplementedError", "AssertionError", "TypeError", "ValueError")))
"""Checkpoints that are not read, by the class of the exception."""


def _chosen(candidate: Candidate | None) -> str:
    return candidate.variant.experts if candidate is not None else ""


def _late(
    name: str,
    holds: Callable[[SupportQuery, str], bool],
    says: Callable[[SupportQuery, str], str],
    kind: str = "ValueError",
) -> LateFailure:
    return LateFailure(
        name,
        lambda ask, candidate: candidate is not None and holds(ask, _chosen(candidate)),
        lambda ask, candidate: says(ask, _chosen(candidate)),
        kind,
    )


def _separate_routing(ask: SupportQuery, experts: str) -> bool:
    """True if experts are selected outside of the kernels, which EPLB needs."""
    inside = "TrtllmGen" in experts and experts != "FlashinferTrtllmGenBf16Impl"
    return not inside or attention_dp(ask)


LATE_FAILURES = (
    _late(
        "load balancing",
        lambda ask, experts: ask.problem.parallel.eplb and not BY_EXPERTS[experts].eplb,
        lambda ask, experts: f"{experts} does not support expert load balancing (EPLB)",
    ),
    _late(
        "load balancing",
        lambda ask, experts: ask.problem.parallel.eplb and not _separate_routing(ask, experts),
        lambda ask, experts: f"{experts} supports load balancing (EPLB) only with attention data parallelism",
    ),
    _late(
        "router weights",
        lambda ask, experts: ask.problem.routing.weight_on_input and not BY_EXPERTS[experts].weighted_input,
        lambda ask, experts: f"{experts} does not support router weights on the experts' input",
    ),
    _late(
        "experts on ranks",
        lambda ask, experts: (
            not ask.problem.parallel.eplb
            and ask.problem.experts % ask.problem.parallel.ep_size != 0
            and not BY_EXPERTS[experts].uneven
        ),
        lambda ask, experts: (
            f"{experts} needs as many experts on every rank; {ask.problem.experts} experts are spread over "
            f"{ask.problem.parallel.ep_size} ranks"
        ),
    ),
    _late(
        "slices of SiTU experts",
        lambda ask, experts: (
            "TrtllmGen" in experts
            and activation(ask.problem) == "SiTu"
            and ask.problem.parallel.tp_size > 1
            and ask.problem.dims.intermediate % SITU_GROUPS[read(ask).algorithm] != 0
        ),
        lambda ask, experts: (
            f"{experts} needs whole groups of {SITU_GROUPS[read(ask).algorithm]} on every rank; one rank has "
            f"{ask.problem.dims.intermediate} of the intermediate size"
        ),
    ),
    _late(
        "clamp",
        lambda ask, experts: (
            experts == "FlashinferTrtllmGenBf16Impl" and ask.problem.activation.limit is not None
        ),
        lambda ask, experts: f"{experts} does not clamp activations",
        "AssertionError",
    ),
)
"""What building the layer fails on after the choice."""


def _route(algorithm: str) -> Route:
    """The route of experts that are read as `algorithm`; empty: of those that are not read."""
    ranked = backends(algorithm)
    return Route(
        name=algorithm or "unread checkpoints",
        method=algorithm or "QuantConfig",
        storages=ANY,
        weights=frozenset(NUMBER_FORMATS),
        when=Condition(
            "quantization algorithm",
            lambda ask: read(ask).algorithm == algorithm,
            lambda ask: f"experts are read as {algorithm}",
        ),
        orders=(Order(ranked),),
        exclusions=tuple(map(_excluded, ranked)),
        names={**{backend.name: (backend,) for backend in ranked}, "wideep": ()},
        warned_fallbacks=tuple(backend for backend in ranked if backend.name == "cutlass"),
        refusals=(*UNREAD, WIDEEP),
        late_failures=LATE_FAILURES,
        fails="ValueError",
    )


def _arguments(ask: SupportQuery) -> ServerArguments:
    """AUTO is resolved; the communication method is chosen when the model runs."""
    reading = read(ask)
    notes = (reading.note,) if reading.note else ()
    if not ask.request and reading.algorithm:
        of = ask.model.architecture or "this model"
        notes = (
            f"moe_config.backend AUTO is {asked(ask).upper()} for {of} with {reading.algorithm} experts on "
            f"{ask.device.arch}",
            *notes,
        )
    return ServerArguments(ask.request, ask.problem.parallel.all2all, notes)


SPLIT_ATTENTION = Condition(
    DEPLOYMENT,
    lambda ask: attention_dp(ask) and ask.problem.parallel.tp > 1,
    lambda ask: (
        "attention data parallelism of TensorRT-LLM spans all tensor-parallel ranks; state --dp "
        f"{ask.problem.parallel.ranks} without --tp"
    ),
)

POLICY = Policy(
    name=f"tensorrt-llm-{COMMIT}",
    routes=tuple(_route(algorithm) for algorithm in (*ALGORITHMS, "")),
    platforms=frozenset({"cuda"}),
    accepted_names=only("auto", "wideep", *FAMILIES),
    dtype=dtype,
    activation=activation,
    routing=routing,
    exchanges=frozenset({"auto"}),
    default_exchange="auto",
    serve=ServeOptions(
        command="trtllm-serve {}",
        backend="trtllm-serve --config <(echo 'moe_config: {{backend: {}}}')",
        tensor="--tp_size {}",
        data="--enable_attention_dp",
        expert="--ep_size {}",
        exchange="",
        dtype="--config <(echo 'dtype: {}')",
        pipeline="--pp_size {}",
        tensor_spans_all=True,
        spelling=str.upper,
    ),
    arguments=_arguments,
    unrecorded=lambda ask: f"TensorRT-LLM's rules were read at commit {COMMIT}, and not run",
    variables=VARIABLES,
    refusals=(SPLIT_ATTENTION,),
)
