"""Commands run inside the test process."""

import json
from dataclasses import dataclass

from typer.testing import CliRunner

from moectl.cli.main import app

from .json_schemas import check


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
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), (arguments, result.exit_code, result.stdout, result.stderr)
    return Done(result.exit_code, result.stdout, result.stderr)
