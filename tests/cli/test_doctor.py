"""`moectl doctor` and `moectl env` on the machine of the tests."""

import os
import subprocess
import sys

import pytest

from moectl.cli.doctor import against
from moectl.cli.env import HIDDEN, document_lines, environment_document, shown_value
from moectl.doctor import examine
from moectl.doctor.runnable_backends import BackendStatus
from moectl.oracle.checks import Verdict
from support.invoking import moectl


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """No engine variables but those of the test."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)


def test_the_report_has_every_part():
    done = moectl("doctor", code=1, env={"VLLM_MXFP4_USE_MARLIN": "1"})
    for part in ("problem", "machine", "backends of vllm-0.33.0", "backends of moectl", "compiled kernels"):
        assert part in done.stdout, part
    assert "use --moe-backend marlin" in " ".join(done.stdout.split())


def test_json_holds_the_same_and_the_exit_code_tells():
    document = moectl("doctor", "--json", code=1, env={"VLLM_USE_DEEP_GEMM": "yes"}).document
    assert "variables" in [r["about"] for r in document["remarks"] if r["level"] == "problem"]
    assert document["variables"][0]["verdict"] == "fails"
    assert {row["policy"] for row in document["backends"]} == {"vllm-0.33.0", "moectl"}
    assert all(row["runs"] or row["reasons"] for row in document["backends"])
    verified = {row["backend"]: row["verified"] for row in document["backends"] if row["policy"] == "moectl"}
    assert verified["torch"] and not verified["flashinfer_trtllm"]


def test_quiet_prints_problems_only():
    done = moectl("doctor", "-q", code=1, env={"VLLM_MXFP4_USE_MARLIN": "1"})
    assert "variables: vllm-0.33.0 ignores VLLM_MXFP4_USE_MARLIN" in done.stdout


def test_markdown_and_verbose_are_longer():
    plain = moectl("doctor", "--md", code=1, env={"VLLM_QQ": "1"}).stdout
    long = moectl("doctor", "--md", "-v", code=1, env={"VLLM_QQ": "1"}).stdout
    assert plain.startswith("## ")
    assert len(long) > len(plain)
    assert "-v lists" not in long


def test_a_package_that_is_not_there_is_one_reason():
    cubin = "flashinfer_cubin or nvcc"
    status = BackendStatus(
        "p",
        "b",
        (),
        (),
        (
            Verdict("package flashinfer", "package", "flashinfer.a", "not installed", False),
            Verdict("package flashinfer", "package", "flashinfer.b", "not installed", False),
            Verdict("package flashinfer_cubin", "package", cubin, "not installed", False),
            Verdict("device", "arch", "sm90", "sm100", False),
        ),
    )
    assert [group for group, _ in against(status)] == ["package", "package", "arch"]
    assert against(status)[0][1].startswith("needs flashinfer, which is not installed")
    assert against(status)[1][1].startswith("needs flashinfer_cubin or nvcc")


def test_explain_says_which_variable_picks_the_device():
    env = {"CUDA_VISIBLE_DEVICES": "-1"}
    asked = ("explain", "openai/gpt-oss-20b", "--offline", "--policy", "moectl")
    assert moectl(*asked, "-q", env=env).stderr == ""
    done = moectl(*asked, env=env)
    assert "with CUDA_VISIBLE_DEVICES=-1 this machine's device is" in done.stderr


def test_neither_command_imports_torch():
    code = (
        "import sys; sys.argv = ['moectl', {0!r}]\n"
        "from moectl.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'triton', 'flashinfer', 'numpy') if m in sys.modules])"
    )
    for command in ("doctor", "env"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(command)], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_the_block_can_be_pasted():
    text = moectl("env", env={"VLLM_USE_DEEP_GEMM": "0"}).stdout
    assert text.startswith("```text\nversions: moectl ")
    assert text.rstrip().endswith("```")
    assert "variable VLLM_USE_DEEP_GEMM=0" in text


def test_nothing_secret_and_no_folder_is_printed(monkeypatch, tmp_path):
    env = {
        "HF_TOKEN": "hf_aaaa",
        "VLLM_API_KEY": "sk-bbbb",
        "VLLM_MOE_TOKEN": "cccc",
        "VLLM_TUNED_CONFIG_FOLDER": "/home/alice/tuned",
        "TRITON_CACHE_DIR": "/home/alice/cache",
        "CUDA_VISIBLE_DEVICES": "GPU-12345678-aaaa",
        "VLLM_MADE_UP": "dddd",
    }
    for arguments in (("env",), ("env", "--json"), ("env", "--paths")):
        text = moectl(*arguments, env=env).stdout
        for secret in ("hf_aaaa", "sk-bbbb", "cccc", "dddd", "12345678"):
            assert secret not in text, (arguments, secret)
        assert ("alice" in text) == ("--paths" in arguments)
        assert os.uname().nodename not in text
    report = examine({**os.environ, **env})
    assert "VLLM_MADE_UP" in environment_document(report, env, False)["unknown_variables"]
    assert "unknown variable VLLM_MADE_UP" in list(document_lines(environment_document(report, env, False)))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("VLLM_USE_DEEP_GEMM", "1", "1"),
        ("HF_TOKEN", "x", HIDDEN),
        ("SOME_API_KEY", "x", HIDDEN),
        ("MAX_JOBS", "4", "4"),
        ("CUDA_HOME", "/usr/local/cuda", HIDDEN),
        ("CUDA_VISIBLE_DEVICES", "MIG-abcd-1234,0", "MIG-...,0"),
    ],
)
def test_values_that_tell_too_much_are_hidden(name, value, shown):
    assert shown_value(name, value, paths=False) == shown


def test_a_wrong_folder_of_libraries_is_reported():
    done = moectl("doctor", code=1, env={"MOECTL_PEERS": "/no/such/folder"})
    assert "MOECTL_PEERS must name a folder with unpacked libraries, got '/no/such/folder'" in done.words
    assert "compiled kernels" in done.stdout
