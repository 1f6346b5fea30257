"""Synthesized checkpoints: schema, formats, scale, determinism, refusals."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from moectl.checkpoint import Checkpoint, open_checkpoint
from moectl.checkpoint.source.catalogue import built_in
from moectl.convert.codecs import codec_for
from moectl.convert.manifest.progress_log import only_writer
from moectl.errors import CheckpointError, MoectlError, Unavailable, UsageError
from moectl.files.lock import Busy
from moectl.synth import synthesize

GPT, KIMI = "openai/gpt-oss-20b", "moonshotai/Kimi-K2-Thinking"
TINY = {"layers": 1, "experts": 4, "hidden": 64, "intermediate": 96}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensor(found: Checkpoint, name: str) -> torch.Tensor:
    assert found.folder is not None
    with safe_open(found.folder / found.tensors[name].file, "pt") as file:
        loaded: torch.Tensor = file.get_tensor(name)
        return loaded


@pytest.mark.parametrize("model", [GPT, KIMI])
def test_schema_is_the_published_one(model: str, tmp_path: Path) -> None:
    found = open_checkpoint(synthesize(model, tmp_path / "out", **TINY))
    published = built_in(model)
    (group,) = found.groups
    problem = group.problem
    assert (problem.experts, problem.dims.hidden, problem.dims.intermediate) == (4, 64, 96)
    assert group.notes == ()
    listing = published.listing(found.config)
    assert {name: (info.dtype, info.shape) for name, info in listing.items()} == {
        name: (info.dtype, info.shape) for name, info in found.tensors.items() if name in listing
    }
    assert set(found.tensors) - set(listing) == {"model.embed_tokens.weight", "model.norm.weight"}
    assert set(found.config) == set(published.config)


@pytest.mark.parametrize("which", ["tiny_gpt_oss", "tiny_kimi"])
def test_every_tensor_can_be_loaded(which: str, request: pytest.FixtureRequest) -> None:
    found = open_checkpoint(request.getfixturevalue(which))
    assert len({info.file for info in found.tensors.values()}) > 1
    for name, info in found.tensors.items():
        assert tuple(tensor(found, name).shape) == info.shape


def decoded(found: Checkpoint, layer: int, expert: int, matrix: str) -> torch.Tensor:
    """One expert's matrix, from the file through the format's codec."""
    (group,) = found.groups
    names = {
        role: template.format(layer=layer, expert=expert) for role, template in group.names.experts.items()
    }
    codes, scale = tensor(found, names[matrix]), tensor(found, names[f"{matrix}_scale"])
    if group.problem.storage == "gpt_oss":
        codes, scale = codes[expert].flatten(-2), scale[expert]
    else:
        codes = codes.contiguous().view(torch.uint8)
        rows, columns = (int(size) for size in tensor(found, names[f"{matrix}_shape"]))
        assert codes.shape == (rows, columns // 2)
    return codec_for(group.problem.scheme.weight).decode(codes[None], scale[None])[0]


@pytest.mark.parametrize(
    ("which", "matrices"), [("tiny_gpt_oss", ("w13", "w2")), ("tiny_kimi", ("w1", "w3", "w2"))]
)
def test_weights_are_well_scaled_and_their_own(
    which: str, matrices: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    found = open_checkpoint(request.getfixturevalue(which))
    layers = found.groups[0].layers
    for matrix in matrices:
        first = decoded(found, layers[0], 0, matrix)
        assert float(first.std()) == pytest.approx(first.shape[1] ** -0.5, rel=0.05)
        assert abs(float(first.mean())) < 0.1 * float(first.std())
        for layer, expert in ((layers[0], 1), (layers[1], 0)):
            other = decoded(found, layer, expert, matrix)
            agreement = torch.corrcoef(torch.stack((first.flatten(), other.flatten())))[0, 1]
            assert abs(float(agreement)) < 0.05


def test_router_tells_experts_apart(tiny_kimi: Path) -> None:
    found = open_checkpoint(tiny_kimi)
    router = tensor(found, "model.layers.1.mlp.gate.weight").float()
    logits = torch.randn(512, router.shape[1], generator=torch.Generator().manual_seed(0)) @ router.T
    assert 1.5 < float(logits.std()) < 2.5
    assert logits.argmax(1).bincount(minlength=8).min() > 0
    bias = tensor(found, "model.layers.1.mlp.gate.e_score_correction_bias")
    assert 0 < float(bias.abs().max()) < 0.5


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first = content(synthesize(KIMI, tmp_path / "a", **TINY, seed=3))
    assert content(synthesize(KIMI, tmp_path / "b", **TINY, seed=3)) == first
    assert content(synthesize(KIMI, tmp_path / "c", **TINY, seed=4)) != first


def test_shards_do_not_change_tensors(tmp_path: Path) -> None:
    one = open_checkpoint(synthesize(GPT, tmp_path / "one", **TINY))
    many = open_checkpoint(synthesize(GPT, tmp_path / "many", **TINY, shard_bytes=4096))
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert len({info.file for info in many.tensors.values()}) > 2
    assert one.groups == many.groups
    for name in one.tensors:
        assert torch.equal(tensor(one, name), tensor(many, name))


def test_sizes_change_under_every_key(tmp_path: Path) -> None:
    synthesize(GPT, tmp_path / "gpt", **TINY, top_k=2)
    config = json.loads((tmp_path / "gpt" / "config.json").read_text())
    assert config["num_experts_per_tok"] == config["experts_per_token"] == 2
    assert config["num_local_experts"] == 4
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 1
    found = open_checkpoint(synthesize(KIMI, tmp_path / "kimi", **TINY))
    assert found.config["num_hidden_layers"] == 2
    assert found.groups[0].layers == (1,)
    assert found.groups[0].problem.top_k == 4


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    synthesize(GPT, tmp_path / "out", **TINY, shard_bytes=10_000, progress=lambda *row: seen.append(row))
    assert [row[0] for row in seen] == sorted(row[0] for row in seen)
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][2].endswith(".safetensors")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden": 48}, "multiple of 32"),
        ({"intermediate": 33}, "multiple of 32"),
        ({"layers": 25}, "24 MoE layers"),
        ({"layers": 0}, "from 1 to"),
        ({"top_k": 5}, "top-k 5"),
        ({"experts": -1}, "from 1 to 65536"),
        ({"experts": 1000000}, "experts must be from 1 to 65536, got 1000000"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, int], word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=word):
        synthesize(GPT, tmp_path / "out", **{**TINY, **changes})
    assert not (tmp_path / "out").exists()


def test_output_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="not an empty folder"):
            synthesize(GPT, target, **TINY)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(UsageError, match="no built-in model"):
        synthesize("org/none", tmp_path / "out")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("when", ["at once", "in the second file", "at the end"])
def test_interrupted_output_leaves_nothing(there: bool, when: str, tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if {"at once": True, "in the second file": "-00002-" in text, "at the end": done == total}[when]:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    if there:
        out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        synthesize(GPT, out, **TINY, shard_bytes=10_000, progress=stop)
    assert (list(out.iterdir()) == []) if there else not out.exists()
    assert open_checkpoint(synthesize(GPT, out, **TINY)).tensors


@pytest.mark.parametrize("place", ["/proc/moectl", "file/out", "file/a/out", "x" * 300, "a/" + "x" * 300])
def test_output_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises((Unavailable, UsageError)) as caught:
        synthesize(GPT, tmp_path / place, **TINY)
    assert Path(place).name in str(caught.value)
    assert caught.value.exit_code in (2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_read_only_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr("moectl.files.atomic.os.open", refuse)
    with pytest.raises(Unavailable, match="Read-only"):
        synthesize(GPT, tmp_path / "out", **TINY)
    assert list((tmp_path / "out").iterdir()) == []


def test_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(Unavailable, match="room for 1 kB"):
        synthesize(GPT, tmp_path / "out", **TINY)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "changes", "word"),
    [
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", {"hidden": 192}, "hidden must be a multiple of 128"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", {"intermediate": 36}, "multiple of 8, as 32 bits hold"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", {"intermediate": 40}, "multiple of 16, the weights' group"),
        ("moonshotai/Kimi-K3", {"hidden": 65}, "experts have 3584 of the model's 7168 features"),
    ],
)
def test_sizes_that_a_format_cannot_hold(
    model: str, changes: dict[str, int], word: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=word):
        synthesize(model, tmp_path / "out", **{"layers": 1, "experts": 8, "hidden": 256, **changes})
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_full_size_layer(tmp_path: Path) -> None:
    found = open_checkpoint(synthesize("openai/gpt-oss-120b", tmp_path / "out", layers=1))
    assert sum(info.nbytes for info in found.tensors.values()) > 1.69e9
    assert decoded(found, 0, 127, "w2").shape == (2880, 2880)


@pytest.mark.parametrize(
    "model",
    [
        "openai/gpt-oss-20b",
        "moonshotai/Kimi-K2-Thinking",
        "nvidia/Qwen3-30B-A3B-NVFP4",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
        "deepseek-ai/DeepSeek-V3",
        "TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ",
    ],
)
def test_a_folder_and_a_config_are_taken_as_the_model_that_they_are_of(model: str, tmp_path: Path) -> None:
    sizes = {"layers": 2, "experts": 8, "hidden": 256, "intermediate": 256, "top_k": 1}
    first = synthesize(model, tmp_path / "first", **sizes)
    for source in (first, first / "config.json"):
        again = synthesize(str(source), tmp_path / f"again{source.suffix}")
        assert content(again) == content(first)
    smaller = synthesize(str(first), tmp_path / "smaller", experts=4, hidden=128)
    sizes |= {"experts": 4, "hidden": 128}
    assert content(smaller) == content(synthesize(model, tmp_path / "direct", **sizes))


def test_a_config_that_no_built_in_model_is_like_is_refused(tmp_path: Path) -> None:
    first = synthesize(GPT, tmp_path / "first", **TINY)
    config = json.loads((first / "config.json").read_text())
    (tmp_path / "more.json").write_text(json.dumps({**config, "num_hidden_layers": 500, "layer_types": None}))
    with pytest.raises(UsageError, match="lacks some of its MoE layers"):
        synthesize(str(tmp_path / "more.json"), tmp_path / "out")
    (tmp_path / "other.json").write_text(json.dumps({**config, "torch_dtype": "float16", "dtype": "float16"}))
    with pytest.raises(UsageError, match="names no tensors, and no built-in model has its architecture"):
        synthesize(str(tmp_path / "other.json"), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        synthesize(str(tmp_path / "empty"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_at_once_the_second_stops_and_takes_nothing_away(tmp_path: Path) -> None:
    """Also a conversion, which begins after the first has looked into the directory."""
    out, refused = tmp_path / "out", list[str]()

    def meddle(done: int, total: int, text: str) -> None:
        if not refused:
            for seed in (1, 2):
                with pytest.raises(MoectlError) as caught:
                    synthesize(GPT, out, **TINY, seed=seed)
                refused.append(str(caught.value))
            with pytest.raises(Busy), only_writer(out, "other", ["model.safetensors.partial"]):
                pytest.fail("two writers")

    synthesize(GPT, out, **TINY, progress=meddle)
    synthesize(GPT, tmp_path / "alone", **TINY)
    assert content(out) == content(tmp_path / "alone") and "is not an empty folder" in refused[0]


def test_who_comes_second_to_an_empty_directory_stops(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with only_writer(out, "other", []):
        (out / "theirs").touch()
        with pytest.raises(Busy, match="is writing to"), only_writer(out, "synthetic", ["theirs"]):
            pytest.fail("two writers")
    assert [path.name for path in out.iterdir()] == ["theirs"]
    with pytest.raises(Busy, match="it has theirs"), only_writer(out, "synthetic", ["theirs"]):
        pytest.fail("files of another")
    assert [path.name for path in out.iterdir()] == ["theirs"]
