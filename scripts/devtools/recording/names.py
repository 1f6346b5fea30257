"""Names that vLLM's releases know: environment variables, backends, exchanges, as written in their source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from packaging.requirements import Requirement
from packaging.version import Version

FILES = {
    "vllm/envs.py": {"variables": "environment_variables"},
    "vllm/config/kernel.py": {"moe_backend": "MoEBackend"},
    "vllm/config/parallel.py": {"all2all_backend": "All2AllBackend"},
}
"""By file of the wheel: what is read from it, and the name that it is assigned to there."""
VARIABLES, DEPRECATED, DEPRECATION = "vllm/envs.py", "deprecated", "deprecated_env"
"""Variables whose reading is wrapped by a function of that name are deprecated."""
PACKAGES = ("flashinfer-python", "humming-kernels")
"""Packages whose minimum version depends on the release."""
TUNED = "vllm/model_executor/layers/fused_moe/configs/"
"""The folder of the wheel with the tuned files that it ships."""
Spans = dict[str, list[list[str]]]
"""By name, the first release with it and the first without (empty: none); several if it came back."""


def release_names(texts: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """The names of each kind in the files of one release; none of a kind without its file."""
    found: dict[str, frozenset[str]] = {}
    for path, kinds in FILES.items():
        tree = ast.parse(texts.get(path, ""))
        for kind, target in kinds.items():
            found[kind] = frozenset(name for value in _assigned(tree, target) for name in _strings(value))
        if path == VARIABLES:
            found[DEPRECATED] = frozenset(_wrapped(tree))
    return found


def _wrapped(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == DEPRECATION:
            yield from _strings(node.args[0])


def required_versions(metadata: str) -> dict[str, str]:
    """The version of each of `PACKAGES` that a wheel's metadata asks for, without post-releases."""
    found = {}
    for line in metadata.splitlines():
        if line.startswith("Requires-Dist:"):
            asked = Requirement(line.partition(":")[2].strip())
            versions = [row.version for row in asked.specifier if row.operator in ("==", ">=")]
            if asked.name in PACKAGES and versions:
                found[asked.name] = Version(versions[0]).base_version
    return found


def tuned_files(members: Iterable[str]) -> frozenset[str]:
    """The names of the tuned files among the members of a wheel."""
    names = (name.removeprefix(TUNED) for name in members if name.startswith(TUNED))
    return frozenset(name for name in names if name.startswith("E=") and name.endswith(".json"))


def _assigned(tree: ast.Module, target: str) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(it, ast.Name) and it.id == target for it in targets):
            yield value


def _strings(value: ast.expr) -> Iterator[str]:
    """The keys of a dict, or every string of another expression, such as a `Literal`."""
    nodes: Iterable[ast.AST | None] = value.keys if isinstance(value, ast.Dict) else ast.walk(value)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def spans(by_release: Mapping[str, frozenset[str]]) -> Spans:
    """When each name was known, from the names of every release, oldest first."""
    found: Spans = {}
    for release, names in by_release.items():
        for name in names:
            known = found.setdefault(name, [])
            if not known or known[-1][1]:
                known.append([release, ""])
        for name, known in found.items():
            if name not in names and not known[-1][1]:
                known[-1][1] = release
    return dict(sorted(found.items()))
