"""The `ms-kernels` command: its output and exit codes."""

import json
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import ms_kernels
from ms_kernels import selection
from ms_kernels.cli import main
from ms_kernels.core import operator
from ms_kernels.core.chips import chip_of
from ms_kernels.core.choice import Implementation
from ms_kernels.core.tables import read_table
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS


def run(capsys, *arguments):
    """Return exit code, standard output and standard error of a command."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_names_every_operator_and_backend(capsys):
    """The text and the JSON form of `list` name everything that is registered."""
    code, text, _ = run(capsys, "list")
    assert code == 0
    facts = json.loads(run(capsys, "list", "--json")[1])
    assert [fact["operator"] for fact in facts] == list(CONTRACTS)
    listed = {(fact["operator"], row["backend"]) for fact in facts for row in fact["backends"]}
    assert listed == {(impl.operator, impl.backend) for impl in IMPLEMENTATIONS}
    for fact in facts:
        assert fact["operator"] + ":" in text
        assert fact["summary"] in text


def test_explain_prints_the_choice_its_reasons_and_the_least_work(capsys):
    """It also answers for a device that is not present."""
    code, text, _ = run(capsys, "explain", "rms_norm", "--device", "mps", "...=8192", "H=4096")
    assert code == 0
    assert "rms_norm on mps in float32, ...=8192 H=4096" in text
    assert "cpu        runs on cpu, not on mps" in text
    assert "-> reference" in text
    details = ("Sq=1", "documents", "window=8", "--chip", "cpu-avx512")
    code, text, _ = run(capsys, "explain", "attention", *details, "--json")
    fact = json.loads(text)
    assert (code, fact["backend"], fact["sizes"]["Sq"]) == (0, "cpu", 1)
    assert [verdict["backend"] for verdict in fact["verdicts"] if verdict["taken"]] == ["cpu"]
    assert fact["least_work"]["forward"]["flops"] > 0


def test_least_work_is_the_roofline(capsys):
    """8192 rows of 4096 bfloat16 values are read and written once: 128 MiB."""
    arguments = ("explain", "rms_norm", "...=8192", "H=4096", "--dtype", "bfloat16", "--json")
    fact = json.loads(run(capsys, *arguments)[1])
    assert fact["least_work"]["forward"]["size_bytes"] == 2 * 2 * 8192 * 4096 + 2 * 4096


def test_check_reports_errors_and_skipped_backends(capsys):
    """A passing check exits with 0 and lists the skipped backends with reasons."""
    code, text, _ = run(capsys, "check", "--operator", "rotary", "--dtype", "bfloat16")
    assert code == 0
    assert "supports float32, float64, not bfloat16" in text
    assert "results and gradients are within tolerance" in text
    code, text, _ = run(capsys, "check", "--operator", "swiglu", "--backend", "cpu", "--json")
    findings = json.loads(text)
    assert code == 0
    assert [finding["part"] for finding in findings] == [
        "result",
        "gradient of gate",
        "gradient of up",
    ]
    assert all(finding["holds"] and finding["backend"] == "cpu" for finding in findings)


def test_bench_times_every_eligible_backend(capsys, monkeypatch):
    """Forward, backward where there is a gradient, and rates relative to the least work."""
    monkeypatch.setattr("ms_kernels.tuning.tuner.STEPS", (2,))
    code, text, _ = run(
        capsys, "bench", "--operator", "geglu", "--operator", "decode_attention", "--json"
    )
    rows = json.loads(text)
    assert code == 0
    assert {row["operator"] for row in rows} == {"geglu", "decode_attention"}
    for row in rows:
        assert row["forward_s"] > 0
        assert (row["both_s"] is None) == (row["operator"] == "decode_attention")
        work = CONTRACTS[row["operator"]].forward(row["sizes"], 4)
        assert row["forward_bytes_per_s"] * row["forward_s"] == pytest.approx(work.size_bytes)
    assert "ms forward" in run(capsys, "bench", "--operator", "geglu", "--backend", "reference")[1]


def test_bench_writes_a_readable_table(capsys, monkeypatch, tmp_path):
    """An entry per CPU implementation and dtype, none for the reference."""
    monkeypatch.setattr("ms_kernels.tuning.tuner.STEPS", (1, 4))
    path = tmp_path / f"{chip_of(torch.device('cpu'))}.json"
    arguments = ("bench", "--tune", "--operator", "swiglu", "--out", str(path))
    code, text, log = run(capsys, *arguments)
    assert (code, text) == (0, f"wrote {path}\n")
    assert "swiglu cpu float32: pays from" in log
    entries = read_table(path).entries
    assert {entry.key for entry in entries} == {
        ("swiglu", "cpu", dtype) for dtype in ("float32", "bfloat16")
    }


def test_explain_accepts_any_chip_name(capsys):
    """A chip without a table is reported as such."""
    code, text, _ = run(capsys, "explain", "rms_norm", "--chip", "sm_999", "--device", "cuda")
    assert code == 0
    assert "no tuning table for sm_999" in text


@pytest.mark.parametrize("fault", ["result", "gradient", "nan"])
def test_check_detects_a_wrong_backend(capsys, monkeypatch, fault):
    """A result off by 0.1%, a missing gradient or a NaN gives exit code 1."""

    def wrong_swiglu(gate, up):
        correct = torch.nn.functional.silu(gate) * up
        if fault == "result":
            return correct * 1.001
        return (
            correct.detach() + 0 * gate.sum() + 0 * up.sum() if fault == "gradient" else correct / 0
        )

    wrong_backend = Implementation(operator="swiglu", backend="cpu", run=wrong_swiglu, merit="")
    monkeypatch.setattr("ms_kernels.checking.IMPLEMENTATIONS", (wrong_backend,))
    code, text, _ = run(capsys, "check")
    assert code == 1
    assert "FAIL" in text


def test_a_check_that_ran_nothing_fails(capsys):
    """Selecting only calls that no backend takes is a failure, not a success."""
    code, text, _ = run(
        capsys, "check", "--operator", "rotary", "--backend", "cpu", "--dtype", "float16"
    )
    assert code == 1
    assert "0 of 0" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "rmsnorm"], "unknown operator 'rmsnorm'; use one of add_rms_norm"),
        (["explain", "rms_norm", "W=3"], "one of ...=SIZE, H=SIZE, eps=VALUE"),
        (["explain", "rms_norm", "H=0"], "H at least 1"),
        (["explain", "rms_norm", "H=many"], "one of ...=SIZE, H=SIZE"),
        (["explain", "rms_norm", "H=99999999999999999999"], "must be up to 2147483647"),
        (["explain", "rms_norm", "--dtype", "int8"], "got 'int8'"),
        (["explain", "rms_norm", "--device", "toaster"], "must be cpu, cuda or npu, got 'toaster'"),
        (["explain", "rms_norm", "--device", "cuda:300"], "is too large"),
        (["explain", "rms_norm", "--backend", "fpga"], "unknown backend 'fpga'; use one of ascend"),
        (["explain", "attention", "Hq=3"], "divides q's 3"),
        (["explain", "attention", "window=wide"], "window is 'wide'"),
        (["check", "--operator", "gelu"], "unknown operator 'gelu'"),
        (["bench", "--backend", "fpga"], "unknown backend 'fpga'; use one of ascend, cpu"),
        (["check", "--backend", "fpga"], "unknown backend 'fpga'"),
        (["check", "--device", "xpu"], "device xpu is not available here"),
        (["bench", "--operator", "gelu"], "unknown operator 'gelu'"),
        (["bench", "--tune", "--device", "xpu"], "device xpu is not available here"),
        (["bench", "--tune", "--out", "/no/such/folder/t.json"], "the folder does not exist"),
    ],
)
def test_bad_input_exits_with_two_and_one_line(capsys, arguments, message):
    """One line on standard error states the problem and the valid values."""
    code, text, error = run(capsys, *arguments)
    assert (code, text) == (2, "")
    assert error.startswith("ms-kernels: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["bench", "x"], ["list", "--color"], ["check", "x"], ["bench", "--tune", "--out", "."]],
)
def test_an_unknown_command_or_flag_exits_with_two(capsys, arguments):
    """Errors from argparse have the same exit code and are one line starting with the command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ms-kernels")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "explain", "check", "bench", "build"])
def test_every_command_has_help_with_an_example(capsys, command):
    """The example is a line that can be copied to a shell."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"example: ms-kernels {command}" in capsys.readouterr().out


def test_python_m_runs_the_command():
    """`python -m ms_kernels` exits with the command's code."""
    process = subprocess.run(
        [sys.executable, "-m", "ms_kernels", "explain", "nothing"], capture_output=True, text=True
    )
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)


def test_the_command_and_dispatch_share_one_backend_list():
    """One list of backends and one check against it."""
    command = import_module("ms_kernels.commands.check")
    assert command.check_backends is selection.check_backends
    assert selection.BACKENDS is operator.BACKENDS


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"]])
def test_help_and_version_do_not_import_torch(arguments):
    """They answer immediately; importing torch takes seconds."""
    code = (
        "import sys\nfrom ms_kernels.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stderr == "0 False\n"
    if arguments == ["--version"]:
        assert process.stdout == f"ms-kernels {ms_kernels.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["explain", "rotary"],
        ["check", "--operator", "swiglu", "--backend", "reference"],
    ],
    ids=" ".join,
)
def test_json_output_is_a_single_document(capsys, arguments):
    """Standard output holds only the JSON; standard error stays empty."""
    code, text, error = run(capsys, *arguments, "--json")
    assert (code, error) == (0, "")
    json.loads(text)


def test_ctrl_c_exits_with_130_and_one_line():
    """An interrupted command prints no traceback."""
    code = (
        "import signal, sys\nfrom ms_kernels import cli\n"
        "def interrupted(options):\n    signal.raise_signal(signal.SIGINT)\n"
        "cli._command = lambda name: interrupted\n"
        "sys.exit(cli.main(['check']))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == "ms-kernels: interrupted\n"


def test_importing_the_package_needs_no_numpy_and_no_torch():
    """The first operator access imports torch, without its warning about a missing numpy."""
    code = (
        "import sys, warnings\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'numpy':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "warnings.simplefilter('error')\n"
        "import ms_kernels\n"
        "assert 'torch' not in sys.modules\n"
        "from ms_kernels import rms_norm\n"
        "import torch\n"
        "assert rms_norm(torch.ones(2, 3), torch.ones(3)).shape == (2, 3)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
