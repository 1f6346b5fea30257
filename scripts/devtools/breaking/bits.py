"""Single bits flipped in what conversions read and write, by kind of byte, and who must notice."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .converted import small_source
from .outcomes import Ended, command, ended

FOUND, USAGE, DAMAGED = 1, 2, 4
"""Exit codes of a finding, of what is not finished, and of a checkpoint or directory that cannot be used."""

SELDOM = 20
"""Of so many flips that loading does not notice, one is given to commands that take seconds."""

SIGNED = {"moectl.json", "READY", "moectl-report.json"}
"""Files of which the others' hashes depend: nothing is read where they are damaged."""

LAYERS = 2

CPU = ("--device", "cpu", "--backend", "torch")


@dataclass(frozen=True)
class Place:
    """Bytes of a file, from `start` to `end`, which is excluded."""

    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class Flip:
    """A bit: of which kind of byte, in which file, and where."""

    kind: str
    file: Path
    offset: int
    bit: int

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The bit is another one inside the context."""
        self._turn()
        try:
            yield
        finally:
            self._turn()

    def _turn(self) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            (byte,) = file.read(1)
            file.seek(self.offset)
            file.write(bytes([byte ^ 1 << self.bit]))

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.offset} of {self.file.name}"


class UnnoticedError(Exception):
    """What a command did with a flipped bit, and must not do."""


Check = Callable[[Flip, int], str]
"""Runs with a bit flipped, the n-th of its kind; returns ``refused``, ``unaffected`` or ``not run``."""


@dataclass(frozen=True)
class Specimen:
    """Files in which bits are flipped, and what must notice.

    Attributes:
        name: what the files are.
        places: by kind of byte, where such bytes are.
        checks: by the name of a command.
    """

    name: str
    places: Mapping[str, Sequence[Place]]
    checks: Mapping[str, Check]

    def flip(self, kind: str, dice: random.Random) -> Flip:
        """A random bit of that kind; each is as likely as the others."""
        places = self.places[kind]
        place = dice.choices(places, [place.end - place.start for place in places])[0]
        return Flip(kind, place.file, dice.randrange(place.start, place.end), dice.randrange(8))


@dataclass
class Tally:
    """Flips of each kind of byte, what they led to, and the defects: kind, command, bit and words."""

    flips: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    defects: list[tuple[str, str, str, str]] = field(default_factory=list)

    def flip(self, specimen: Specimen, kind: str, number: int, seed: int) -> None:
        """Flips one bit, which follows from the seed, the kind and the number, for every check."""
        name = f"{specimen.name}: {kind}"
        flip = specimen.flip(kind, random.Random(f"{seed} {name} {number}"))
        self.flips[name] += 1
        for words, check in specimen.checks.items():
            with flip.made():
                try:
                    self.ends[name, check(flip, number)] += 1
                except Exception as error:
                    self.ends[name, "defects"] += 1
                    self.defects.append((name, words, str(flip), f"{type(error).__name__}: {error}"[:400]))


def places_below(folder: Path, *, left_out: Sequence[str] = ()) -> dict[str, list[Place]]:
    """Every byte of the files in a directory, by kind: tensors' by what they are, others' by their file."""
    found: dict[str, list[Place]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in left_out:
            continue
        size = path.stat().st_size
        if path.suffix not in (".safetensors", ".experts"):
            rank = "a rank's " if path.parent != folder else ""
            found.setdefault(f"{rank}{path.name}", []).append(Place(path, 0, size))
            continue
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length)
        found.setdefault("length of headers", []).append(Place(path, 0, 8))
        header = json.loads(text)
        metadata = json.dumps(header.pop("__metadata__", None), separators=(",", ":")).encode()
        at = text.find(metadata)
        if at >= 0:
            found.setdefault("metadata of headers", []).append(Place(path, 8 + at, 8 + at + len(metadata)))
        found.setdefault("headers", []).append(Place(path, 8, 8 + length))
        for name, form in header.items():
            first, last = form["data_offsets"]
            if last > first:
                place = Place(path, 8 + length + first, 8 + length + last)
                found.setdefault(tensor_kind(name), []).append(place)
    return found


def tensor_kind(name: str) -> str:
    """What the bytes of a tensor of that name are."""
    if "router" in name:
        return "routers"
    for kind in ("bias", "scale"):
        if kind in name:
            return f"{kind}es" if kind == "bias" else "scales"
    return "weights" if ".experts" in name or "moectl." in name else "other tensors"


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _noticed(found: Ended, flip: Flip, code: int) -> str:
    """Checks what a command says that must notice; raises UnnoticedError."""
    text = found.out + found.error
    if found.code != code:
        raise UnnoticedError(f"exit code {found.code}, not {code}: {text[-300:]}")
    if flip.file.name not in text:
        raise UnnoticedError(f"does not name {flip.file.name}: {text[-300:]}")
    return "refused"


def _refused(found: Ended) -> bool:
    """Whether a command refused damaged files; raises UnnoticedError if it failed in another way."""
    if found.code not in (0, DAMAGED):
        raise UnnoticedError(f"exit code {found.code}: {(found.out + found.error)[-300:]}")
    return found.code == DAMAGED


def _layer(flip: Flip, number: int) -> int:
    """The layer whose file the bit is in; of other files, each in turn."""
    return int(found[1]) if (found := re.search(r"-(\d+)\.experts$", flip.file.name)) else number % LAYERS


@dataclass(frozen=True)
class Converted:
    """The commands that use a converted directory, or one of several ranks, beside what they gave before.

    Attributes:
        folder: the directory.
        share: that of the rank whose experts are loaded and run; `folder` itself if there are no ranks.
        work: where they write to.
    """

    folder: Path
    share: Path
    work: Path

    @property
    def checks(self) -> dict[str, Check]:
        """By name: whoever checks everything, whoever loads, whoever runs, whoever restores."""
        _ = self._loaded, self._ran, self._restored  # before the first flip
        return {
            "verify": self.verify,
            "load_prepared": self.load,
            "run": self.run,
            "bench": self.bench,
            "unconvert": self.unconvert,
        }

    def verify(self, flip: Flip, number: int) -> str:
        """`moectl verify` names the file."""
        code = DAMAGED if flip.file.name in SIGNED else FOUND
        return _noticed(ended("verify", self.folder), flip, code)

    def load(self, flip: Flip, number: int) -> str:
        """`load_prepared` refuses, or gives the same tensors."""
        from moectl.errors import CheckpointError

        layer = _layer(flip, number)
        for check in (True, False):
            try:
                if self._tensors(layer, check) != self._loaded[layer]:
                    raise UnnoticedError(f"load_prepared(check={check}) gives other tensors")
            except CheckpointError:
                continue
            return "unaffected"
        return "refused"

    def run(self, flip: Flip, number: int) -> str:
        """`moectl run` refuses, or computes the same."""
        if self._skipped(flip, number):
            return "not run"
        layer = _layer(flip, number)
        found, result = self._run(layer)
        if _refused(found):
            return "refused"
        if result != self._ran[layer]:
            raise UnnoticedError("computes something else")
        return "unaffected"

    def bench(self, flip: Flip, number: int) -> str:
        """`moectl bench` refuses where loading does."""
        if self._skipped(flip, number):
            return "not run"
        words = ("--layer", _layer(flip, number), "-m", "1", "--repeats", "1")
        if _refused(ended("bench", self.share, *CPU, *words)):
            return "refused"
        if self.load(flip, number) == "refused":
            raise UnnoticedError("times what load_prepared refuses")
        return "unaffected"

    def unconvert(self, flip: Flip, number: int) -> str:
        """`moectl unconvert` refuses and leaves nothing, or restores the same."""
        found, restored = self._unconvert()
        if not _refused(found):
            if restored != self._restored:
                raise UnnoticedError("restores something else")
            return "unaffected"
        if restored:
            raise UnnoticedError(f"refuses, and leaves {', '.join(restored)}")
        return "refused"

    @cached_property
    def _loaded(self) -> list[list[tuple[str, bytes]]]:
        return [self._tensors(layer, True) for layer in range(LAYERS)]

    @cached_property
    def _ran(self) -> list[bytes]:
        ran = [self._run(layer) for layer in range(LAYERS)]
        assert all(found.code == 0 for found, _ in ran), ran
        return [result for _, result in ran]

    @cached_property
    def _restored(self) -> dict[str, bytes]:
        found, restored = self._unconvert()
        assert found.code == 0, found.error
        return restored

    def _skipped(self, flip: Flip, number: int) -> bool:
        return bool(number % SELDOM) and self.load(flip, number) != "refused"

    def _tensors(self, layer: int, check: bool) -> list[tuple[str, bytes]]:
        import torch

        import moectl

        weights = moectl.load_prepared(self.share, layer, check=check).weights
        return [
            (name, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for name, value in weights.items()
        ]

    def _run(self, layer: int) -> tuple[Ended, bytes]:
        out = self.work / "y.safetensors"
        out.unlink(missing_ok=True)
        words = ("--layer", layer, "--tokens", "1", "--output", out)
        found = ended("run", self.share, *CPU, *words)
        return found, out.read_bytes() if out.exists() else b""

    def _unconvert(self) -> tuple[Ended, dict[str, bytes]]:
        back = self.work / "back"
        shutil.rmtree(back, ignore_errors=True)
        found = ended("unconvert", self.folder, back)
        return found, contents(back)


def specimens(work: Path) -> Iterator[Specimen]:
    """What is damaged: converted directories, of ranks too, portable ones, unfinished ones, sources."""
    source = small_source(work, LAYERS)
    (source / "tokenizer.json").write_text('{"vocabulary": {"a": 1, "b": 2}}\n')
    for name, options, share in (
        ("converted", ("marlin",), "."),
        ("ranks", ("marlin", "--tp-size", "2"), "rank-00"),
    ):
        folder = _made(source, work / name, *options)
        used = Converted(folder, folder / share, work)
        yield Specimen(name, places_below(folder), used.checks)
    portable = _made(source, work / "portable", "int8", "--requantize")

    def verify(flip: Flip, number: int) -> str:
        code = DAMAGED if flip.file.name in SIGNED else FOUND
        return _noticed(ended("verify", portable), flip, code)

    yield Specimen("portable", places_below(portable), {"verify": verify})
    yield _unfinished(source, work)
    yield _source(source, work / "converted")


def _made(source: Path, folder: Path, *options: str) -> Path:
    said = command("convert", source, folder, "--to", *options)
    assert folder.exists(), said
    return folder


def _unfinished(source: Path, work: Path) -> Specimen:
    """A directory whose parts are converted: finishing it gives what was converted, or refuses."""
    folder = _made(source, work / "unfinished", "marlin", "--part", "1/1")
    whole, copied = contents(_made(source, work / "whole", "marlin")), work / "copied"

    def finish(flip: Flip, number: int) -> str:
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder, copied)
        found = ended("convert", source, copied, "--to", "marlin", "--finish")
        # A log whose last line does not end is one whose writer was stopped: a part is missing.
        if found.code == USAGE or _refused(found):
            return "refused"
        if contents(copied) == whole:
            return "unaffected"
        return _noticed(ended("verify", copied), flip, FOUND)

    places = places_below(folder)
    return Specimen("unfinished", places, {"convert --finish": finish})


def _source(source: Path, converted: Path) -> Specimen:
    """A checkpoint that was converted: comparing the two names what differs."""

    def compare(flip: Flip, number: int) -> str:
        found = ended("verify", converted, "--source", source)
        text = found.out + found.error
        if found.code not in (FOUND, DAMAGED):
            raise UnnoticedError(f"exit code {found.code}: {text[-300:]}")
        if not any(word in text for word in (flip.file.name, "differs from the source's bytes")):
            raise UnnoticedError(f"does not name {flip.file.name}: {text[-300:]}")
        return "refused"

    return Specimen("source", places_below(source), {"verify --source": compare})
