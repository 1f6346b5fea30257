"""Acme's order, its exchanges and its command line."""

from moectl.oracle.backend import ANY, only
from moectl.oracle.policy import Policy, ServeOptions
from moectl.oracle.route import Order, Route

from .backends import BATCHED, QUICK, STEADY, VARIABLES

POLICY = Policy(
    name="acme-1.0",
    routes=(
        Route(
            name="four bits",
            method="FourBits",
            storages=ANY,
            weights=frozenset({"mxfp4"}),
            rounds=True,
            orders=(Order((QUICK, STEADY, BATCHED)),),
            names={"quick": (QUICK,), "steady": (STEADY,), "steady_batched": (BATCHED,)},
            batched_twins=((STEADY, BATCHED),),
        ),
    ),
    platforms=frozenset({"cuda"}),
    accepted_names=only("quick", "steady", "steady_batched"),
    dtype=lambda problem, device: problem.dtype,
    activation=lambda problem: problem.activation.name,
    routing=lambda problem: problem.routing.scoring,
    exchanges=frozenset({"ring", "mesh"}),
    default_exchange="ring",
    batching_exchanges=frozenset({"mesh"}),
    variables=VARIABLES,
    serve=ServeOptions(
        command="acme up {}",
        backend="acme up --runner {}",
        tensor="--slices {}",
        data="--copies {}",
        expert="--spread {}",
        exchange="--over {}",
        dtype="--as {}",
    ),
)
