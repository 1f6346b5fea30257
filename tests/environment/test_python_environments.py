"""Packages of other Python environments, found without running their interpreters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moectl.environment.installed_packages import (
    distribution_version,
    find_package,
    find_tool,
    package_folder,
)
from moectl.environment.package_probes import Probe
from moectl.environment.python_environments import PythonEnvironment, python_environment
from moectl.errors import UsageError


def package(site: Path, name: str, version: str) -> Path:
    """Installs a package that fails when it is imported."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise SystemExit('imported')\ndef kernel(): ...\n")
    metadata = site / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return site / name


def interpreter(folder: Path, name: str = "python") -> Path:
    """A file where an interpreter would be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    return folder / name


def names(environment: PythonEnvironment, root: Path) -> list[str]:
    return [Path(folder).resolve().relative_to(root.resolve()).as_posix() for folder in environment.folders]


def test_packages_of_a_virtual_environment(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.12/site-packages"
    package(site, "engine", "1.2")
    (tmp_path / "venv/lib/python3.9/site-packages").mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /nowhere\nversion_info = 3.12.1.final.0\n")
    interpreter(tmp_path / "venv/bin")
    found = python_environment(tmp_path / "venv")
    assert found.programs == str(tmp_path / "venv/bin")
    assert found.folders == python_environment(tmp_path / "venv/bin/python").folders
    assert names(found, tmp_path) == ["venv/lib/python3.12/site-packages"]
    assert package_folder("engine", found) == site / "engine"
    assert package_folder("engine") is None and package_folder("pytest", found) is None
    assert distribution_version("engine", "engine", found) == "1.2"
    assert distribution_version("engine") == ""
    probed = find_package("engine", Probe(("engine",), "engine", symbols=("kernel", "other")), found)
    assert (probed.version, probed.lacks) == ("1.2", ("other",))
    assert not find_package("engine", Probe(("engine",), "engine")).present
    assert "engine" not in sys.modules


def test_programs_of_an_environment_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv/lib/python3.12/site-packages").mkdir(parents=True)
    interpreter(tmp_path / "venv/bin")
    for folder in ("venv/bin", "other"):
        interpreter(tmp_path / folder, "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert find_tool("ninja", python_environment(tmp_path / "venv")).path == str(tmp_path / "venv/bin/ninja")
    assert find_tool("ninja").path == str(tmp_path / "other/ninja")


def test_packages_of_the_installation_below_an_environment(tmp_path: Path) -> None:
    (tmp_path / "venv/lib/python3.12/site-packages").mkdir(parents=True)
    package(tmp_path / "base/lib/python3.12/site-packages", "engine", "2")
    interpreter(tmp_path / "base/bin", "python3.12")
    interpreter(tmp_path / "venv/bin")
    settings = f"home = {tmp_path}/base/bin\nversion = 3.12.3\ninclude-system-site-packages = {{}}\n"
    for included, version in (("false", ""), ("true", "2")):
        (tmp_path / "venv/pyvenv.cfg").write_text(settings.format(included))
        assert distribution_version("engine", "", python_environment(tmp_path / "venv")) == version


def test_a_link_to_an_interpreter_is_its_installation_unless_it_is_an_environments(tmp_path: Path) -> None:
    package(tmp_path / "base/lib/python3.12/site-packages", "engine", "2")
    real = interpreter(tmp_path / "base/bin", "python3.12")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/python3").symlink_to(real)
    assert distribution_version("engine", "", python_environment(tmp_path / "links/python3")) == "2"
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(real)
    package(tmp_path / "venv/lib/python3.12/site-packages", "engine", "3")
    package(tmp_path / "venv/lib/python3.11/site-packages", "engine", "4")
    assert distribution_version("engine", "", python_environment(tmp_path / "venv")) == "3"


def test_a_distributions_own_python_has_further_folders(tmp_path: Path) -> None:
    interpreter(tmp_path / "usr/bin", "python3.11")
    for folder in ("lib/python3/dist-packages", "local/lib/python3.11/dist-packages", "lib/python3.11"):
        (tmp_path / "usr" / folder).mkdir(parents=True, exist_ok=True)
    assert names(python_environment(tmp_path / "usr/bin/python3.11"), tmp_path) == [
        "usr/local/lib/python3.11/dist-packages",
        "usr/lib/python3/dist-packages",
    ]


def test_paths_and_editable_installs_are_followed_and_no_code_is_run(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.12/site-packages"
    package(tmp_path / "by path", "engine", "1")
    source = tmp_path / "source tree"
    (source / "src/kernels").mkdir(parents=True)
    (source / "src/kernels/__init__.py").write_text("__version__ = '7'\n")
    metadata = site / "kernels-7.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: kernels\nVersion: 7\n")
    url = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (metadata / "direct_url.json").write_text(json.dumps(url))
    ran = tmp_path / "ran"
    (site / "paths.pth").write_text(
        f"# comment\n{tmp_path}/by path\n/nowhere\nimport pathlib; pathlib.Path({str(ran)!r}).touch()\n"
    )
    interpreter(tmp_path / "venv/bin")
    found = python_environment(tmp_path / "venv")
    assert distribution_version("engine", "", found) == "1"
    assert package_folder("kernels", found) == source / "src/kernels"
    assert not ran.exists()
    for broken in ("[]", "{", '{"url": 1, "dir_info": {"editable": true}}', '{"url": "x", "dir_info": []}'):
        (metadata / "direct_url.json").write_text(broken)
        assert package_folder("kernels", python_environment(tmp_path / "venv")) is None


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        python_environment(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="neither a Python interpreter nor an environment"):
        python_environment(tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UsageError, match="neither a Python interpreter"):
        python_environment(tmp_path / "model.safetensors")
    alone = interpreter(tmp_path / "alone" / "bin")
    with pytest.raises(UsageError, match="no site-packages directory was found under"):
        python_environment(alone)


def test_this_environment_is_found_by_its_interpreter() -> None:
    found = python_environment(sys.executable)
    assert distribution_version("pytest", "", found) == pytest.__version__
    assert package_folder("pytest", found) == package_folder("pytest")
