"""The device that layers run on: a GPU that is there and cannot be used is never replaced by the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moectl.environment.named_devices import find_device
from moectl.environment.nvidia import DriverFailure
from moectl.errors import Unavailable
from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.problem.published_layers import SCHEMES, model_problem
from moectl.run import POLICY, RunMachine, this_machine
from moectl.run.run_machine import machine_of

H200 = "0, GPU-aaaa, NVIDIA H200, 143771, 9.0, 580.95.05, Disabled"


@pytest.fixture
def blind_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees no GPU and is built without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


def test_a_torch_without_cuda_beside_a_gpu_is_an_error(bench, blind_torch, monkeypatch) -> None:
    assert this_machine().device.platform == "cpu"
    bench.gpus(H200)
    for asked in (None, "cuda"):
        with pytest.raises(Unavailable) as caught:
            this_machine(asked)
        assert caught.value.what == (
            f"this machine has NVIDIA H200, but torch {torch.__version__} is built without CUDA"
        )
        assert "--device cpu" in caught.value.hint
    assert this_machine("cpu").device.platform == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(Unavailable, match=r"is built for 13\.0 and sees no GPU. Update the driver"):
        this_machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().device.platform == "cpu"


def test_a_driver_that_fails_is_an_error_unless_the_cpu_was_asked_for(bench, blind_torch) -> None:
    bench.failing_gpus("cannot communicate with the driver")
    for asked in (None, "cuda"):
        with pytest.raises(DriverFailure, match="nvidia-smi: cannot communicate with the driver"):
            this_machine(asked)
    assert this_machine("cpu").torch == torch.device("cpu")


def test_a_gpu_that_torch_uses_needs_no_tools_of_the_driver(bench, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Seen(name="NVIDIA H200"))
    bench.file("dev/nvidia0")
    machine = this_machine()
    assert machine.torch == torch.device("cuda")
    assert machine.device.sms == find_device("h200").sms
    assert (machine.device.arch, machine.device.memory_bytes) == ("sm90", 143771 << 20)


class Seen(SimpleNamespace):
    """What torch says of a GPU."""

    major, minor, total_memory, multi_processor_count = 9, 0, (143771 << 20) + 5, 100


@pytest.fixture
def torch_on(monkeypatch: pytest.MonkeyPatch):
    """Has torch use a GPU of this name."""

    def use(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Seen(name=name))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return use


def test_a_process_that_uses_a_gpu_asks_no_driver_which_one(bench, torch_on) -> None:
    torch_on("NVIDIA H200")
    bench.failing_gpus("nobody is to ask")
    machine = machine_of(torch.device("cuda", 1))
    assert machine.torch == torch.device("cuda", 1)
    assert (machine.device.name, machine.device.arch) == ("NVIDIA H200", "sm90")
    # What a slice of a GPU is, the driver knows better.
    torch_on("NVIDIA H200 MIG 1g.18gb")
    bench.gpus(H200)
    assert machine_of(torch.device("cuda", 1)).device.name == "NVIDIA H200"


def test_torch_says_of_a_gpu_what_is_not_published(torch_on, monkeypatch) -> None:
    torch_on("NVIDIA of tomorrow")
    device = machine_of(torch.device("cuda")).device
    assert (device.sms, device.bandwidth) == (100, 0.0)
    for name, value in (("memory_clock_rate", 2_619_000), ("memory_bus_width", 5120)):
        monkeypatch.setattr(Seen, name, value, raising=False)
    assert machine_of(torch.device("cuda")).device.bandwidth == pytest.approx(3.352e12, rel=1e-4)


def test_a_process_cannot_use_what_torch_does_not_see(blind_torch) -> None:
    for device in ("cuda", "meta"):
        with pytest.raises(Unavailable, match="torch sees no CUDA device"):
            machine_of(torch.device(device))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_decides_as_a_machine_whose_driver_was_asked(bench, torch_on, monkeypatch, scheme: str) -> None:
    torch_on("NVIDIA H200")
    bench.gpus(H200)
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
    problem = model_problem("qwen3-30b", scheme)

    def usable(machine: RunMachine) -> list[tuple[str, bool]]:
        decision = select(problem, machine.device, machine.packages, policy_named(POLICY))
        return [(candidate.backend.name, candidate.usable) for candidate in decision.candidates]

    assert usable(machine_of(torch.device("cuda"))) == usable(this_machine())
