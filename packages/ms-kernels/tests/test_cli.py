"""The command `ms-kernels`: what it prints, and its exit codes."""

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
    """Both forms of `list` tell all that is registered."""
    code, text, _ = run(capsys, "list")
    assert code == 0
    facts = json.loads(run(capsys, "list", "--json")[1])
    assert [each["operator"] for each in facts] == list(CONTRACTS)
    listed = {(each["operator"], it["backend"]) for each in facts for it in each["backends"]}
    assert listed == {(each.operator, each.backend) for each in IMPLEMENTATIONS}
    for each in facts:
        assert each["operator"] + ":" in text
        assert each["summary"] in text


def test_explain_tells_the_choice_its_reasons_and_the_least_work(capsys):
    """The choice for a device that is not here can be asked for as well."""
    code, text, _ = run(capsys, "explain", "rms_norm", "--device", "mps", "...=8192", "H=4096")
    assert code == 0
    assert "rms_norm on mps in float32, ...=8192 H=4096" in text
    assert "cpu        runs on cpu, not on mps" in text
    assert "-> reference" in text
    details = ("Sq=1", "documents", "window=8", "--chip", "cpu-avx512")
    code, text, _ = run(capsys, "explain", "attention", *details, "--json")
    fact = json.loads(text)
    assert (code, fact["backend"], fact["sizes"]["Sq"]) == (0, "cpu", 1)
    assert [each["backend"] for each in fact["verdicts"] if each["taken"]] == ["cpu"]
    assert fact["least_work"]["forward"]["flops"] > 0


def test_least_work_is_the_roofline(capsys):
    """8192 rows of 4096 bfloat16 are read and written once: 128 MiB."""
    arguments = ("explain", "rms_norm", "...=8192", "H=4096", "--dtype", "bfloat16", "--json")
    fact = json.loads(run(capsys, *arguments)[1])
    assert fact["least_work"]["forward"]["size_bytes"] == 2 * 2 * 8192 * 4096 + 2 * 4096


def test_check_proves_and_tells_how_far_from_the_truth(capsys):
    """A check that holds exits with 0, and says what it did not run and why."""
    code, text, _ = run(capsys, "check", "--operator", "rotary", "--dtype", "bfloat16")
    assert code == 0
    assert "supports float32, float64, not bfloat16" in text
    assert "results and gradients hold" in text
    code, text, _ = run(capsys, "check", "--operator", "swiglu", "--backend", "cpu", "--json")
    findings = json.loads(text)
    assert code == 0
    assert [each["part"] for each in findings] == ["result", "gradient of gate", "gradient of up"]
    assert all(each["holds"] and each["backend"] == "cpu" for each in findings)


def test_bench_times_every_backend_that_takes_the_call(capsys, monkeypatch):
    """Forward, with backward where there is a gradient, and the rates of the least work."""
    monkeypatch.setattr("ms_kernels.tuning.tuner.STEPS", (2,))
    code, text, _ = run(
        capsys, "bench", "--operator", "geglu", "--operator", "adamw_step", "--json"
    )
    rows = json.loads(text)
    assert code == 0
    assert {row["operator"] for row in rows} == {"geglu", "adamw_step"}
    for row in rows:
        assert row["forward_s"] > 0
        assert (row["both_s"] is None) == (row["operator"] == "adamw_step")
        work = CONTRACTS[row["operator"]].forward(row["sizes"], 4)
        assert row["forward_bytes_per_s"] * row["forward_s"] == pytest.approx(work.size_bytes)
    assert "ms forward" in run(capsys, "bench", "--operator", "geglu", "--backend", "reference")[1]


def test_bench_makes_a_table_that_reads_back(capsys, monkeypatch, tmp_path):
    """An entry for each implementation of the CPU and each dtype, none of the reference."""
    monkeypatch.setattr("ms_kernels.tuning.tuner.STEPS", (1, 4))
    path = tmp_path / f"{chip_of(torch.device('cpu'))}.json"
    arguments = ("bench", "--tune", "--operator", "swiglu", "--out", str(path))
    code, text, told = run(capsys, *arguments)
    assert (code, text) == (0, f"wrote {path}\n")
    assert "swiglu cpu float32: pays from" in told
    entries = read_table(path).entries
    assert {entry.key for entry in entries} == {
        ("swiglu", "cpu", dtype) for dtype in ("float32", "bfloat16")
    }


def test_explain_asks_the_table_of_any_chip(capsys):
    """A chip without a table is said to have none."""
    code, text, _ = run(capsys, "explain", "rms_norm", "--chip", "sm_999", "--device", "cuda")
    assert code == 0
    assert "no tuning table for sm_999" in text


@pytest.mark.parametrize("fault", ["result", "gradient", "nan"])
def test_check_finds_a_backend_that_is_wrong(capsys, monkeypatch, fault):
    """A thousandth off in the result, a missing gradient or a NaN: exit code 1."""

    def wrong(gate, up):
        right = torch.nn.functional.silu(gate) * up
        if fault == "result":
            return right * 1.001
        return right.detach() + 0 * gate.sum() + 0 * up.sum() if fault == "gradient" else right / 0

    broken = Implementation(operator="swiglu", backend="cpu", run=wrong, merit="")
    monkeypatch.setattr("ms_kernels.checking.IMPLEMENTATIONS", (broken,))
    code, text, _ = run(capsys, "check")
    assert code == 1
    assert "FAIL" in text


def test_a_check_that_ran_nothing_does_not_hold(capsys):
    """Asking for what no backend takes is a failure, not a success."""
    code, text, _ = run(
        capsys, "check", "--operator", "rotary", "--backend", "cpu", "--dtype", "float16"
    )
    assert code == 1
    assert "0 of 0" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explain", "rmsnorm"], "unknown operator 'rmsnorm'; use one of adamw_step"),
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
def test_bad_input_exits_with_two_and_one_line(capsys, arguments, told):
    """One line on standard error says what and what would fit."""
    code, text, error = run(capsys, *arguments)
    assert (code, text) == (2, "")
    assert error.startswith("ms-kernels: ")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["bench", "x"], ["list", "--color"], ["check", "x"], ["bench", "--tune", "--out", "."]],
)
def test_an_unknown_command_or_flag_exits_with_two(capsys, arguments):
    """Errors of argparse have the same exit code, and are one line that begins with the command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("ms-kernels")
    assert told.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "explain", "check", "bench", "build"])
def test_every_command_has_help_with_an_example(capsys, command):
    """`--help` shows how to type it."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"example: ms-kernels {command}" in capsys.readouterr().out


def test_the_module_is_the_command():
    """`python -m ms_kernels` exits with the command's code."""
    done = subprocess.run(
        [sys.executable, "-m", "ms_kernels", "explain", "nothing"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_the_command_knows_the_backends_that_dispatch_knows():
    """There is one list of backends, and one check against it."""
    command = import_module("ms_kernels.commands.check")
    assert command.check_backends is selection.check_backends
    assert selection.BACKENDS is operator.BACKENDS


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"]])
def test_help_and_version_import_no_torch(arguments):
    """They answer at once: torch takes seconds to import."""
    code = (
        "import sys\nfrom ms_kernels.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "0 False\n"
    if arguments == ["--version"]:
        assert done.stdout == f"ms-kernels {ms_kernels.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["explain", "rotary"],
        ["check", "--operator", "swiglu", "--backend", "reference"],
    ],
    ids=" ".join,
)
def test_json_is_one_document(capsys, arguments):
    """On standard output, and nothing beside it."""
    code, text, error = run(capsys, *arguments, "--json")
    assert (code, error) == (0, "")
    json.loads(text)


def test_ctrl_c_ends_with_130_and_one_line():
    """A command that is interrupted leaves no traceback."""
    code = (
        "import signal, sys\nfrom ms_kernels import cli\n"
        "def interrupted(options):\n    signal.raise_signal(signal.SIGINT)\n"
        "cli._command = lambda name: interrupted\n"
        "sys.exit(cli.main(['check']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "ms-kernels: interrupted\n"


def test_the_package_is_imported_in_silence_without_numpy_and_without_torch():
    """The first operator that is asked for imports torch, which does not warn of numpy then."""
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
