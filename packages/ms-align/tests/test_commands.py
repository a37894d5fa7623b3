"""Commands: help and version without torch, templates, JSON and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest
from processes import Command as Process

from ms_align.cli import main
from ms_align.commands.command import COMMANDS, HIDDEN, Command
from ms_align.settings.keys import groups_of
from ms_align.settings.run_file import NOT_IN_FILES

from .test_offline import events, run_file

NAMES = [command.name for command in COMMANDS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}


def run_python(code: str) -> str:
    """Run code in a new interpreter and return its output."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    return result.stdout


def test_help_and_version_need_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor numpy or sibling packages. Prints the help of every command in a new interpreter."""
    code = f"""
import sys
from ms_align.cli import main
for words in (["--version"], ["--help"], *([name, "--help"] for name in {[*NAMES, "init"]})):
    try:
        main(words)
    except SystemExit as status:
        assert status.code == 0, words
heavy = {{"torch", "numpy", "transformers", "ms_data", "ms_parallel", "safetensors"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    output = run_python(code)
    assert output.startswith("ms-align 0.1.0\n")
    assert output.count("\nexample: ms-align ") == len(NAMES) + 2
    assert "    kl_coeff = 0.05  Coefficient of the KL penalty (per nat).\n" in output
    assert "      lora.rank = 8  " in output


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_help_lists_the_keys_of_the_settings_class(command: Command) -> None:
    """Names and defaults from attrs, descriptions from the source."""
    module, _, name = command.settings.partition(":")
    settings_class = getattr(import_module(f"ms_align.{module}"), name)
    fields = {field.alias: field for field in attrs.fields(settings_class) if field.init}
    hidden = NOT_IN_FILES | HIDDEN
    keys = {key.name: key for group in groups_of(command.settings, HIDDEN) for key in group.keys}
    assert keys.keys() == fields.keys() - hidden
    for key in keys.values():
        assert key.meaning, f"{key.name} has no docstring"
        default = fields[key.name].default
        assert key.required == (default is attrs.NOTHING)
        if not key.required and not isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            assert key.default == default


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_a_template_has_every_key_and_is_valid_toml(command: Command) -> None:
    """As written, and with all defaults uncommented."""
    text = command.template()
    as_written = tomllib.loads(text)
    keys = {key.name: key for group in command.groups() for key in group.keys}
    assert as_written.keys() <= keys.keys()
    assert {name for name, key in keys.items() if key.required} <= as_written.keys()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    assignments = [
        line for line in lines if " = " in line and line.partition(" = ")[0].isidentifier()
    ]
    assert {line.partition(" = ")[0] for line in assignments} >= {
        name for name, key in keys.items() if not key.inner
    }
    for line in assignments:
        if not line.endswith("= not given"):
            tomllib.loads(line)


def test_a_template_runs_after_its_paths_are_filled_in(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` never overwrites a file; `--json` prints only JSON."""
    run = tmp_path / "RUN.toml"
    assert main(["init", "sft", "--out", str(run)]) == 0
    assert main(["init", "sft", "--out", str(run)]) == 2
    assert "ms-align: " in capsys.readouterr().err
    text = run.read_text().replace("path/to/model", str(sets / "model"))
    run.write_text(text.replace('dataset = "shards"', f'dataset = "{sets / "copy"}"'))
    out = ["--set", f"output_dir={tmp_path / 'out'}", "--set", "batch_size=32"]
    assert main(["sft", str(run), *out, "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["finished"]
    assert summary["output_dir"] == str(tmp_path / "out")
    assert f"completed {summary['step']} steps" in captured.err


def test_ctrl_c_ends_with_130_and_no_traceback(sets: Path, tmp_path: Path) -> None:
    """A checkpoint is saved, one line says so, and the same command resumes."""
    run = run_file(sets, tmp_path, "sft", steps=2000, progress=True, checkpoint_every=2000)
    process = Process(["-m", "ms_align", "sft", str(run)], imports=("ms_align.trainers.sft",))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (tmp_path / "sft" / "events.jsonl").exists() and events(tmp_path / "sft", "step"):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "stopped by SIGINT" in out
    assert list((tmp_path / "sft" / "checkpoints").glob("step-*"))


def test_a_layout_for_more_processes_prints_the_torchrun_command(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The typed arguments follow torchrun; the slow test runs the command."""
    words = ["sft", str(run_file(sets, tmp_path, "sft")), "--set", "layout.data=2"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ms-align", *words])
    assert main(words) == 2
    line = f"torchrun --standalone --nproc-per-node 2 -m ms_align {' '.join(words)}"
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_the_printed_torchrun_command_trains(sets: Path, tmp_path: Path) -> None:
    """Copied from the message: two processes train, and the model can be loaded."""
    run = run_file(sets, tmp_path, "sft", steps=2)
    words = ["sft", str(run), "--set", "layout.data=2"]
    refused = subprocess.run(
        [sys.executable, "-m", "ms_align", *words], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert refused.returncode == 2
    line = refused.stderr.partition("start it with: ")[2].split()
    line[0:1] = [sys.executable, "-m", "torch.distributed.run"]
    result = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    from .test_run_output import check_opens

    check_opens(tmp_path / "sft" / "model", chats=True)


@pytest.mark.slow
def test_ranks_exit_when_torchrun_is_killed(sets: Path, tmp_path: Path) -> None:
    """After SIGKILL of the launcher no rank continues, and the same command resumes."""
    run = run_file(sets, tmp_path, "sft", steps=5000, checkpoint_every=5)
    words = ["-m", "ms_align", "sft", str(run), "--set", "layout.data=2"]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = subprocess.Popen([*line, *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (tmp_path / "sft" / "events.jsonl").exists() and events(tmp_path / "sft", "checkpoint"):
            break
        time.sleep(0.05)
    ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(Path("/proc", rank).exists() for rank in ranks):
        time.sleep(0.05)
    assert not any(Path("/proc", rank).exists() for rank in ranks)
    last_step = max(event["step"] for event in events(tmp_path / "sft", "checkpoint"))
    resumed = [*line, *words, "--set", f"steps={last_step + 5}"]
    subprocess.run(resumed, env=ENVIRONMENT, check=True, timeout=200, stdout=subprocess.DEVNULL)


HOSTILE = {
    "deep": b"a = " + b"[" * 50_000 + b"]" * 50_000,
    "no utf-8": b'model = "\xff\xfe"',
    "a nul": b'model = "a\\u0000b"\ndataset = "d"\nsequence_length = 8\nsteps = 1\n',
    "a long path": b'model = "' + b"a" * 100_000 + b'"\ndataset="d"\nsequence_length=8\nsteps=1\n',
    "a huge number": b"steps = 1" + b"0" * 400,
    "a huge float": b"learning_rate = 1e999",
    "a huge eps": b"eps = 1" + b"0" * 400,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_run_file_is_rejected_in_one_line(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a line of readable length."""
    run = tmp_path / "RUN.toml"
    if b"model" not in content:
        content = b'model="m"\ndataset="d"\nsequence_length=8\n' + content + b"\n"
    run.write_bytes(content)
    assert main(["sft", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ms-align: ")
    assert error.count("\n") == 1
    assert len(error) < 1000


PROMPTS = {
    "deep": b"[" * 50_000 + b"]" * 50_000,
    "no utf-8": b'"\xff"',
    "a surrogate": b'"\\ud800"',
    "a huge token": b"[1" + b"0" * 400 + b"]",
    "a negative token": b"[-1]",
    "no prompt": b"{}",
}


@pytest.mark.parametrize("content", PROMPTS.values(), ids=PROMPTS.keys())
def test_hostile_prompts_are_rejected_in_one_line(
    sets: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2; the message names the file and the line."""
    (tmp_path / "p.jsonl").write_bytes(content + b"\n")
    run = tmp_path / "RUN.toml"
    run.write_text(
        f'model = "{sets}/model"\ntokenizer = "bytes"\ndataset = "{tmp_path}/p.jsonl"\n'
        f'output_path = "{tmp_path}/out.jsonl"\n'
    )
    assert main(["generate", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 1000
