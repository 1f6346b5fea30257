"""Inputs that are made to take a reader's time or memory, each written to a folder of its own.

A bomb's size is a share of the whole, so that tests can use small ones. At a share of 1 no file is larger
than 64 MiB, apart from holes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import tables
from .tables import CSV, DOCUMENT, LARGEST, ROWS

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
TENSORS = "x.safetensors"

Maker = Callable[[Path, float], None]


@dataclass(frozen=True)
class Bomb:
    """A hostile input: `make` writes it to a folder, at a share of its full size.

    `file` is what commands are given: "" for the folder, as a checkpoint, else the name of a file in it.
    """

    name: str
    make: Maker
    file: str = ""


def _model(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "vocab_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        **changes,
    }


def _compressed(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        **changes,
    }


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config))


def _filled(path: Path, before: bytes, unit: Callable[[int], bytes], after: bytes, limit: float) -> None:
    """``before``, as many units as `limit` bytes hold, separated by commas, and ``after``."""
    with path.open("wb") as file:
        file.write(before)
        left, number = int(limit) - len(before) - len(after), 0
        while left > 0:
            piece = (b"," if number else b"") + unit(number)
            left, number = left - len(piece), number + 1
            if left > 0:
                file.write(piece)
        file.write(after)


def _nested(opening: bytes, closing: bytes, limit: float, inner: bytes = b"1") -> bytes:
    depth = int(limit) // (len(opening) + len(closing))
    return opening * depth + inner + closing * depth


UNITS: Mapping[str, Callable[[int], bytes]] = {
    "empty objects": lambda _: b"{}",
    "empty lists": lambda _: b"[]",
    "small numbers": lambda _: b"1",
    "small objects": lambda _: b'{"a":1}',
    "distinct strings": lambda n: b'"%x"' % n,
    "escapes": lambda _: b'"\\n\\u0041"',
    "numbers of a thousand digits": lambda _: b"7" * 1000,
}
"""What a list is filled with."""


def _config_list(unit: Callable[[int], bytes], key: str, folder: Path, share: float) -> None:
    text = json.dumps(_model())[:-1].encode()
    _filled(folder / CONFIG, text + b', "%s": [' % key.encode(), unit, b"]}", LARGEST * share)


def _config_keys(folder: Path, share: float) -> None:
    text = json.dumps(_model())[:-1].encode()
    _filled(folder / CONFIG, text + b", ", lambda n: b'"%x":1' % n, b"}", LARGEST * share)


def _config_deep(opening: bytes, closing: bytes, folder: Path, share: float) -> None:
    text = json.dumps(_model())[:-1].encode()
    (folder / CONFIG).write_bytes(text + b', "x": ' + _nested(opening, closing, LARGEST * share) + b"}")


def _long_number(folder: Path, share: float) -> None:
    text = json.dumps(_model())[:-1].encode()
    (folder / CONFIG).write_bytes(text + b', "x": ' + b"9" * int(LARGEST * share * 0.9) + b"}")


def _sizes(changes: Mapping[str, Any], folder: Path, share: float) -> None:
    _write_config(folder, _model(**changes))


def _patterns(quantization: Callable[[int], dict[str, Any]], layers: int, folder: Path, share: float) -> None:
    """A quantization config of so many patterns, and that many layers to ask them about."""
    config = _model(num_hidden_layers=max(2, int(layers * share)), num_experts=256)
    _write_config(folder, {**config, "quantization_config": quantization(max(4, int(16_384 * share)))})


def _groups(count: int, target: str) -> dict[str, Any]:
    (plain,) = _compressed()["config_groups"].values()
    return _compressed(config_groups={f"group_{n}": {**plain, "targets": [target % n]} for n in range(count)})


SLOW = "re:" + ".*a" * 5 + ".*%d$"
PATTERNS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "globs": lambda n: _compressed(quant_method="fp8", ignore=[]) | {
        "modules_to_not_convert": [f"*e*e*e*x*e*{i}" for i in range(n)]
    },
    "expressions": lambda n: _compressed(ignore=[SLOW % i for i in range(n)]),
    "nested expressions": lambda n: _compressed(ignore=["re:" + "(" * 50 + "e?" + ")?" * 50 + "e" * 50]),
    "optional expressions": lambda n: _compressed(ignore=["re:" + ".?" * 400 + "x" * 60]),
    "alternatives": lambda n: _compressed(ignore=["re:" + "(.|e|.e|m|mo)" * 40 + "#"]),
    "as many globs as are read": lambda n: _compressed(quant_method="fp8", ignore=[]) | {
        "modules_to_not_convert": [f"*e*e*e*x*e*{i}*model.layers.{i}.self_attn.q*" for i in range(n // 4)]
    },
    "counted repeats": lambda n: _compressed(ignore=[f"re:.{{3900}}{i}" for i in range(n // 4)]),
    "as many counted repeats as are read": lambda n: _compressed(
        ignore=[f"re:.*.{{0,1900}}{i}" for i in range(max(1, n // 256))]
    ),
    "repeats of nothing": lambda n: _compressed(ignore=["re:(){4294967294}x", "re:(?:a{0}){4294967294}x"]),
    "look-around": lambda n: _compressed(ignore=["re:" + "(?=.*e.*e.*e)" * 60 + "#"]),
    "back-references": lambda n: _compressed(ignore=[r"re:(.*)(.*)(.*).*\1\2\3#"]),
    "names": lambda n: _compressed(ignore=[f"model.layers.{i}.mlp.experts" for i in range(64 * n)]),
    "groups of expressions": lambda n: _groups(n, SLOW),
    "groups of names": lambda n: _groups(n, "model.layers.%d.mlp.experts.0.up_proj"),
    "GPTQ's dynamic": lambda n: {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "dynamic": {f"-:.*e.*e.*e.*e.*{i}$": {} for i in range(n)},
    },
    "AutoRound's exceptions": lambda n: {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
        "extra_config": {f".*e.*e.*e.*e.*{i}$": {"bits": 16 if i % 2 else 8} for i in range(n)},
    },
    "Quark's layers": lambda n: {
        "quant_method": "quark", "global_quant_config": {},
        "layer_quant_config": {f"*e*e*e*e*{i}": {"weight": {"dtype": "fp8_e4m3"}} for i in range(n)},
    },
    "ModelOpt's layers": lambda n: {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            f"model.layers.{i % 9999}.mlp.experts.{i}*e*e*": {"quant_algo": "NVFP4"} for i in range(n)
        },
    },
}  # fmt: skip
"""Quantization configs that name modules in so many patterns."""


def _index(unit: Callable[[int], bytes], folder: Path, share: float) -> None:
    _write_config(folder, _model())
    (folder / WEIGHTS).write_bytes(_header(b"{}", 0))
    _filled(folder / INDEX, b'{"weight_map": {', unit, b"}}", LARGEST * share)


def _index_deep(folder: Path, share: float) -> None:
    _write_config(folder, _model())
    (folder / INDEX).write_bytes(_nested(b'{"a":', b"}", LARGEST * share))


def _header(text: bytes, data: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(data)


EXPERT = b"model.layers.%d.mlp.experts.%d.%s_proj.weight"


def _weights(
    entry: Callable[[int], tuple[bytes, bytes, int]], layers: int, folder: Path, share: float
) -> None:
    """One file of tensors with these names, types and bytes; its data are a hole."""
    _write_config(folder, _model(num_hidden_layers=layers))
    _sparse_file(folder / WEIGHTS, _entries(entry), LARGEST * share)


def _sparse_file(path: Path, entries: Iterator[tuple[bytes, int]], limit: float) -> None:
    with path.open("wb") as file:
        file.write(bytes(8) + b"{")
        first, end = True, 0
        for text, end_after in entries:
            if file.tell() + len(text) + 2 > limit:
                break
            file.write((b"" if first else b",") + text)
            first, end = False, end_after
        file.write(b"}")
        length = file.tell() - 8
        file.seek(0)
        file.write(length.to_bytes(8, "little"))
    os.truncate(path, 8 + length + end)


def _entries(entry: Callable[[int], tuple[bytes, bytes, int]]) -> Iterator[tuple[bytes, int]]:
    start = number = 0
    while True:
        name, kind, nbytes = entry(number)
        yield b'"%s":{%s,"data_offsets":[%d,%d]}' % (name, kind, start, start + nbytes), start + nbytes
        start, number = start + nbytes, number + 1


def _small_tensor(number: int) -> tuple[bytes, bytes, int]:
    return b"t%x" % number, b'"dtype":"U8","shape":[1]', 1


def _empty_tensor(number: int) -> tuple[bytes, bytes, int]:
    return b"t%x" % number, b'"dtype":"U8","shape":[0]', 0


def _shapes(number: int) -> tuple[bytes, bytes, int]:
    return b"t%x" % number, b'"dtype":"U8","shape":[%d]' % (number + 1), number + 1


def _escaped(number: int) -> tuple[bytes, bytes, int]:
    return b"t\\u0041%x" % number, b'"dtype":"U8","shape":[1]', 1


def _expert_tensor(number: int) -> tuple[bytes, bytes, int]:
    expert, role = divmod(number, 3)
    layer, expert = divmod(expert, 999_999)
    name = EXPERT % (layer, expert, (b"gate", b"up", b"down")[role])
    return name, b'"dtype":"BF16","shape":[128,128]', 32768


def _layer_tensor(number: int) -> tuple[bytes, bytes, int]:
    layer, role = divmod(number, 12)
    expert, role = divmod(role, 3)
    name = EXPERT % (layer, expert, (b"gate", b"up", b"down")[role])
    return name, b'"dtype":"BF16","shape":[128,128]', 32768


def _layer_names(number: int) -> tuple[bytes, bytes, int]:
    return b"model.layers.%d.mlp.gate.weight" % number, b'"dtype":"BF16","shape":[4,128]', 1024


def _metadata(text: Callable[[float], bytes], folder: Path, share: float) -> None:
    _write_config(folder, _model())
    (folder / WEIGHTS).write_bytes(_header(b'{"__metadata__":' + text(LARGEST * share - 32) + b"}", 0))


def _many_files(name: str, most: int, folder: Path, share: float) -> None:
    _write_config(folder, _model())
    for number in range(int(most * share)):
        os.close(os.open(folder / (name % number), os.O_CREAT | os.O_WRONLY))


def _manifest(name: str, unit: Callable[[int], bytes], key: str, folder: Path, share: float) -> None:
    """A manifest, with its hash in READY, or a report."""
    _write_config(folder, _model())
    _filled(folder / name, b'{"format_version": 2, "%s": [' % key.encode(), unit, b"]}", LARGEST * share)
    _sign(folder, name)


def _manifest_deep(folder: Path, share: float) -> None:
    _write_config(folder, _model())
    text = b'{"format_version": 2, "layers": ' + _nested(b"[", b"]", LARGEST * share) + b"}"
    (folder / "moectl.json").write_bytes(text)
    _sign(folder, "moectl.json")


def _sign(folder: Path, name: str) -> None:
    (folder / "READY").write_text(hashlib.sha256((folder / name).read_bytes()).hexdigest() + "\n")


def _document(unit: Callable[[int], bytes], key: str, folder: Path, share: float) -> None:
    _filled(folder / DOCUMENT, b'{"%s": [' % key.encode(), unit, b"]}", LARGEST * share)


def _document_deep(opening: bytes, closing: bytes, folder: Path, share: float) -> None:
    (folder / DOCUMENT).write_bytes(b'{"groups": ' + _nested(opening, closing, LARGEST * share) + b"}")


def _input(folder: Path, share: float) -> None:
    _sparse_file(folder / TENSORS, _entries(_small_tensor), LARGEST * share)


def _input_hole(folder: Path, share: float) -> None:
    size = int(share * (1 << 40))
    text = b'{"x":{"dtype":"BF16","shape":[%d,128],"data_offsets":[0,%d]}}' % (size // 256, size // 256 * 256)
    (folder / TENSORS).write_bytes(_header(text, 0))
    os.truncate(folder / TENSORS, 8 + len(text) + size // 256 * 256)


def _pipe(name: str, folder: Path, share: float) -> None:
    if name not in (CONFIG, ROWS, DOCUMENT, TENSORS):
        _write_config(folder, _model())
    os.mkfifo(folder / name)


def _device(name: str, folder: Path, share: float) -> None:
    if name not in (CONFIG, ROWS, DOCUMENT, TENSORS):
        _write_config(folder, _model())
    (folder / name).symlink_to("/dev/zero")


def _hole(name: str, folder: Path, share: float) -> None:
    """A file of a terabyte that takes no room on the disk."""
    if name not in (CONFIG, ROWS, DOCUMENT, TENSORS):
        _write_config(folder, _model())
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)


def _bombs() -> Iterator[Bomb]:
    part = functools.partial
    for what, unit in UNITS.items():
        yield Bomb(f"config: list of {what}", part(_config_list, unit, "x"))
    for key in ("layer_types", "architectures", "moe_layer_freq", "mlp_only_layers", "n_hash_layers"):
        yield Bomb(f"config: long {key}", part(_config_list, UNITS["small numbers"], key))
    yield Bomb("config: keys", _config_keys)
    yield Bomb("config: deep objects", part(_config_deep, b'{"a":', b"}"))
    yield Bomb("config: deep lists", part(_config_deep, b"[", b"]"))
    yield Bomb("config: one number", _long_number)
    for key in ("num_hidden_layers", "num_experts", "hidden_size", "moe_intermediate_size", "vocab_size"):
        yield Bomb(f"config: huge {key}", part(_sizes, {key: 10**9}))
    yield Bomb(
        "config: 10,000 layers of 4,096 experts",
        part(_sizes, {"num_hidden_layers": 10_000, "num_experts": 4096}),
    )
    for what, quantization in PATTERNS.items():
        yield Bomb(f"patterns: {what}", part(_patterns, quantization, 2000))
    yield Bomb("index: tensors of one file", part(_index, lambda n: b'"%x":"model.safetensors"' % n))
    yield Bomb("index: a file for each tensor", part(_index, lambda n: b'"%x":"%x.safetensors"' % (n, n)))
    yield Bomb("index: experts", part(_index, lambda n: b'"%s":"model.safetensors"' % _expert_tensor(n)[0]))
    yield Bomb("index: deep", _index_deep)
    for what, entry in (
        ("small tensors", _small_tensor), ("empty tensors", _empty_tensor), ("shapes", _shapes),
        ("escaped names", _escaped), ("experts", _expert_tensor),
    ):  # fmt: skip
        yield Bomb(f"header: {what}", part(_weights, entry, 2))
    yield Bomb("header: layers", part(_weights, _layer_tensor, 10_000))
    yield Bomb("header: layer numbers", part(_weights, _layer_names, 100_000))
    yield Bomb("header: deep metadata", part(_metadata, part(_nested, b'{"a":', b"}")))
    yield Bomb("header: deep lists", part(_metadata, part(_nested, b"[", b"]")))
    yield Bomb(
        "header: long metadata", part(_metadata, lambda limit: b'{"a":"' + b"x" * int(limit - 20) + b'"}')
    )
    for key in ("layers", "groups", "rest"):
        for what in ("empty objects", "small numbers"):
            yield Bomb(f"manifest: {key} of {what}", part(_manifest, "moectl.json", UNITS[what], key))
    yield Bomb("manifest: deep", _manifest_deep)
    yield Bomb("report: experts", part(_manifest, "moectl-report.json", UNITS["empty objects"], "experts"))
    yield Bomb("folder: a million files", part(_many_files, "%07d.txt", 1_000_000))
    yield Bomb("folder: 200,000 weight files", part(_many_files, "%07d.safetensors", 200_000))
    yield Bomb("rows: rows", part(tables.lines, tables.row_line), ROWS)
    yield Bomb("rows: headers", part(tables.lines, tables.settings_line), ROWS)
    yield Bomb("rows: CSV rows", tables.csv_rows, CSV)
    yield Bomb("rows: CSV columns", tables.csv_columns, CSV)
    yield Bomb("rows: CSV lines", tables.csv_lines, CSV)
    yield Bomb("rows: empty objects", part(tables.lines, UNITS["empty objects"]), ROWS)
    yield Bomb("rows: empty lines", part(tables.lines, lambda _: b""), ROWS)
    yield Bomb("rows: deep", part(tables.lines, lambda _: _nested(b"[", b"]", 1 << 20)), ROWS)
    for key in ("groups", "rows", "checkpoints"):
        for what in ("empty objects", "small numbers"):
            yield Bomb(f"document: {key} of {what}", part(_document, UNITS[what], key), DOCUMENT)
    for key in ("groups", "rows"):
        yield Bomb(f"document: decisions in {key}", part(tables.decisions, key), DOCUMENT)
    yield Bomb("document: deep objects", part(_document_deep, b'{"a":', b"}"), DOCUMENT)
    yield Bomb("document: deep lists", part(_document_deep, b"[", b"]"), DOCUMENT)
    yield Bomb("tensors: many", _input, TENSORS)
    yield Bomb("tensors: one of a terabyte", _input_hole, TENSORS)
    for kind, make in (("a pipe", _pipe), ("a device", _device), ("a terabyte", _hole)):
        for name in (
            CONFIG,
            "hf_quant_config.json",
            INDEX,
            WEIGHTS,
            "moectl.json",
            "progress.jsonl",
            "adapter_config.json",
        ):
            yield Bomb(f"{kind}: {name}", part(make, name))
        for name in (ROWS, DOCUMENT, TENSORS):
            yield Bomb(f"{kind}: {name}", part(make, name), name)


BOMBS = tuple(_bombs())
