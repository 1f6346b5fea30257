"""Pins the files that `moectl peers` fetches: releases on PyPI to ``moectl/data/peers.json``."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import struct
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moectl.capabilities.kernel_packages import TRITON_EXPERTS
from moectl.capabilities.unpacked_libraries import TRITON_EXPERTS_PEER
from moectl.errors import CheckFailed
from moectl.peers.pinned import FORMAT, PinnedFile, PinnedPeer, check_path

LARGEST_FILE = 256 << 20
"""Maximum unpacked size of one file, bytes."""

LARGEST_PEER = 512 << 20
"""Maximum unpacked size of all files of a backend, bytes."""


@dataclass(frozen=True)
class Source:
    """What is taken of a release.

    Attributes:
        project, version: the release on PyPI.
        files: regular expressions of files in the wheel, and where they go.
        cuda: as in `PinnedPeer`.
    """

    project: str
    version: str
    files: Mapping[str, str]
    cuda: str = ""


VLLM = {r"(vllm-[^/]+\.dist-info/(?:METADATA|licenses/LICENSE))": r"\1"}
TUNED = r"fused_moe\.py|configs/[^/]+device_name=NVIDIA[^/]+\.json"
TUNED_TO = rf"{TRITON_EXPERTS_PEER}/\1"
DEEP_GEMM = (
    r"deep_gemm/(?:[^/]+\.(?:py|so)|(?:legacy|mega|testing|utils)/[^/]+\.py|include/(?:cute|cutlass"
    r"|cute/(?:arch|container|numeric|util)|cutlass/(?:arch|detail|layout|platform)"
    r"|deep_gemm/(?!impls)[^/]+|deep_gemm/impls(?=/sm(?:90|xx)))/[^/]+)"
)
"""The package with the headers that its kernels for SM90 include."""
SOURCES: Mapping[str, Source] = {
    "marlin": Source("vllm", "0.33.0", {r"vllm/(_moe_C[^/]*\.so)": r"\1", **VLLM}, cuda="13"),
    "triton_kernels": Source("vllm", "0.33.0", {r"vllm/third_party/(triton_kernels/.+)": r"\1", **VLLM}),
    "triton": Source("vllm", "0.33.0", {rf"vllm/{TRITON_EXPERTS}/({TUNED})": TUNED_TO, **VLLM}),
    "cutlass": Source("vllm", "0.33.0", {r"vllm/(_C_stable_libtorch[^/]*\.so)": r"\1", **VLLM}, cuda="13"),
    "deep_gemm": Source("vllm", "0.33.0", {rf"vllm/third_party/({DEEP_GEMM})": r"\1", **VLLM}, cuda="13"),
    "humming": Source(
        "humming-kernels",
        "0.1.19",
        {r"(humming/.+)": r"\1", r"(humming_kernels-[^/]+\.dist-info/(?:METADATA|licenses/LICENSE))": r"\1"},
    ),
}
MACHINES = ("x86_64", "aarch64")


def wheels_of(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The Linux wheels of a release on PyPI, by machine."""
    request = urllib.request.Request(
        f"https://pypi.org/simple/{source.project}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        files = json.load(response)["files"]
    release = f"{source.project.replace('-', '_')}-{re.escape(source.version)}"
    for machine in MACHINES:
        name = re.compile(rf"{release}-[^-]+-[^-]+-manylinux_\d+_\d+_{machine}\.whl")
        yield machine, next(file for file in files if name.fullmatch(file["filename"]))


def downloaded(file: Mapping[str, Any], folder: Path) -> Path:
    """The wheel in `folder`, fetched if it is not there; CheckFailed unless its hash is that of the index."""
    path = folder / str(file["filename"])
    if not path.exists():
        urllib.request.urlretrieve(str(file["url"]), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != file["hashes"]["sha256"] or path.stat().st_size != file["size"]:
        raise CheckFailed(f"{path} is not the file that PyPI describes: SHA-256 {digest}")
    return path


def files_of(wheel: Path, patterns: Mapping[str, str]) -> tuple[PinnedFile, ...]:
    """The files that match one of `patterns`, in the wheel's order.

    Raises CheckFailed for a path that leads out of a directory, two files of one name, a link, an encrypted
    file, an unusual compression, and for sizes above `LARGEST_FILE` and `LARGEST_PEER`.
    """
    pinned: dict[str, PinnedFile] = {}
    total = 0
    with zipfile.ZipFile(wheel) as archive, wheel.open("rb") as raw:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            path = next(
                (m.expand(to) for pattern, to in patterns.items() if (m := _match(pattern, info))), None
            )
            if path is None or info.is_dir():
                continue
            mode = info.external_attr >> 16
            total += info.file_size
            try:
                check_path(path)
            except ValueError as error:
                raise CheckFailed(f"{wheel.name}: {error}") from error
            if path in pinned:
                raise CheckFailed(f"{wheel.name} has two files {path}")
            if stat.S_ISLNK(mode) or info.flag_bits & 1:
                raise CheckFailed(f"{wheel.name}: {info.filename} is a link or encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise CheckFailed(f"{wheel.name}: {info.filename} has compression {info.compress_type}")
            if info.file_size > LARGEST_FILE or total > LARGEST_PEER:
                raise CheckFailed(
                    f"{wheel.name}: {info.filename} is larger than any library's file should be"
                )
            pinned[path] = PinnedFile(
                path=path,
                offset=_data_offset(raw, info),
                stored=info.compress_size,
                size=info.file_size,
                sha256=hashlib.sha256(archive.read(info)).hexdigest(),
                deflated=info.compress_type == zipfile.ZIP_DEFLATED,
                executable=bool(mode & 0o111),
            )
    if not pinned:
        raise CheckFailed(f"{wheel.name} has none of the files")
    return tuple(pinned.values())


def _match(pattern: str, info: zipfile.ZipInfo) -> re.Match[str] | None:
    return re.fullmatch(pattern, info.filename)


def _data_offset(raw: Any, info: zipfile.ZipInfo) -> int:
    """Position of a file's data, behind its local header."""
    raw.seek(info.header_offset)
    header = raw.read(30)
    if header[:4] != b"PK\x03\x04":
        raise CheckFailed(f"{info.filename} has no local header")
    name, extra = struct.unpack_from("<HH", header, 26)
    return info.header_offset + 30 + int(name) + int(extra)


def peers_from(folder: Path) -> Iterator[PinnedPeer]:
    """Every backend's files on every machine; wheels are kept in `folder`."""
    for backend, source in SOURCES.items():
        for machine, file in wheels_of(source):
            wheel = downloaded(file, folder)
            yield PinnedPeer(
                backend=backend,
                project=source.project,
                version=source.version,
                wheel=wheel.name,
                url=str(file["url"]),
                size=int(file["size"]),
                sha256=str(file["hashes"]["sha256"]),
                machine=machine,
                cuda=source.cuda,
                files=files_of(wheel, source.files),
            )


def written(peers: Iterator[PinnedPeer]) -> str:
    """The data file's text, a line for each file."""
    document = {**FORMAT, "peers": [asdict(peer) for peer in peers]}
    text = json.dumps(document, indent=1)
    return re.sub(r"\n {5,}", " ", text).replace("{ ", "{").replace("\n    }", "}") + "\n"
