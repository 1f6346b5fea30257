"""Another Python environment of this machine: where its packages are, found without running its interpreter.

Only paths, ``pyvenv.cfg``, ``.pth`` files and package metadata are read. Lines of ``.pth`` files that a
Python would execute are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import UsageError
from ..files.safe_reading import text_or_empty
from ..files.strict_json import parse_value
from ..files.user_paths import user_path

_INTERPRETER = re.compile(r"(?:python|pypy)(\d+\.\d+)?[\d.]*t?(?:\.exe)?")
_SITE_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """Where a Python finds packages and programs.

    Attributes:
        name: the path that the user gave.
        folders: directories of its packages, in the order in which it searches them.
        programs: directory of its programs.
        interpreter: path of its Python; `version`: its version as far as it is known without running it.
    """

    name: str
    folders: tuple[str, ...]
    programs: str
    interpreter: str = ""
    version: str = ""


def python_environment(path: str | Path) -> PythonEnvironment:
    """The environment of an interpreter, such as ``venv/bin/python``, or of its directory, such as ``venv``.

    UsageError if there is no interpreter, or no directory of packages that belongs to it.
    """
    given = user_path(path)
    if not given.exists():
        raise UsageError(f"--python {path}: there is no such file or directory")
    interpreter = _interpreter(given)
    if interpreter is None:
        raise UsageError(
            f"--python {path} is neither a Python interpreter nor an environment with bin/python",
            hint="give the interpreter that runs the engine: `which python` prints it",
        )
    prefix = interpreter.parent.parent
    settings = _settings(prefix / "pyvenv.cfg")
    own = _site_folders(prefix, _version(interpreter, settings))
    if settings.get("include-system-site-packages", "").lower() == "true" and "home" in settings:
        own += _site_folders(Path(settings["home"]).parent, _version(interpreter, settings))
    if not own and not settings:
        # A symbolic link to the interpreter of another installation, outside of any environment.
        real = interpreter.resolve()
        own = _site_folders(real.parent.parent, _version(real, {}))
    if not own:
        raise UsageError(
            f"--python {path}: no site-packages directory was found under {prefix}",
            hint="give the interpreter of the environment that has the engine",
        )
    return PythonEnvironment(
        str(path),
        tuple(dict.fromkeys(_with_linked(own))),
        str(interpreter.parent),
        str(interpreter),
        settings.get("version") or settings.get("version_info") or _version(interpreter, settings),
    )


def _interpreter(given: Path) -> Path | None:
    """The interpreter at a path or in the directory of an environment; links are not followed."""
    if given.is_file():
        return given.absolute() if _INTERPRETER.fullmatch(given.name.lower()) else None
    folders = [given, given / "bin", given / "Scripts"]
    names = ("python3", "python", "python.exe")
    found = (folder / name for folder in folders for name in names if (folder / name).is_file())
    return next((interpreter.absolute() for interpreter in found), None)


def _settings(file: Path) -> dict[str, str]:
    """The settings of a ``pyvenv.cfg``; empty without one."""
    pairs = (line.partition("=") for line in text_or_empty(file).splitlines())
    return {key.strip().lower(): value.strip() for key, equals, value in pairs if equals}


def _version(interpreter: Path, settings: dict[str, str]) -> str:
    """Its version, such as ``3.12``; empty if neither settings nor its real name tell."""
    stated = settings.get("version") or settings.get("version_info") or ""
    if match := re.match(r"\d+\.\d+", stated):
        return match[0]
    for name in (interpreter.name, interpreter.resolve().name):
        match = _INTERPRETER.fullmatch(name.lower())
        if match and match[1]:
            return match[1]
    return ""


def _site_folders(prefix: Path, version: str) -> list[Path]:
    """The existing directories of packages below `prefix`, for a Python of this version if it is known.

    A distribution's own Python has further ones in ``local`` and in ``lib/python3``.
    """
    patterns = [f"python{version}*" if version else "python[0-9]*.[0-9]*", "python3"]
    roots = [prefix / "local" / "lib", prefix / "lib", prefix / "lib64"]
    if prefix == Path("/usr"):
        roots.insert(0, Path("/usr/local/lib"))
    libraries = [library for root in roots for pattern in patterns for library in sorted(root.glob(pattern))]
    libraries.append(prefix / "Lib")
    folders = [library / name for library in libraries for name in _SITE_FOLDERS]
    exact = re.compile(rf"python{re.escape(version)}t?|python3|Lib" if version else ".*")
    kept = [folder for folder in folders if folder.is_dir() and exact.fullmatch(folder.parent.name)]
    return list({folder.resolve(): folder for folder in reversed(kept)}.values())[::-1]


def _with_linked(folders: list[Path]) -> Iterator[str]:
    """The directories, each followed by those that its ``.pth`` files and editable installs add."""
    for folder in folders:
        yield str(folder)
        for file in sorted(folder.glob("*.pth")):
            for line in text_or_empty(file).splitlines():
                entry = line.strip()
                if entry and not entry.startswith(("#", "import ", "import\t")) and (folder / entry).is_dir():
                    yield str(folder / entry)
        for distribution in distributions(path=[str(folder)]):
            yield from _editable(distribution)


def _editable(distribution: Distribution) -> Iterator[str]:
    """The source directories of an editable install, from its record of the URL it was installed from."""
    try:
        document = parse_value(distribution.read_text("direct_url.json") or "null", "it", ValueError)
        url = urlsplit(document["url"]) if document["dir_info"]["editable"] is True else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if url is not None and url.scheme == "file":
        source = Path(unquote(url.path))
        yield from (str(folder) for folder in (source, source / "src") if folder.is_dir())
