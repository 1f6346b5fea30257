"""The operating system, C library, CPU and container, from a stand-in machine's files."""

import platform

import pytest

from moectl.environment import host
from moectl.environment.host import find_host


@pytest.mark.parametrize("quote", ['"', "'", ""])
def test_the_system_is_named_by_its_release_file(bench, quote):
    named = f"PRETTY_NAME={quote}Ubuntu 24.04.3 LTS{quote}"
    bench.file("etc/os-release", f'NAME="Ubuntu"\n{named}\nID=ubuntu\n')
    found = find_host({})
    assert found.system == "Ubuntu 24.04.3 LTS"
    assert (found.kernel, found.machine) == (platform.release(), platform.machine())
    assert found.cores > 0 and found.memory_bytes > 0 and found.cpu


def test_without_a_release_file_the_kernel_names_it(bench):
    assert find_host({}).system in (platform.system(), f"macOS {platform.mac_ver()[0]}")


@pytest.mark.parametrize(
    ("file", "text", "env", "container"),
    [
        (".dockerenv", "", {}, "Docker"),
        ("run/.containerenv", "", {}, "Podman"),
        ("proc/1/cgroup", "0::/kubepods/besteffort/pod1\n", {}, "a container (kubepods)"),
        (".dockerenv", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ("proc/1/cgroup", "0::/init.scope\n", {}, ""),
    ],
)
def test_a_container_is_recognized(bench, file, text, env, container):
    bench.file(file, text)
    assert find_host(env).container == container


def test_windows_with_linux_is_told(bench, monkeypatch):
    monkeypatch.setattr(host.platform, "release", lambda: "5.15.0-microsoft-standard-WSL2")
    assert find_host({}).container == "WSL"


def test_a_system_without_glibc_is_still_described(bench, monkeypatch):
    monkeypatch.setattr(host.os, "confstr", lambda name: (_ for _ in ()).throw(ValueError(name)))
    monkeypatch.setattr(host.platform, "libc_ver", lambda: ("", ""))
    assert find_host({}).libc == ""
