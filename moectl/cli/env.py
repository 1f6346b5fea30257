"""`moectl env`: this machine in a block to paste into a bug report."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from ..files.records import to_json
from .doctor import gpu_lines, software_words, system_words, torch_words
from .options import framed, option
from .output import Output, count, gib

if TYPE_CHECKING:
    from ..doctor import DoctorReport

EXAMPLES = ("moectl env", "moectl env --paths", "moectl env --json")
MORE = ("It contains no host name, user name or token, and only variables that concern experts.",)

SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "CUDA_HOME",
    "CUDA_PATH",
    "MAX_JOBS",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_CUDA_ARCH_LIST",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
    "HUMMING_CACHE_DIR",
    "AITER_JIT_DIR",
    "MOECTL_CACHE",
)
"""Variables that are printed in addition to those that concern experts."""

HIDDEN = "(hidden)"
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?:^|_)(?:API_?)?KEY(?:$|_)", re.IGNORECASE)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{4,}")


@framed("env")
def env(
    paths: Annotated[
        bool, option("--paths", help="Also print paths, which may contain your user name.")
    ] = False,
    *,
    out: Output,
) -> None:
    """Print system, GPUs, versions and packages for a bug report."""
    from ..doctor import examine

    report = examine(os.environ)
    document = environment_document(report, os.environ, paths)
    lines = list(document_lines(document))
    block = "\n".join(["```text", *lines, "```"])
    if out.as_json or out.quiet:
        out.result(document, lambda console: None, lines)
    else:
        out.text(block)


def environment_document(report: "DoctorReport", environ: Mapping[str, str], paths: bool) -> dict[str, Any]:
    """What is printed as plain data; without `paths` nothing in it identifies a user or a host."""
    from ..environment.gpu_links import link_words

    software, host = report.software, report.host
    variables = {finding.name: finding.value for finding in report.variables if finding.does}
    variables |= {name: environ[name] for name in SHOWN if name in environ}
    return {
        "versions": {"moectl": software.moectl, "python": software.python, **software.libraries},
        "system": system_words(report),
        "host": to_json(host),
        "torch": torch_words(report),
        "torch_built_for": software.torch_built or None,
        "torch_libraries": dict(software.torch_libraries),
        "cuda_toolkit": software.cuda_toolkit or None,
        "software": software_words(report),
        "gpus": gpu_lines(report),
        "gpu_links": link_words(report.links) or None,
        "driver": report.driver or None,
        "driver_cuda": report.driver_cuda or None,
        "cores": report.jobs.cores,
        "memory_bytes": host.memory_bytes,
        "packages": {
            package.name: {
                "version": package.version or None,
                "lacks": list(package.lacks),
                "unrelated_package": bool(package.wrong),
                "path": (package.path or package.wrong) if paths else None,
            }
            for package in report.packages
            if package.present or package.wrong
        },
        "variables": {name: shown_value(name, value, paths) for name, value in sorted(variables.items())},
        "unknown_variables": [f.name for f in report.variables if not f.does and not _SECRET.search(f.name)],
        "problems": [_clean(remark.says, paths) for remark in report.problems],
    }


def shown_value(name: str, value: str, paths: bool) -> str:
    """A variable's value with shortened GPU UUIDs; `HIDDEN` for secrets, and for paths unless `paths`."""
    if _SECRET.search(name) or (not paths and ("/" in value or "\\" in value)):
        return HIDDEN
    return _UUID.sub(lambda match: match[0][:4] + "...", value)


def _clean(text: str, paths: bool) -> str:
    """A sentence with shortened UUIDs, and without directories unless `paths`."""
    text = _UUID.sub(lambda match: match[0][:4] + "...", text)
    if paths:
        return text
    home = os.environ.get("HOME", "")
    # First, as its name may have blanks; not one of "/", as users of containers have it.
    text = text.replace(home, "~") if len(home) > 1 else text
    return re.sub(r"(?<![\w.])~?/[^\s,;:)']+", HIDDEN, text)


def document_lines(document: dict[str, Any]) -> Iterator[str]:
    """`document` in lines of ``name: value``."""
    host = document["host"]
    yield f"software: {', '.join(document['software'])}"
    yield f"python: {document['versions']['python']}"
    yield f"torch: {document['torch']}"
    yield f"system: {document['system']}"
    memory = gib(host["memory_bytes"]) if host["memory_bytes"] else "unknown amount"
    yield f"CPU: {host['cpu']}, {count(document['cores'], 'core')}, {memory} of RAM"
    if not document["gpus"]:
        yield "GPU: none"
    for line in document["gpus"]:
        yield f"GPU: {line}"
    if document["gpu_links"]:
        yield f"GPU links: {document['gpu_links']}"
    if document["driver"]:
        cuda = f", supports CUDA up to {document['driver_cuda']}" if document["driver_cuda"] else ""
        yield f"driver: {document['driver']}{cuda}"
    if document["cuda_toolkit"]:
        yield f"CUDA toolkit: {document['cuda_toolkit']} (nvcc)"
    for name, package in document["packages"].items():
        state = ["a different package of that name"] if package["unrelated_package"] else []
        state += [f"lacks {', '.join(package['lacks'])}"] if package["lacks"] else []
        state += [package["path"]] if package["path"] else []
        if state:
            version = f" {package['version']}" if package["version"] else ""
            yield f"package {name}{version}: {', '.join(state)}"
    for name, value in document["variables"].items():
        yield f"variable {name}={value}"
    for name in document["unknown_variables"]:
        yield f"unknown variable {name}"
    for text in document["problems"]:
        yield f"problem: {text}"
