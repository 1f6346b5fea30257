"""How GPUs are connected, as the stand-ins of NVML and nvidia-smi tell it."""

import pytest

from moectl.environment.gpu_links import gpu_links, link_words, parse_topology

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\t X
"""
ROW = "{0}, GPU-{0}, NVIDIA H200, 143771, 9.0, 580.95.05, Disabled"


def board(number: int, node: int = 0, links: tuple[str, ...] = ()) -> dict:
    bus = f"0000000{number}:1B:00.0"
    return {"uuid": f"GPU-{number}", "bus": bus, "node": node, "links": links}


def test_switches_connect_all_gpus(bench):
    switched = ("0000:05:00.0",) * 18
    bench.nvml(*({**board(i, links=switched), "bus": f"00000000:{i}B:00.0"} for i in range(3)))
    assert gpu_links() == {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}
    assert link_words(gpu_links()) == "NV18 (18 NVLinks): all pairs"


def test_bridges_connect_pairs_and_pcie_the_rest(bench):
    def bridged(number: int, other: int, node: int) -> dict:
        links = (f"0000:{other}B:00.0",) * 4 + ("down",)
        return {**board(number, node, links), "bus": f"00000000:{number}b:00.0".encode()}

    bench.nvml(bridged(0, 1, 0), bridged(1, 0, 0), bridged(2, 3, 1), bridged(3, 2, 1))
    links = gpu_links()
    assert links[0, 1] == links[2, 3] == "NV4"
    assert {links[pair] for pair in ((0, 2), (0, 3), (1, 2), (1, 3))} == {"SYS"}
    assert link_words(links).startswith("NV4 (4 NVLinks): 0-1, 2-3; SYS (")


def test_gpus_at_one_address_in_several_domains_are_told_apart(bench):
    """As on Grace, where each GPU has a PCI domain of its own."""

    def grace(number: int) -> dict:
        links = tuple(f"000{other}:01:00.0" for other in range(1, 5) if other != number for _ in range(6))
        return {**board(number, links=links), "bus": f"0000000{number}:01:00.0"}

    bench.nvml(*map(grace, range(1, 5)))
    assert set(gpu_links().values()) == {"NV6"} and len(gpu_links()) == 6


def test_addresses_that_the_driver_does_not_tell_are_no_direct_link(bench):
    bench.nvml(*({**board(i, node=i, links=("0000:1B:00.0", None)), "bus": None} for i in range(2)))
    assert gpu_links() == {(0, 1): "NV2"}


def test_without_nvlinks_the_pcie_topology_is_told(bench):
    bench.nvml({**board(0), "bus": "0:1:0"}, {**board(1), "bus": "0:2:0"})
    assert gpu_links() == {(0, 1): "PIX"}


def test_without_nvml_nvidia_smi_is_asked(bench):
    bench.gpus("\n".join(ROW.format(i) for i in range(3)), topology=TOPOLOGY)
    assert gpu_links() == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "SYS"}


@pytest.mark.parametrize("text", ["", "No devices were found", ROW.format(0), "GPU0 GPU1\nGPU0 X ?\nGPU9 Y"])
def test_what_is_no_topology_tells_nothing(text):
    assert parse_topology(text) == {}
    assert link_words({}) == ""


def test_one_gpu_or_a_driver_that_fails_has_no_links(bench):
    bench.nvml(board(0))
    assert gpu_links() == {}
    bench.nvml(board(0), board(1), error="Unknown Error")
    assert gpu_links() == {}
