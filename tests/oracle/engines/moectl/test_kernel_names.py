"""Every backend of moectl has a name that the field uses for its kernels."""

from moectl.oracle.engines.moectl import MOECTL
from moectl.oracle.engines.moectl.kernel_names import KERNEL_NAMES

EXPERTS = {
    variant.experts for route in MOECTL.policy.routes for b in route.backends() for variant in b.variants
}


def test_every_backend_has_a_name_and_every_name_a_backend() -> None:
    assert sorted(name for name in EXPERTS if not MOECTL.kernel_name(name)) == []
    used = {next(prefix for prefix, _ in KERNEL_NAMES if name.startswith(prefix)) for name in EXPERTS}
    assert used == {prefix for prefix, _ in KERNEL_NAMES}


def test_own_kernels_are_told_from_those_of_libraries() -> None:
    assert MOECTL.kernel_name("grouped_gemm") == "own Triton kernels"
    assert MOECTL.kernel_name("matmul_ogs") == "OpenAI triton_kernels"
