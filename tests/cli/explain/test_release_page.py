"""docs/release_changes.md is what `moectl explain --from` prints, with the rules as they are."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from moectl.oracle.registry import engine_named
from support.invoking import moectl
from support.sampling import every_nth

PAGE = Path(__file__).parents[3] / "docs" / "release_changes.md"
SECTIONS = re.findall(
    r"^## from vLLM (\S+) to vLLM (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S
)


def test_sections_are_of_releases_that_follow_each_other() -> None:
    assert len(SECTIONS) >= 4
    for (older, newer, _), (_, next_newer, _) in pairwise(SECTIONS):
        assert older == next_newer
        assert (
            engine_named(f"vllm=={older}").version == older
            and engine_named(f"vllm=={newer}").version == newer
        )


@pytest.mark.parametrize(
    ("older", "newer", "text"), every_nth([pytest.param(*section, id=section[1]) for section in SECTIONS], 2)
)
def test_a_section_is_what_is_printed(older: str, newer: str, text: str) -> None:
    (command,) = re.findall(r"^moectl (explain --from .*)$", PAGE.read_text("utf-8"), re.M)
    words = command.split()
    words[words.index("--from") + 1], words[words.index("--to") + 1] = f"vllm=={older}", f"vllm=={newer}"
    done = moectl(*words, "--offline", code=None)
    assert done.stdout.strip() == f"## from vLLM {older} to vLLM {newer}\n{text}".strip()
