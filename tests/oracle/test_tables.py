"""Tables of backends and policies: sizes as recorded, and every name in them known."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moectl.environment.package_probes import TOOLS
from moectl.oracle.backend import GROUPS, Backend, ExpertsClass
from moectl.oracle.checks import CHECKS
from moectl.oracle.engines.vllm_0_33_0.routes.terms import routing as engine_routing
from moectl.oracle.format_keys import exact_key, group32_key
from moectl.oracle.registry import ENGINES, known_packages
from moectl.oracle.route import Route
from moectl.problem.layouts import LAYOUTS
from moectl.problem.moe_problem import Dims, MoEProblem, Routing
from moectl.problem.padding import RULES
from moectl.problem.schemes import FULL, MXFP4, Scheme, WeightFormat, int_format

PROBES = known_packages()


def routes() -> Iterator[Route]:
    for engine in ENGINES.values():
        for route in engine.policy.routes:
            yield route
            yield from route.request_routes.values()


def listed(route: Route) -> list[Backend]:
    found = [backend for order in route.orders for backend in order.backends]
    found += [backend for named in route.names.values() for backend in named]
    return found + [row.backend for row in route.assigned] + list(route.on_request)


def backends() -> dict[int, Backend]:
    return {id(backend): backend for route in routes() for backend in listed(route)}


def variants() -> list[tuple[Backend, ExpertsClass]]:
    return [(backend, variant) for backend in backends().values() for variant in backend.variants]


def test_layout_names_are_spelled_as_in_the_padding_table() -> None:
    named = {form.layout for backend in backends().values() for form in backend.forms}
    assert named >= {name for name in RULES if not LAYOUTS[name].instead_of and not LAYOUTS[name].by_values}


def test_who_reads_a_layout_is_said_by_both_tables() -> None:
    wanted = {(form.layout, backend.name) for backend in backends().values() for form in backend.forms}
    known = {(layout, name) for layout, name in wanted if layout in LAYOUTS}
    readers = {
        (layout, name)
        for layout, facts in LAYOUTS.items()
        if facts.target == "moectl" or (not facts.instead_of and not facts.by_values)
        for reader in facts.readers
        if reader.engine in ("vLLM", "moectl")
        for name in reader.backends
    }
    assert known == readers
    for facts in LAYOUTS.values():
        assert not facts.instead_of or set(facts.readers) <= set(LAYOUTS[facts.instead_of].readers)


def test_needed_packages_and_symbols_are_probed() -> None:
    for backend, variant in variants():
        for need in variant.capability.needs:
            assert need.package in (*PROBES, *TOOLS), backend.name
            if need.symbol:
                probe = PROBES[need.package]
                assert need.symbol in (*probe.symbols, *probe.own), need


def test_questions_have_names_groups_and_no_doubles() -> None:
    assert len({check.question for check in CHECKS}) == len(CHECKS)
    known = {check.question for check in CHECKS}
    for backend, variant in variants():
        assert {rule.group for rule in variant.capability.rules} <= set(GROUPS), backend.name
        assert set(variant.capability.codes) <= known, backend.name


KEYS = {
    *(
        key(int_format(bits, group, zero_point=asymmetric))
        for key in (exact_key, group32_key)
        for bits in (4, 8)
        for group in (32, 64, 128, FULL)
        for asymmetric in (False, True)
    ),
    *(
        exact_key(WeightFormat(name, 8, block))
        for name, block in [
            ("bf16", (0, 0)),
            ("fp8", (128, 128)),
            ("fp8", (1, FULL)),
            ("fp8", (FULL, FULL)),
            ("int8", (FULL, FULL)),
            ("mxfp8", (1, 32)),
            ("mxfp4", (1, 32)),
            ("nvfp4", (1, 16)),
        ]
    ),
}


def test_offered_formats_are_ones_that_a_checkpoint_can_have() -> None:
    for backend, variant in variants():
        for offer in variant.capability.formats or ():
            for name in offer.weights:
                begins = name.endswith("*") and any(key.startswith(name[:-1]) for key in KEYS)
                assert begins or name in KEYS, (backend.name, name)


@pytest.mark.parametrize(
    ("routing", "name"),
    [
        (Routing(), "RenormalizeNaive"),
        (Routing(renormalize=False), "Default"),
        (Routing("sigmoid"), "SigmoidRenorm"),
        (Routing("sigmoid", correction_bias=True), "MiniMax2"),
        (Routing("sigmoid", correction_bias=True, groups=1), "DeepSeekV3"),
        (Routing("sigmoid", correction_bias=True, renormalize=False), "Unspecified"),
        (Routing("sqrtsoftplus", correction_bias=True), "DeepseekV4"),
    ],
)
def test_routing_names(routing: Routing, name: str) -> None:
    problem = MoEProblem(Dims(256, 256), 8, 2, Scheme(MXFP4), routing=routing)
    assert engine_routing(problem) == name


def test_records_print_as_constructor_calls() -> None:
    problem = MoEProblem(Dims(256, 256), 8, 2, Scheme(MXFP4))
    names = {"MoEProblem": MoEProblem, "Dims": Dims, "Scheme": Scheme, "WeightFormat": WeightFormat}
    from moectl.problem import moe_problem as module
    from moectl.problem import schemes

    assert eval(repr(problem), {**vars(module), **vars(schemes), **names}) == problem
    assert replace(problem, bias=True) != problem
