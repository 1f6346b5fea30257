"""Paths below home directories, of users who have one and of those who have none."""

from pathlib import Path

import pytest

from moectl.errors import UsageError
from moectl.files.user_paths import home_folder, user_path
from support.invoking import moectl

NOBODY = "~no-such-user-here/x"


def test_a_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~/x") == Path("/somewhere/x") and user_path(Path("x~")) == Path("x~")
    with pytest.raises(UsageError, match="names the home directory of a user who has none"):
        user_path(NOBODY)


def test_a_user_without_a_home_directory_is_told(monkeypatch):
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory")

    monkeypatch.setattr(Path, "home", unknown)
    assert home_folder({"HOME": "/there"}) == Path("/there")
    with pytest.raises(UsageError, match="this user has no home directory"):
        home_folder({})


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("peers", "--peers", NOBODY), {}),
        (("explain", "openai/gpt-oss-20b", "--python", NOBODY), {}),
        (("explain", "openai/gpt-oss-20b", "--gpu", "h200"), {"MOECTL_CACHE": NOBODY}),
        (("synth", NOBODY, "out"), {}),
    ],
)
def test_commands_say_whose_home_is_missing(arguments, env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = moectl(*arguments, env=env, code=2)
    assert "a user who has none" in " ".join(done.stderr.split())
