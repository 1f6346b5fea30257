"""A Hub whose answers are changed: statuses, header lines, lists of files, documents, ranges of weights."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .headers import changed_header, header_seeds, packed, split_header
from .outcomes import function
from .search import Reader

COMMIT = "0123456789abcdef" * 2 + "01234567"
WEIGHTS = "model.safetensors"

_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128,
    "num_hidden_layers": 1, "moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 1,
    "norm_topk_prob": True, "hidden_act": "silu",
}  # fmt: skip


def hub_readers(work: Path) -> Iterator[Reader]:
    """The readers of a Hub's answers, as JSON by a part of their path, and of what is kept of them."""
    yield Reader("Hub", [_good()], partial(_asked, work / "hub"), share=2)
    yield from _cache_readers(work)


def _cache_readers(work: Path) -> Iterator[Reader]:
    from unittest import mock

    from huggingface_hub import constants

    from moectl.checkpoint.source.hub_cache import LISTING, HeaderCache

    with mock.patch.object(constants, "HF_ASSETS_CACHE", str(work / "assets")):
        cache = HeaderCache("org/tiny", COMMIT)
    good = json.dumps({WEIGHTS: 0}).encode()

    def listed(data: bytes) -> str:
        cache.write(WEIGHTS, packed(b"{}", 0), 10)
        (cache.folder / LISTING).write_bytes(data)
        return function(lambda: cache.tensors(None))

    def header(file: bytes) -> str:
        cache.write(WEIGHTS, file, len(file))
        cache.write_listing({WEIGHTS: len(file)})
        return function(lambda: cache.tensors(None))

    yield Reader("cached Hub, sizes", [good], listed, share=2)
    yield Reader("cached Hub, headers", header_seeds(), header, 2, changed_header, split=split_header)


def _good() -> bytes:
    """Answers of a Hub with a small checkpoint, by the end of the path; bodies are JSON or text."""
    tensors: dict[str, Any] = {}
    for number, (expert, matrix) in enumerate((e, m) for e in range(2) for m in ("gate", "up", "down")):
        name = f"model.layers.0.mlp.experts.{expert}.{matrix}_proj.weight"
        offsets = [number * 32768, (number + 1) * 32768]
        tensors[name] = {"dtype": "BF16", "shape": [128, 128], "data_offsets": offsets}
    text = json.dumps(tensors, separators=(",", ":"))
    size = 8 + len(text) + 6 * 32768
    files = [
        {"rfilename": "config.json", "size": len(json.dumps(_CONFIG))},
        {"rfilename": WEIGHTS, "size": size},
    ]
    listing = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": files, "tags": []}
    stated = {"ETag": '"e1"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    answers = {
        "/api/models/org/tiny": {
            "status": 200,
            "headers": {"Content-Type": "application/json"},
            "body": listing,
        },
        "config.json": {"status": 200, "headers": stated, "body": _CONFIG},
        WEIGHTS: {"status": 206, "headers": stated, "size": size, "body": text},
    }
    return json.dumps(answers).encode()


def _asked(folder: Path, data: bytes) -> str:
    """What opening ``org/tiny`` says when the Hub answers as `data` says."""
    from unittest import mock

    from huggingface_hub import constants

    from moectl.checkpoint import open_checkpoint
    from moectl.checkpoint.source import hub

    try:
        answers = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(answers, dict):
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    paths = {
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_ASSETS_CACHE": str(folder / "assets"),
        "HF_HUB_OFFLINE": False,
    }
    with contextlib.ExitStack() as stack:
        for name, value in paths.items():
            stack.enter_context(mock.patch.object(constants, name, value))
        stack.enter_context(mock.patch.object(hub, "PAUSE", 0.0))
        stack.enter_context(mock.patch.object(hub, "LONGEST_PAUSE", 0.0))
        stack.enter_context(_client(answers))
        return function(lambda: open_checkpoint("org/tiny", allow_catalogue=False))


@contextlib.contextmanager
def _client(answers: dict[str, Any]) -> Iterator[None]:
    """The Hub's client asks nobody, and gets `answers`."""
    http: Any = importlib.import_module("huggingface_hub.utils._http")
    library: Any = getattr(http, "httpx2", None) or http.httpx

    def answer(request: Any) -> Any:
        for end, given in answers.items():
            if end and request.url.path.endswith(end) and isinstance(given, dict):
                return _response(library, request, given)
        return library.Response(404, headers={"X-Error-Code": "EntryNotFound"})

    http.set_client_factory(
        lambda: library.Client(transport=library.MockTransport(answer), follow_redirects=False)
    )
    try:
        yield
    finally:
        http.set_client_factory(http.default_client_factory)


def _response(library: Any, request: Any, given: dict[str, Any]) -> Any:
    status, body = given.get("status"), given.get("body")
    if not isinstance(status, int) or not 200 <= status < 600:
        status = 200
    text = body if isinstance(body, str) else json.dumps(body)
    content, headers = text.encode("utf-8", "surrogatepass"), {}
    for name, value in (given.get("headers") or {}).items() if isinstance(given.get("headers"), dict) else ():
        with contextlib.suppress(UnicodeEncodeError, ValueError):
            name.encode("ascii")
            headers[name] = (
                str(value).encode("latin-1", "replace").decode("latin-1").replace("\n", "").replace("\r", "")
            )
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
    if "size" in given and wanted:
        size = given["size"] if isinstance(given["size"], int) else 0
        whole = packed(content, max(0, min(size, 1 << 20) - 8 - len(content)))
        start, end = int(wanted[1]), min(int(wanted[2]), len(whole) - 1)
        content = whole[start : end + 1]
        headers.setdefault("Content-Range", f"bytes {start}-{end}/{size}")
    return library.Response(status, headers=headers, content=b"" if request.method == "HEAD" else content)
