"""Schemas of `moectl doctor`, `env` and `list`."""

from __future__ import annotations

from ...doctor.doctor_report import NOTE, PROBLEM, WARNING, DoctorRemark
from ...doctor.kernel_caches import CompilerJobs, KernelCache
from ...doctor.software import Software
from ...environment.host import Host
from ...environment.variables import VariableFinding
from ...files.record_schemas import record_schema
from .json_types import (
    BOOLEAN,
    INTEGER,
    OPTIONAL_BYTES,
    OPTIONAL_NUMBER,
    OPTIONAL_STRING,
    STRING,
    STRINGS,
    Schema,
    array,
    mapping,
    nullable,
    obj,
    one_of,
    said,
)


def doctor() -> Schema:
    """The whole report."""
    device = {
        "platform": STRING,
        "arch": STRING,
        "name": STRING,
        "sms": INTEGER,
        "memory_bytes": INTEGER,
        "features": STRINGS,
    }
    gpu = {
        "index": INTEGER,
        "name": STRING,
        "arch": STRING,
        "memory_bytes": INTEGER,
        "mig": OPTIONAL_STRING,
        "shown": said(BOOLEAN, "Visible to this process."),
        "remark": OPTIONAL_STRING,
    }
    package = {
        "name": STRING,
        "present": BOOLEAN,
        "module": OPTIONAL_STRING,
        "version": OPTIONAL_STRING,
        "path": OPTIONAL_STRING,
        "lacks": STRINGS,
        "wrong": said(OPTIONAL_STRING, "Where a different package of that name is."),
        "wrong_version": OPTIONAL_STRING,
        "import_error": said(OPTIONAL_STRING, "With --deep."),
    }
    backend = {
        "policy": STRING,
        "backend": STRING,
        "runs": BOOLEAN,
        "experts": STRINGS,
        "formats": STRINGS,
        "verified": BOOLEAN,
        "reasons": array(obj({"question": STRING, "wanted": STRING, "offered": STRING})),
    }
    jobs = record_schema(CompilerJobs)
    jobs["properties"]["too_many"] = said(BOOLEAN, "MAX_JOBS, or one per core, needs more memory.")
    jobs["required"].append("too_many")
    remark = record_schema(DoctorRemark)
    remark["properties"]["level"] = one_of(PROBLEM, WARNING, NOTE)
    return obj(
        {
            "software": record_schema(Software),
            "host": record_schema(Host),
            "links": mapping(STRING, "How pairs of GPUs such as 0-1 are connected, as nvidia-smi says."),
            "driver": STRING,
            "driver_cuda": said(STRING, "Highest CUDA version that the driver supports."),
            "gpus": array(obj(gpu)),
            "hidden_by": mapping(STRING, "Variables that hide or order GPUs."),
            "refused": said(OPTIONAL_STRING, "Why visible GPUs could not be determined."),
            "driver_failure": OPTIONAL_STRING,
            "driver_warnings": STRINGS,
            "device": said(nullable(obj(device)), "The device that decisions are made for."),
            "peers_refused": OPTIONAL_STRING,
            "packages": array(obj(package)),
            "imports": mapping(STRING, "With --deep: why a package cannot be imported; empty if it can."),
            "torch_devices": said(nullable({}), "With --deep: the devices that torch reports."),
            "caches": array(record_schema(KernelCache)),
            "jobs": jobs,
            "variables": array(record_schema(VariableFinding)),
            "backends": array(obj(backend)),
            "engines": array(obj({"name": STRING, "rules": STRING, "installed": OPTIONAL_STRING})),
            "remarks": array(remark),
        }
    )


def env() -> Schema:
    """What `moectl env` prints, by name."""
    package = {
        "version": OPTIONAL_STRING,
        "lacks": STRINGS,
        "unrelated_package": said(BOOLEAN, "A different package of that name."),
        "path": said(OPTIONAL_STRING, "With --paths."),
    }
    return obj(
        {
            "versions": mapping(STRING),
            "system": STRING,
            "host": record_schema(Host),
            "torch": STRING,
            "torch_built_for": OPTIONAL_STRING,
            "torch_libraries": mapping(STRING, "CUDA libraries of torch with what is installed of them."),
            "cuda_toolkit": said(OPTIONAL_STRING, "Version of nvcc."),
            "software": said(STRINGS, "Packages with their versions."),
            "gpus": said(STRINGS, "A line for each kind of GPU, with their number."),
            "gpu_links": OPTIONAL_STRING,
            "driver": OPTIONAL_STRING,
            "driver_cuda": OPTIONAL_STRING,
            "cores": INTEGER,
            "memory_bytes": said(OPTIONAL_BYTES, "Main memory."),
            "packages": mapping(obj(package)),
            "variables": mapping(STRING),
            "unknown_variables": STRINGS,
            "problems": STRINGS,
        }
    )


def peers() -> Schema:
    """Libraries of other kernels, and what was fetched of them."""
    library = {
        **dict.fromkeys(("name", "state", "project", "version", "wheel", "url", "sha256", "machine"), STRING),
        "path": said(STRING, "Where it is; empty: not here."),
        "cuda": said(STRING, "CUDA version that its torch needs; empty: any."),
        **dict.fromkeys(("download_bytes", "unpacked_bytes", "files", "size"), INTEGER),
    }
    return obj(
        {
            "folder": STRING,
            "fetched_bytes": INTEGER,
            "seconds": {"type": "number"},
            "libraries": array(obj(library)),
        }
    )


def list_names() -> Schema:
    """Rows of one kind, under its name."""
    rows: dict[str, dict[str, Schema]] = {
        "models": {
            **dict.fromkeys(("name", "layers", "config", "tensors", "note"), STRING),
            "short_name": said(OPTIONAL_STRING, "Another name that commands take."),
            **dict.fromkeys(("format", "activations"), STRING),
            "params": said(INTEGER, "Parameters of all routed experts."),
            **dict.fromkeys(("experts", "top_k", "hidden", "intermediate"), INTEGER),
            "revision": OPTIONAL_STRING,
        },
        "backends": {
            **dict.fromkeys(("name", "engine", "kernels", "formats", "archs"), STRING),
            "experts": said(STRINGS, "The engine's classes of experts."),
        },
        "gpus": {
            **dict.fromkeys(("name", "product", "arch", "platform"), STRING),
            "memory": said(INTEGER, "Bytes."),
            "bandwidth": said(OPTIONAL_NUMBER, "Bytes per second; null if it is not published."),
            "sms": nullable(INTEGER),
            "spellings": said(STRINGS, "Other names that are understood."),
        },
        "variables": {
            **dict.fromkeys(("name", "takes", "status", "does", "instead"), STRING),
            "default": OPTIONAL_STRING,
        },
        "layouts": dict.fromkeys(("name", "to", "act", "archs", "loaded_by", "kernels", "verified"), STRING),
        "formats": dict.fromkeys(
            ("name", "container", "storage", "weights", "activations", "readers", "not_for"), STRING
        ),
    }
    return {"anyOf": [obj({"kind": {"const": kind}, kind: array(obj(row))}) for kind, row in rows.items()]}
