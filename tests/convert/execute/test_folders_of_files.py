"""Conversions keep to their folders: links planted in them, and who may use what is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import complete, convert
from moectl.convert.execute.rank_plans import convert_ranks, plan_ranks
from moectl.convert.layouts.registry import layout_for
from moectl.convert.manifest.manifest import load_layer, load_manifest
from moectl.convert.manifest.manifest_records import CONFIG, INDEX, MANIFEST, READY, REPORT, SOURCE_INDEX
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.portable.options import PortableOptions
from moectl.convert.portable.portable_plan import plan_portable
from moectl.convert.portable.verify_portable import verify_portable
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.convert.worker_partition import WorkerPartition
from moectl.errors import CheckpointError, MoectlError, UsageError
from moectl.synth import synthesize
from support.stream_checkpoints import folder_bytes, gpt_oss_checkpoint

from ..conftest import plan_of


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def give_all(folder: Path, mode: int) -> Path:
    """Gives all files of a folder, which safetensors writes for their owner alone, the same permissions."""
    for path in folder.iterdir():
        path.chmod(mode)
    return folder


@pytest.fixture
def private(gpt_oss: Path) -> Path:
    """A checkpoint whose files are its owner's alone."""
    return give_all(gpt_oss, 0o600)


@pytest.fixture
def public(gpt_oss: Path) -> Path:
    """A checkpoint that everyone may read."""
    return give_all(gpt_oss, 0o644)


def modes(folder: Path) -> Mapping[str, set[str]]:
    """The permissions of all files and folders from `folder` downwards; others may be renamed meanwhile."""
    found: dict[str, set[str]] = {"files": set(), "folders": set()}
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            found["folders" if stat.S_ISDIR(mode) else "files"].add(oct(stat.S_IMODE(mode)))
    return found


PRIVATE = {"files": {"0o600"}, "folders": {"0o700"}}
PUBLIC = {"files": {"0o644"}, "folders": {"0o755"}}


def kernel_layout(source: Path, out: Path, **options: object) -> None:
    convert(plan_of(source), out, **options)  # type: ignore[arg-type]


def portable(source: Path, out: Path, **options: object) -> None:
    asked = PortableOptions("mxfp4", "compressed-tensors")
    convert(plan_portable(open_checkpoint(source), asked), out, **options)  # type: ignore[arg-type]


CONVERSIONS = [kernel_layout, portable]


@pytest.mark.parametrize("work", CONVERSIONS)
def test_outputs_are_as_private_as_their_source(
    public: Path, tmp_path: Path, work: Callable[..., None]
) -> None:
    seen = set()

    def look(done: int, total: int, text: str) -> None:
        seen.update(modes(tmp_path / "out")["files"])

    work(public, tmp_path / "public")
    assert modes(tmp_path / "public") == PUBLIC
    work(give_all(public, 0o600), tmp_path / "out", progress=look)
    assert modes(tmp_path / "out") == PRIVATE
    assert seen == {"0o600"}, "files are private from the start, logs and unfinished ones too"
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "public")


@pytest.mark.parametrize("work", CONVERSIONS)
def test_one_private_file_is_enough(public: Path, tmp_path: Path, work: Callable[..., None]) -> None:
    max(public.glob("*.safetensors")).chmod(0o640)
    work(public, tmp_path / "out")
    found = modes(tmp_path / "out")
    assert found["folders"] == {"0o750"} and "0o640" in found["files"] <= {"0o640", "0o644"}
    (linked,) = {path for path in (tmp_path / "out").iterdir() if path.lstat().st_mode & 0o007} or {None}
    assert linked is None or linked.lstat().st_nlink > 1, "only a link has the permissions of its own source"


def test_a_private_folder(public: Path, tmp_path: Path) -> None:
    """Files that all may read in a folder that others cannot search are not linked into one that they can."""
    public.chmod(0o700)
    kernel_layout(public, tmp_path / "out")
    linked = {path.name for path in (tmp_path / "out").iterdir() if path.lstat().st_nlink > 1}
    assert modes(tmp_path / "out")["folders"] == {"0o700"} and linked
    (tmp_path / "given").mkdir(0o755)
    kernel_layout(public, tmp_path / "given")
    assert modes(tmp_path / "given") == {"files": {"0o600"}, "folders": {"0o755"}}
    assert verify(tmp_path / "given", public).ok


def test_restored_folders(private: Path, tmp_path: Path) -> None:
    kernel_layout(private, tmp_path / "out")
    unconvert(tmp_path / "out", tmp_path / "back")
    assert modes(tmp_path / "back") == PRIVATE
    assert folder_bytes(tmp_path / "back") == folder_bytes(private)


def test_a_folder_that_was_made_private_is_restored_as_such(public: Path, tmp_path: Path) -> None:
    kernel_layout(public, tmp_path / "out")
    (tmp_path / "out" / "config.json").chmod(0o600)
    unconvert(tmp_path / "out", tmp_path / "back")
    assert modes(tmp_path / "back")["folders"] == {"0o700"}


class Stopped(Exception):
    pass


def stop_after(layers: int) -> Callable[[int, int, str], None]:
    names = set()

    def progress(done: int, total: int, text: str) -> None:
        names.add(text)
        if len(names) > layers:
            raise Stopped

    return progress


def test_resumed(private: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        convert(plan_of(private), out, progress=stop_after(1), threads=1)
    assert modes(out) == PRIVATE
    convert(plan_of(private), out, resume=True)
    assert modes(out) == PRIVATE
    convert(plan_of(private), out, resume=True)
    assert modes(out) == PRIVATE and verify(out, private).ok


def test_parts(private: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (1, 2):
        convert(plan_of(private), out, partition=WorkerPartition(number, 2))
        assert modes(out) == PRIVATE
    complete(plan_of(private), out)
    assert modes(out) == PRIVATE


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    return gpt_oss_checkpoint(tmp_path / "source", num_hidden_layers=2, num_local_experts=2)


def ranks(source: Path, out: Path) -> None:
    checkpoint = open_checkpoint(source)
    layout = layout_for("moectl", checkpoint.groups[0].problem.scheme.weight)
    plans = plan_ranks(out, 2, 1, None, lambda shard: plan_conversion(checkpoint, layout, shard=shard))
    convert_ranks(plans, lambda item, tell: convert(item.plan, item.folder, progress=tell))


def test_ranks(two_ranks: Path, tmp_path: Path) -> None:
    ranks(give_all(two_ranks, 0o600), tmp_path / "out")
    assert modes(tmp_path / "out") == PRIVATE
    unconvert(tmp_path / "out", tmp_path / "back")
    assert modes(tmp_path / "back") == PRIVATE


def test_the_directory_of_a_rank_is_no_link(two_ranks: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank-00").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="rank-00 is a link"):
        ranks(two_ranks, tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_synth_is_by_umask_alone(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(0o700)
    small = {"layers": 1, "experts": 4, "hidden": 128, "intermediate": 128}
    synthesize("openai/gpt-oss-20b", tmp_path / "private" / "out", **small)
    assert modes(tmp_path / "private" / "out") == PUBLIC


def lead_out(folder: Path, names: Iterable[str], outside: Path) -> None:
    """Makes files of a folder links to copies in `outside`, which only the links tell from the files."""
    outside.mkdir()
    for name in names:
        (folder / name).rename(outside / name)
        (folder / name).symlink_to(outside / name)


def test_links_of_a_converted_directory_lead_nowhere(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kernel_layout(gpt_oss, out)
    manifest = load_manifest(out)
    locations = manifest.open_layer(manifest.layers[0])
    names = {path.name for path in out.iterdir()}
    lead_out(out, names - {MANIFEST, READY}, tmp_path / "outside")
    findings = verify(out).findings
    for name in names - {MANIFEST, READY}:
        assert any(name in text and "outside of its folder" in text for text in findings), (name, findings)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        load_layer(manifest, manifest.layers[0], locations)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        unconvert(out, tmp_path / "back")
    for name in (READY, MANIFEST):
        lead_out(out, [name], tmp_path / f"outside of {name}")
        with pytest.raises(CheckpointError, match=f"{name} is a link to .*, outside of its folder"):
            load_manifest(out)


def test_links_of_a_portable_output_lead_nowhere(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    portable(gpt_oss, out)
    names = {path.name for path in out.iterdir()} - {REPORT}
    lead_out(out, names, tmp_path / "outside")
    findings = verify_portable(out).findings
    for name in names:
        assert any(name in text and "outside of its folder" in text for text in findings), (name, findings)
    lead_out(out, [REPORT], tmp_path / "outside of the report")
    with pytest.raises(CheckpointError, match=f"{REPORT} is a link to .*, outside of its folder"):
        verify_portable(out)


def test_links_of_a_source_lead_nowhere(gpt_oss: Path, tmp_path: Path) -> None:
    """Links that appear once a conversion is planned are refused; what is not needed is left out."""
    plan = plan_of(gpt_oss)
    names = {path.name for path in gpt_oss.iterdir()}
    needed = {name for name in names if name.endswith(".safetensors")} | {CONFIG}
    lead_out(gpt_oss, names - needed, tmp_path / "small files")
    assert set(convert(plan, tmp_path / "out").skipped_files) == names - needed - {INDEX}
    assert not any(
        os.path.lexists(tmp_path / "out" / name) for name in (*(names - needed - {INDEX}), SOURCE_INDEX)
    )
    for name in needed:
        lead_out(gpt_oss, [name], tmp_path / f"outside of {name}")
        with pytest.raises(CheckpointError, match=f"{name} is a link to .*, outside of its folder"):
            convert(plan, tmp_path / "refused")
        (gpt_oss / name).unlink()
        (tmp_path / f"outside of {name}" / name).rename(gpt_oss / name)


@pytest.mark.parametrize("work", CONVERSIONS)
def test_links_planted_in_the_output_are_not_followed(
    gpt_oss: Path, tmp_path: Path, work: Callable[..., None]
) -> None:
    """Whatever has a name that the conversion writes to, or writes under meanwhile, is replaced."""
    work(gpt_oss, tmp_path / "wanted")
    wanted = folder_bytes(tmp_path / "wanted")
    secret, out = tmp_path / "secret", tmp_path / "out"
    secret.write_bytes(b"secret")
    planted = []

    def plant(done: int, total: int, text: str) -> None:
        if planted:
            return
        for name in wanted:
            for path in (out / name, out / f"{name}.partial"):
                with suppress(FileExistsError):  # a thread of the conversion may have come first
                    path.symlink_to(secret)
                    planted.append(path)

    work(gpt_oss, out, progress=plant)
    assert len(planted) > len(wanted)
    assert secret.read_bytes() == b"secret"
    assert {name: (out / name).read_bytes() for name in wanted} == wanted
    assert not any((out / name).is_symlink() for name in wanted)


def test_a_restored_folder_with_planted_links(gpt_oss: Path, tmp_path: Path) -> None:
    kernel_layout(gpt_oss, tmp_path / "converted")
    secret, back = tmp_path / "secret", tmp_path / "back"
    secret.write_bytes(b"secret")

    def plant(done: int, total: int, text: str) -> None:
        for path in gpt_oss.iterdir():
            for name in (path.name, f"{path.name}.partial"):
                if not os.path.lexists(back / name):
                    (back / name).symlink_to(secret)

    unconvert(tmp_path / "converted", back, progress=plant)
    assert secret.read_bytes() == b"secret"
    for path in gpt_oss.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()
        assert not (back / path.name).is_symlink()


def test_a_log_that_is_a_link(gpt_oss: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "log").write_bytes(b"")
    (tmp_path / "out" / "progress.jsonl").symlink_to(tmp_path / "log")
    with pytest.raises(MoectlError):
        kernel_layout(gpt_oss, tmp_path / "out", resume=True)
    assert (tmp_path / "log").read_bytes() == b""
