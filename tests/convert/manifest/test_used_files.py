"""Nothing in a directory is used or called right when a byte of it has been changed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

import moectl
from moectl.checkpoint import open_checkpoint, read_header
from moectl.convert.execute.convert import convert
from moectl.convert.manifest import manifest
from moectl.convert.manifest.manifest import ALWAYS_CHECKED, load_manifest
from moectl.convert.manifest.manifest_records import REPORT
from moectl.convert.portable.report_fragments import read_report, report_bytes
from moectl.convert.portable.verify_portable import verify_portable
from moectl.convert.restore.verify import VerifyReport, verify
from moectl.errors import CheckpointError
from moectl.files.strict_json import json_bytes
from moectl.files.tensor_table import TensorInfo
from moectl.integrations.model_experts import open_experts
from moectl.layer.prepare import load_prepared
from support.converted_folders import edit_manifest
from support.invoking import moectl as command

from ..conftest import plan_of


@pytest.fixture(scope="module")
def kimi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model whose router has a correction bias."""
    from support.stream_checkpoints import CHECKPOINTS

    folder = tmp_path_factory.mktemp("kimi")
    convert(plan_of(CHECKPOINTS["kimi"](folder / "source")), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.stream_checkpoints import CHECKPOINTS

    folder = tmp_path_factory.mktemp("portable")
    moectl.convert(CHECKPOINTS["gpt_oss"](folder / "source"), folder / "out", "bf16", requantize=True)
    return folder / "out"


class Changed:
    """Changes bytes of a directory's files, and puts them back."""

    def __init__(self) -> None:
        self._before: dict[Path, bytes] = {}

    def __call__(self, path: Path, change: Callable[[bytearray], object]) -> None:
        self._before.setdefault(path, path.read_bytes())
        data = bytearray(self._before[path])
        change(data)
        path.write_bytes(data)

    def undo(self) -> None:
        for path, data in self._before.items():
            path.write_bytes(data)


@pytest.fixture
def changed() -> Iterator[Changed]:
    change = Changed()
    yield change
    change.undo()


def flip(at: int) -> Callable[[bytearray], object]:
    return lambda data: data.__setitem__(at, data[at] ^ 1)


def tensors(path: Path) -> dict[str, TensorInfo]:
    with path.open("rb") as file:
        return dict(read_header(file, path.stat().st_size, path.name))


ROUTER = ("model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias")


@pytest.mark.parametrize("name", ROUTER)
def test_a_router_is_checked_when_it_is_used(kimi_folder: Path, changed: Changed, name: str) -> None:
    info = load_manifest(kimi_folder).passthrough[name]
    changed(kimi_folder / info.file, flip(info.start))
    with pytest.raises(CheckpointError, match=f"{name} of {info.file} fails its SHA-256 check"):
        load_prepared(kimi_folder, 2, "torch")
    for arguments in (("run", kimi_folder, "--layer", 2, "--tokens", 2, "--device", "cpu"),):
        assert info.file in command(*arguments, code=4).stderr.replace("\n", "")
    assert any(info.file in finding for finding in verify(kimi_folder).findings)


def test_a_header_of_other_tensors_is_checked_when_it_is_used(kimi_folder: Path, changed: Changed) -> None:
    file = load_manifest(kimi_folder).passthrough[ROUTER[0]].file
    changed(kimi_folder / file, lambda data: data.__setitem__(slice(None), data.replace(b'"pt"', b'"np"')))
    with pytest.raises(CheckpointError, match=f"the header of {file} is not what was written"):
        load_prepared(kimi_folder, 2, "torch")


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"format":"pt"', b'"format":"np"'), (b"moectl.layout", b"moectl_layout"), (b"marlin", b"merlin")],
)
def test_metadata_of_a_layer_are_checked_when_it_is_used(
    kimi_folder: Path, changed: Changed, old: bytes, new: bytes
) -> None:
    name = "moectl-layer-00002.experts"
    changed(kimi_folder / name, lambda data: data.__setitem__(slice(None), data.replace(old, new, 1)))
    with pytest.raises(CheckpointError, match=f"the header of {name} is not what was written"):
        load_prepared(kimi_folder, 2, "torch")
    assert any(name in finding for finding in verify(kimi_folder).findings)


def test_metadata_that_were_removed(kimi_folder: Path, changed: Changed) -> None:
    name = "moectl-layer-00001.experts"

    def strip(data: bytearray) -> None:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        del header["__metadata__"]
        data[8 : 8 + length] = json.dumps(header, separators=(",", ":")).encode().ljust(length)

    changed(kimi_folder / name, strip)
    assert len(tensors(kimi_folder / name)) == len(load_manifest(kimi_folder).tensors(1))
    with pytest.raises(CheckpointError, match=f"the header of {name} is not what was written"):
        load_prepared(kimi_folder, 1, "torch")


def test_small_tensors_of_a_layer_are_always_checked(converted: Path, changed: Changed) -> None:
    for stored in load_manifest(converted).tensors(1).values():
        path = converted / "moectl-layer-00001.experts"
        info = tensors(path)[stored.spec.name]
        assert info.nbytes <= ALWAYS_CHECKED
        changed(path, flip(info.end - 1))
        with pytest.raises(CheckpointError, match=f"{info.name} of {path.name} fails its SHA-256 check"):
            load_prepared(converted, 1, "torch")


def test_no_threads_are_started_to_check_little(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server opens layers while threads of its read other layers' files, and would wait for every start."""
    started: list[str] = []
    start = Thread.start
    monkeypatch.setattr(Thread, "start", lambda thread: started.append(thread.name) or start(thread))
    load_prepared(converted, 1, "torch")
    assert not started
    monkeypatch.setattr(manifest, "HASHED_AT_ONCE", 0)
    load_prepared(converted, 1, "torch")
    assert started


def test_the_sources_config_is_checked_when_an_engine_reads_it(converted: Path, changed: Changed) -> None:
    changed(converted / "source.config.json", flip(-5))
    with pytest.raises(CheckpointError, match=r"source\.config\.json fails its SHA-256 check"):
        open_experts(converted)


def test_a_directory_of_an_earlier_version_has_hashes_of_whole_files(
    converted: Path, changed: Changed
) -> None:
    def forget(document: dict[str, object]) -> None:
        for item in document["rest"]:  # type: ignore[attr-defined]
            del item["tensors"], item["header_sha256"]

    edit_manifest(converted, forget)
    assert load_prepared(converted, 1, "torch", check=True).weights
    info = load_manifest(converted).passthrough["model.layers.1.mlp.router.weight"]
    changed(converted / info.file, flip(info.start))
    with pytest.raises(CheckpointError, match=f"{info.file} fails its SHA-256 check"):
        load_prepared(converted, 1, "torch", check=True)


def found(check: Callable[[Path], VerifyReport], folder: Path) -> str:
    try:
        return " ".join(check(folder).findings)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["kimi_folder", "portable"])
def test_verify_names_the_file_with_a_flipped_bit(
    kind: str, request: pytest.FixtureRequest, changed: Changed
) -> None:
    """Some places of every file: its ends, its header and anywhere."""
    folder: Path = request.getfixturevalue(kind)
    check = verify_portable if kind == "portable" else verify
    assert check(folder).ok
    rng = random.Random(7)
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        for at in {0, size - 1, min(12, size - 1), *(rng.randrange(size) for _ in range(2))}:
            bit = 1 << rng.randrange(8)
            changed(path, lambda data, at=at, bit=bit: data.__setitem__(at, data[at] ^ bit))  # type: ignore[misc]
            assert path.name in found(check, folder), (path.name, at, bit)
        changed.undo()
    assert check(folder).ok


@pytest.mark.parametrize(
    "name",
    [
        *("model-extra.safetensors", "modeling.py", "adapter_config.json", "merges.txt", "a.tiktoken"),
        "additional_chat_templates/tool.jinja",
    ],
)
@pytest.mark.parametrize("kind", ["kimi_folder", "portable"])
def test_verify_names_a_file_that_a_loader_might_read(
    kind: str, request: pytest.FixtureRequest, name: str
) -> None:
    folder: Path = request.getfixturevalue(kind)
    check = verify_portable if kind == "portable" else verify
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    (folder / "notes.md").write_text("mine")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.json").write_text("hidden")
    try:
        assert check(folder).findings == (f"{name} is not of this conversion",)
    finally:
        (folder / name).unlink()
        if (folder / name).parent != folder:
            (folder / name).parent.rmdir()
        shutil.rmtree(folder / ".cache")
        (folder / "notes.md").unlink()
    assert check(folder).ok


def test_a_report_in_another_conversion_does_not_hide_it(kimi_folder: Path, portable: Path) -> None:
    (kimi_folder / REPORT).write_bytes((portable / REPORT).read_bytes())
    try:
        assert f"{REPORT} is not of this conversion" in command("verify", kimi_folder, code=1).stdout
    finally:
        (kimi_folder / REPORT).unlink()


def test_a_report_of_version_1_has_no_hash_of_itself(portable: Path, changed: Changed) -> None:
    report = read_report(portable)
    assert (
        report_bytes({k: v for k, v in report.items() if k not in ("report_version", "sha256")})
        == (portable / REPORT).read_bytes()
    )
    first = {**report, "report_version": 1}
    changed(portable / REPORT, lambda data: data.__setitem__(slice(None), json_bytes(first)))
    with pytest.raises(CheckpointError, match="is not what was written"):
        read_report(portable)
    del first["sha256"]
    changed(portable / REPORT, lambda data: data.__setitem__(slice(None), json_bytes(first)))
    assert verify_portable(portable).ok


def test_one_dtype_for_tensors_of_a_kind(gpt_oss: Path, tmp_path: Path) -> None:
    """The same bytes as U8 and as E8M0: the manifest has one dtype for both."""
    info = open_checkpoint(gpt_oss).tensors["model.layers.2.mlp.experts.down_proj_scales"]
    path = gpt_oss / info.file
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[info.name]["dtype"] = "F8_E8M0"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=f"{info.name} is F8_E8M0, and .*layers.0.* is U8"):
        plan_of(gpt_oss)


def test_verify_compares_dtypes_with_the_source(gpt_oss: Path, converted: Path) -> None:
    def other(document: dict[str, object]) -> None:
        part = document["groups"][0]["parts"]["w2_scale"]  # type: ignore[index]
        assert part["dtype"] == "U8"
        part["dtype"] = "F8_E8M0"

    edit_manifest(converted, other)
    assert verify(converted).ok
    findings = verify(converted, gpt_oss).findings
    assert len(findings) == 3 and "is restored as F8_E8M0" in findings[0]
