"""`moectl doctor` and `moectl env` on the machine of the tests."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from moectl.cli.doctor import against, drawn, software_words
from moectl.cli.env import HIDDEN, _clean, document_lines, environment_document, shown_value
from moectl.cli.text_blocks import text_lines
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
    for part in ("problem", "machine", "backends of vllm-0.33.0 that run on", "backends of moectl that run"):
        assert part in done.stdout, part
    assert "compiled kernels" not in done.stdout
    assert "caches of compiled kernels" in moectl("doctor", "-v", code=1, env={"VLLM_QQ": "1"}).stdout
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
    assert "variables: vLLM 0.33.0 ignores VLLM_MXFP4_USE_MARLIN" in done.stdout


def test_markdown_and_verbose_are_longer():
    plain = moectl("doctor", "--md", code=1, env={"VLLM_QQ": "1"}).stdout
    long = moectl("doctor", "--md", "-v", code=1, env={"VLLM_QQ": "1"}).stdout
    assert plain.startswith("## ")
    assert len(long) > len(plain)
    assert "-v: every backend" in plain and "-v:" not in long


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


def test_a_package_is_named_once_whatever_its_module_is_called():
    packages = [
        ("compressed_tensors", "0.20"),
        ("nvidia_cutlass_dsl", "4.8"),
        ("cutlass_dsl", "4.8"),
        ("aiter", ""),
    ]
    report = SimpleNamespace(
        software=SimpleNamespace(moectl="1", libraries={"compressed-tensors": "0.20", "numpy": "2"}),
        packages=[SimpleNamespace(name=name, version=version, present=True) for name, version in packages],
    )
    words = ["moectl 1", "compressed-tensors 0.20", "numpy 2", "nvidia_cutlass_dsl 4.8", "aiter"]
    assert software_words(report) == words


def test_the_block_can_be_pasted():
    text = moectl("env", env={"VLLM_USE_DEEP_GEMM": "0"}).stdout
    assert text.startswith("```text\nsoftware: moectl ")
    for part in ("python: 3.", "torch: ", "system: ", "kernel ", "CPU: ", " of RAM", "GPU: none"):
        assert part in text, part
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
        assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
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


@pytest.mark.parametrize("home", ["/", "", "/Users/Ann Lee"])
def test_sentences_lose_paths_alone_wherever_home_is(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    text = "torch 2.13/cu130 at /Users/Ann Lee/venv, read/write"
    hidden = "torch 2.13/cu130 at {}, read/write"
    shown = _clean(text, paths=False)
    assert shown == hidden.format(HIDDEN if "Ann" in home else f"{HIDDEN} Lee/venv")


def test_a_wrong_folder_of_libraries_is_reported():
    done = moectl("doctor", code=1, env={"MOECTL_PEERS": "/no/such/folder"})
    assert "MOECTL_PEERS must name a folder with unpacked libraries, got '/no/such/folder'" in done.words
    assert "backends of moectl" in done.stdout


H200 = "{0}, GPU-{0}{0}{0}{0}, NVIDIA H200, 143771, 9.0, 580.95.05, Disabled"
H100 = "{0}, GPU-{0}{0}{0}{0}, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.95.05, Disabled"
TOPOLOGY = "  GPU0 GPU1 GPU2\nGPU0 X NV18 SYS\nGPU1 NV18 X SYS\nGPU2 SYS SYS X"


def test_a_box_of_gpus_is_described_in_two_lines(bench):
    bench.gpus("\n".join([H200.format(0), H200.format(1), H100.format(2)]), topology=TOPOLOGY)
    bench.file("etc/os-release", 'PRETTY_NAME="Ubuntu 24.04.3 LTS"')
    bench.file(".dockerenv")
    bench.package("sglang", "sglang", "0.5.23")
    bench.package("triton_kernels", "triton-kernels", "1.0.0")
    bench.file("triton_kernels/matmul_ogs.py")
    report = examine(bench.env(HF_TOKEN="hf_aaaa"))
    lines = list(document_lines(environment_document(report, bench.env(HF_TOKEN="hf_aaaa"), False)))
    assert "GPU: 0-1: 2x NVIDIA H200, sm90, 140 GiB (sold as 141 GB)" in lines
    assert "GPU: 2: NVIDIA H100 80GB HBM3, sm90, 79.6 GiB" in lines
    (links,) = (line for line in lines if line.startswith("GPU links"))
    assert links.startswith("GPU links: NV18 (18 NVLinks): 0-1; SYS")
    assert any(
        line.startswith("system: Ubuntu 24.04.3 LTS, kernel ") and "in Docker" in line for line in lines
    )
    assert "sglang 0.5.23" in lines[0] and "triton_kernels" in lines[0]
    assert "driver: 580.95.05, supports CUDA up to 13.0" in lines
    assert "hf_aaaa" not in "".join(lines)


def shown(report, verbose=False):
    return [line for line, _ in text_lines(drawn(report, verbose), 80)]


def test_the_text_fits_a_terminal_with_problems_first(bench):
    bench.gpus("\n".join(H200.format(i) for i in range(8)))
    bench.package("torch", "torch", "2.13.0")
    bench.package("triton", "triton", "3.6.0")
    bench.file("torch/version.py", "cuda = None\n")
    report = examine(bench.env())
    lines = shown(report)
    assert lines[0] == "1 problem" and max(map(len, lines)) <= 80 and len(lines) < 50
    assert "  GPUs      8x NVIDIA H200, sm90, 140 GiB (sold as 141 GB)" in lines
    head = next(line for line in lines if line.startswith("  backend "))
    assert head.split() == ["backend", "bf16", "fp8", "int4", "int8", "mxfp4", "mxfp8", "nvfp4"]
    marlin = next(line for line in lines if line.startswith("  marlin "))
    assert marlin.split() == ["marlin", "-", "yes", "yes", "yes", "yes", "yes", "yes"]
    torch = next(line for line in lines if line.startswith("  torch  ") and "yes" in line)
    assert torch.split()[1:] == ["yes"] * 7
    (wanting,) = (line.split() for line in lines if "  cutlass (moectl), marlin (moectl)" in line)
    assert wanting[-3:] == ["not", "installed:", "vllm"]
    assert max(map(len, shown(report, True))) <= 100 and len(shown(report, True)) > len(lines)


def test_tones_tell_problems_from_notes(bench):
    bench.gpus(H200.format(0))
    blocks = dict(text_lines(drawn(examine(bench.env(CUDA_VISIBLE_DEVICES="7"))), 80))
    assert blocks["1 problem"] == "wrong"
    (problem,) = (tone for line, tone in blocks.items() if "asks for GPU '7'" in line)
    assert problem == "wrong"
    assert dict(text_lines(drawn(examine(bench.env())), 80))["no problems"] == "good"


def test_a_core_install_is_told_what_works(bench):
    text = " ".join(" ".join(shown(examine(bench.env()))).split())
    assert text.startswith("no problems")
    assert "torch is not installed: explain, list, compare, convert --dry-run and doctor work" in text
    assert "fix pip install 'moectl[run]'" in text


def test_another_environment_that_is_none_is_an_error():
    done = moectl("doctor", "--python", "/no/such/python", code=2)
    assert "--python /no/such/python: there is no such file or directory" in done.stderr


def test_another_environment_is_looked_into(tmp_path):
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm-0.29.0.dist-info").mkdir()
    (site / "vllm-0.29.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.29.0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text("version = 3.12.9\n")
    document = moectl("doctor", "--json", "--python", str(tmp_path), code=1).document
    assert document["software"]["environment"] == str(tmp_path)
    assert document["engines"][0]["installed"] == "0.29.0"
    assert "vLLM cannot run without it" in document["remarks"][0]["says"]
