"""Commands run inside the test process."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import typer.testing

from moectl.cli.main import app

from .json_schemas import check

# Made once of the program's functions, not for each command that is run.
typer.testing._get_command = cache(typer.testing._get_command)


@dataclass(frozen=True)
class Done:
    """What a command left: exit code and both streams."""

    code: int
    stdout: str
    stderr: str

    @property
    def words(self):
        """What stands on stdout without its line breaks."""
        return " ".join(self.stdout.split())

    @property
    def document(self):
        """The JSON document on stdout, which is as the command's schema says."""
        document = json.loads(self.stdout)
        check(document)
        return document


def moectl(*arguments, code=0, env=None):
    """Run `moectl ARGUMENTS`; fails unless it ends with `code` (None: any) and without a traceback."""
    words = [str(a) for a in arguments]
    with _timing(words):
        result = typer.testing.CliRunner().invoke(app, words, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), (arguments, result.exit_code, result.stdout, result.stderr)
    return Done(result.exit_code, result.stdout, result.stderr)


def _timing(words):
    """Commands that time calls do it fast; others, and those without torch, import nothing for that."""
    if words[:1] in (["bench"], ["run"], ["tune"]) and find_spec("torch"):
        from .quick_timing import quick_timing

        return quick_timing()
    return nullcontext()
