"""Files that a command is given to read and cannot: one sentence, exit code 2, whichever they are."""

import os

import pytest

from support.invoking import moectl

CPU = ("--device", "cpu")
BENCH = ("bench", "CKPT", *CPU, "-m", 1, "--repeats", 1, "--warm", "--backend", "torch", "--routing")
COMMANDS = {
    "run --input": (("run", "CKPT", *CPU, "--input", "FILE"), ".safetensors"),
    "bench --input": ((*BENCH, "router", "--input", "FILE"), ".safetensors"),
    "bench trace of tensors": ((*BENCH, "trace:FILE"), ".safetensors"),
    "bench trace of lines": ((*BENCH, "trace:FILE"), ".jsonl"),
    "bench --rows": (("bench", "--rows", "FILE"), ".jsonl"),
    "compare A": (("compare", "FILE", "FILE"), ".csv"),
}


STATES = ("missing", "a folder", "junk")
CASES = [(command, state) for command in COMMANDS for state in STATES]
CASES += [(name, "a device") for name, (_, suffix) in COMMANDS.items() if suffix == ".safetensors"]


@pytest.mark.parametrize(("command", "state"), CASES)
def test_a_file_that_cannot_be_read(tiny_gpt_oss, tmp_path, command, state):
    arguments, suffix = COMMANDS[command]
    file = tmp_path / f"in{suffix}"
    if state == "a folder":
        file.mkdir()
    elif state == "junk":
        file.write_bytes(b"\xff" * 40)
    elif state == "a device":
        file.symlink_to(os.devnull)
    given = [str(one).replace("CKPT", str(tiny_gpt_oss)).replace("FILE", str(file)) for one in arguments]
    said = " ".join(moectl(*given, code=2).stderr.split())
    assert str(file) in said and "rrno" not in said and "os error" not in said
    absent = "not there|does not exist"
    wanted = {"missing": f"no such file|{absent}", "a folder": f"it is a folder|it is a directory|{absent}"}
    words = wanted.get(state, f"it is not|is a pipe|{absent}").split("|")
    assert any(word in said for word in words), said
