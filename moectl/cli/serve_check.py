"""`moectl serve-check`: whether a server would start with moectl's experts, and why not."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ExitCode, UsageError
from ..integrations.engine_names import ENGINE_NAMES
from .options import Offline, WeightsArg, framed, option, pick
from .output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..environment import Device
    from ..integrations.serve_report import ServeReport
    from .text_blocks import Block

EXAMPLES = (
    f"moectl serve-check ./prepared --engine {ENGINE_NAMES[0]}",
    f"moectl serve-check openai/gpt-oss-120b --engine {ENGINE_NAMES[1]} --tp 2 --gpu h200 --json",
    f"moectl serve-check ./prepared --engine {ENGINE_NAMES[0]} --option enable-eplb",
)
MORE = ("Exit code 0 if it works, 1 if it does not.",)


@framed("serve-check")
def serve_check(
    checkpoint: WeightsArg,
    engine: Annotated[str, option("--engine", help=f"One of {', '.join(ENGINE_NAMES)}.", show_default=False)],
    tp: Annotated[int, option("--tp", own=True, help="Ranks of tensor parallelism.", min=1)] = 1,
    ep: Annotated[int, option("--ep", own=True, help="Ranks that experts are distributed over.", min=1)] = 1,
    gpu: Annotated[
        str | None, option("--gpu", help="The server's, such as h200; default: this machine's.")
    ] = None,
    options: Annotated[
        list[str] | None,
        option("--option", own=True, help="An option of the engine: NAME or NAME=VALUE. Repeatable."),
    ] = None,
    release: Annotated[
        str | None, option("--release", own=True, help="The engine's version, if it is not installed here.")
    ] = None,
    verify: Annotated[
        bool, option("--verify", own=True, help="Also hash the files of a converted directory.")
    ] = False,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Check before a start whether an engine would serve CKPT.

    With moectl's experts. Checks the engine's release and how it finds moectl, the checkpoint or converted
    directory for these ranks, options, GPU, kernels of every layer, and memory, by the facts that refuse at
    start. Then comes the command that starts the server.
    """
    from ..integrations.serve_check import check_serving
    from ..integrations.serve_request import ServeRequest
    from ..integrations.served_engines import SERVED_ENGINES
    from . import text_blocks

    report = check_serving(
        ServeRequest(
            checkpoint,
            SERVED_ENGINES[pick(engine, ENGINE_NAMES, "engine")],
            _device(gpu),
            tp,
            ep,
            parsed_options(options or ()),
            release,
            verify,
            offline,
            stated=gpu is not None,
        )
    )
    brief = report.serve if report.works else [f.says for f in report.findings if f.level == "refused"]

    def draw(console: Any) -> None:
        text_blocks.draw(list(_drawn(report)), console)
        # Unbroken, to be copied.
        console.print(f"\n{report.serve}", soft_wrap=True)

    out.result(_document(report), draw, brief)
    return ExitCode.DONE if report.works else ExitCode.FOUND


_FLAGS = {"true": True, "false": False}


def parsed_options(texts: list[str] | tuple[str, ...]) -> dict[str, object]:
    """Options such as ``enable-eplb`` or ``--load-format=auto``, by name with dashes.

    A flag is True, and so are ``true`` and ``false`` the values that they name.

    Raises UsageError for an option without a name, or one that is given twice.
    """
    options: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = "--" + name.strip().lstrip("-").replace("_", "-")
        if name == "--" or name in options:
            raise UsageError(f"--option takes each NAME or NAME=VALUE once, got {text!r}")
        options[name] = _FLAGS.get(value.lower(), value) if equals else True
    return options


def _device(gpu: str | None) -> "Device":
    from ..environment import detect_device, find_device

    return detect_device(os.environ) if gpu is None else find_device(gpu)


def _document(report: "ServeReport") -> dict[str, Any]:
    return {**asdict(report), "works": report.works}


def _drawn(report: "ServeReport") -> "Iterator[Block]":
    from .text_blocks import Heading, Listing, ListingEntry, TextLine

    tones = {"refused": "wrong", "warning": "warning", "fine": ""}
    yield Heading("works" if report.works else "does not work", 1, tone="good" if report.works else "wrong")
    yield Listing(
        tuple(
            ListingEntry(
                finding.level,
                f"{finding.about}: {finding.says}",
                (("do", finding.do),) if finding.do else (),
                strong=finding.level == "refused",
                tone=tones[finding.level],
            )
            for finding in sorted(report.findings, key=lambda finding: [*tones].index(finding.level))
        )
    )
    yield TextLine("")
    yield TextLine("Start it with:" if report.works else "Once that is done, start it with:")
