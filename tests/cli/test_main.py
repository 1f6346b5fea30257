"""The program as a whole: imports, start-up time, environment variables, exit codes of wrong usage."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moectl.cli.main import COMMANDS, epilog
from support import python_forks
from support.sampling import every_nth

HEAVY = ("torch", "triton", "flashinfer")
PROBE = """
import sys
sys.argv = ["moectl", *{argv!r}]
from moectl.__main__ import main
try:
    main()
except SystemExit as stop:
    code = stop.code or 0
print("loaded:", [m for m in {heavy!r} if m in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def start(*argv, env=None):
    """Run moectl where its commands alone are imported; its stderr ends with the heavy ones that it has."""
    probe = PROBE.format(argv=list(argv), heavy=HEAVY)
    return python_forks.run(["-c", probe], env={**os.environ, **(env or {})}, timeout=60, imported="commands")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["explain", "--help"], 0),
        (["bench", "--help"], 0),
        (["explain", "openai/gpt-oss-20b", "--gpu", "h100", "--offline"], 0),
        (["explain", "openai/gpt-oss-20b", "--gpu", "no-such-gpu"], 2),
        (["explain", "no/such-model", "--offline"], 3),
        (["explain", "x", "--tp", "many"], 2),
        (["convert", "a", "b", "--to", "no-such-layout"], 2),
        (["bench", "x", "-m", "eight"], 2),
        (["run", "x", "--tokens", "-1"], 2),
        (["bench", "x", "--backend", "warp,torch"], 2),
        (["convert", "/no/such/folder", "b", "--to", "marlin"], 4),
        (["explain", "openai/gpt-oss-20b", "--gpu", "h100", "--backend", "marlni"], 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["convert", "--help"], 0),
                (["run", "--help"], 0),
                (["explain", "openai/gpt-oss-20b", "--gpu", "h100", "--offline", "--json"], 0),
                (["explane"], 2),
                (["explain"], 2),
                (["bench", "x", "--format", "xml"], 2),
                (["bench", "x", "--routing", "zipf:nan"], 2),
                (["run", "x", "--tokens", "99999999999"], 2),
                (["run", "x", "--device", "tpu"], 2),
                (["run", "x", "--backend", "warp"], 2),
                (["bench", "x", "--json", "--format", "csv"], 2),
                (["run", "/no/such/folder"], 4),
                (["convert", "a", "b", "--to", "marlin", "--arch", "sm1"], 2),
            )
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_light_paths_import_nothing_heavy(argv, code):
    done = start(*argv)
    assert done.returncode == code, done.stderr
    assert done.stderr.rstrip().endswith("loaded: []"), done.stderr
    assert "Traceback" not in done.stderr


def test_help_starts_in_a_third_of_the_time_of_importing_torch():
    def used():
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    def best(*command):
        """Seconds of CPU time, which other processes change less than what a clock shows."""
        times = []
        for _ in range(2):
            begin = used()
            subprocess.run(command, capture_output=True, check=True)
            times.append(used() - begin)
        return min(times)

    torch = best(sys.executable, "-c", "import torch")
    help_ = best(sys.executable, "-m", "moectl", "--help")
    assert help_ <= torch / 3, f"moectl --help {help_:.3f} s, import torch {torch:.3f} s"


def commands():
    import typer

    from moectl.cli.main import app

    return typer.main.get_command(app).commands


def test_every_option_has_an_environment_variable():
    seen = {}
    for name, command in commands().items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                long = next(text for text in parameter.opts if text.startswith("--"))
                seen[name, long.removeprefix("--").replace("-", "_")] = parameter.envvar
    assert len(seen) > 40
    for (command, name), variables in seen.items():
        assert variables[0] == f"MOECTL_{command}_{name}".upper()
        assert variables[1:] in ([], [f"MOECTL_{name}".upper()])


def test_environment_variable_is_used():
    done = start("explain", "openai/gpt-oss-20b", env={"MOECTL_GPU": "b200", "MOECTL_JSON": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"]["arch"] == "sm100"


@pytest.mark.parametrize(
    "command",
    every_nth(["", "explain", "convert", "verify", "bench", "unconvert", "run", "tune", "synth", "list"], 2),
)
def test_help_fits_one_screen_with_examples(command):
    done = python_forks.run(
        ["-m", "moectl", *command.split(), "--help"],
        env={**os.environ, "COLUMNS": "120", "TERMINAL_WIDTH": "120"},
        imported="commands",
    )
    assert done.returncode == 0
    assert "Examples" in done.stdout
    assert len(done.stdout.splitlines()) <= 50, done.stdout


def test_examples_fit_80_columns_and_can_be_pasted():
    for function, name in COMMANDS:
        module = sys.modules[function.__module__]
        lines = epilog(module.EXAMPLES, getattr(module, "MORE", ())).splitlines()
        assert max(map(len, lines)) <= 78, name
        pasted = "\n".join(lines).replace("\\\n", " ")
        for example in module.EXAMPLES:
            assert example in " ".join(pasted.split()) and " moectl " not in example, example


def test_a_long_example_goes_on_in_the_next_line():
    long = f"moectl bench {' '.join(f'./checkpoint-{n}' for n in range(8))}"
    first, *others = epilog([long]).splitlines()[2:]
    assert first.startswith("  moectl bench ./checkpoint-0") and first.endswith(" \\")
    assert others[0].startswith("      ./checkpoint-") and not others[-1].endswith("\\")


def test_without_arguments_the_help_is_printed_as_it_is_asked_for():
    done = start()
    assert done.returncode == 2 and not done.stdout
    printed = done.stderr.removesuffix("loaded: []\n").rstrip()
    assert printed == start("--help").stdout.rstrip() and len(printed.splitlines()) > 20


def test_each_command_is_told_in_a_whole_line():
    """Nothing of the list of commands is cut off at 80 columns."""
    shown = start("--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    assert "convert" in shown and "..." not in shown.partition("Commands:")[2]


def test_unknown_command_suggests_the_near_one():
    done = start("explane")
    assert "explain" in done.stderr


def on_a_terminal(*argv, columns=120, **env):
    """What moectl writes to a terminal of that width."""
    import pty

    reader, writer = pty.openpty()
    with Path(os.devnull).open("w") as nothing:
        done = python_forks.start(
            ["-m", "moectl", *argv],
            stdout=writer,
            stderr=nothing,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **env},
            imported="commands",
        )
    os.close(writer)
    found = b""
    while True:
        try:
            piece = os.read(reader, 1 << 16)
        except OSError:  # Linux says EIO when the last writer is gone
            break
        if not piece:
            break
        found += piece
    os.close(reader)
    assert done.wait() == 0
    return found.decode()


EXPLAIN = ("explain", "openai/gpt-oss-20b", "--gpu", "h100", "--offline")


def test_pipes_get_no_escapes_and_no_padding():
    done = start(*EXPLAIN)
    assert "\x1b" not in done.stdout
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


def test_terminals_get_bold_unless_no_color():
    assert "\x1b[" in on_a_terminal(*EXPLAIN, NO_COLOR="")
    assert "\x1b" not in on_a_terminal(*EXPLAIN, NO_COLOR="1")


@pytest.mark.parametrize(
    "columns", every_nth(["-5", "0", "1", "\u00b2", "wide", str(10**9), "9" * 5000, "", "1.5"], 3)
)
def test_any_text_in_columns_is_a_width(columns):
    assert "triton" in "".join(on_a_terminal(*EXPLAIN, columns=columns, LINES=columns).split())


@pytest.mark.parametrize("argv", [("--help",), (*EXPLAIN, "-q"), (*EXPLAIN, "--json"), EXPLAIN])
def test_a_full_disk_on_stdout_is_one_sentence(argv):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moectl", *argv], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_a_closed_stdout_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m moectl {' '.join(EXPLAIN)} -q >&-",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def loaded(pid, library):
    """True when the process has mapped a file of that name; it is then in the midst of importing it."""
    return library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
def test_an_interrupt_while_libraries_are_imported_ends_at_once(library, tiny_gpt_oss):
    process = subprocess.Popen(
        [sys.executable, "-m", "moectl", "bench", str(tiny_gpt_oss), "--repeats", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not loaded(process.pid, library):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_completion_is_offered():
    done = subprocess.run(
        [sys.executable, "-m", "moectl"],
        capture_output=True,
        text=True,
        env={**os.environ, "_MOECTL_COMPLETE": "complete_bash", "COMP_WORDS": "moectl ex", "COMP_CWORD": "1"},
    )
    assert "explain" in done.stdout


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m moectl {' '.join(EXPLAIN)} | head -n 1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == 0
