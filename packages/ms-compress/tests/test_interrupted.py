"""Commands that are killed, run twice at once, or cannot work: nothing is lost."""

import json
import os
import shutil
import signal
import string
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from folders import write_run
from forks import die, exit_status, fork

from ms_compress.cli import main
from ms_compress.output_lock import output_lock
from ms_parallel import load_model, save_model

COMMANDS = {
    "qat": ["scheme=ct.int4_g32"],
    "quantize": ["scheme=ct.int4_g32"],
    "prune": ["pattern=2:4"],
    "distill": ["layers=1"],
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A saved model, tokens, and a run file for both."""
    return write_run(tmp_path)


def run(command: str, file: Path, *settings: str) -> int:
    """Run the command on its run file."""
    arguments = [*COMMANDS[command], *settings]
    return main(
        [command, str(file), *(part for argument in arguments for part in ("--set", argument))]
    )


def kill_in(target: str, command: str, file: Path, *settings: str) -> None:
    """Run the command in a process that is killed when it calls a function."""

    def run_until_killed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, die)
            run(command, file, *settings)

    assert exit_status(fork(run_until_killed)) == -signal.SIGKILL


@pytest.mark.parametrize("command", COMMANDS)
def test_two_runs_never_share_an_output(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused immediately and leaves the first one's output alone."""
    out = run_file.parent / "out"
    with output_lock(out):
        assert run(command, run_file) == 2
        error = capsys.readouterr().err
        assert f"out is being written by process {os.getpid()} on " in error
        assert "step" not in error
        assert [path.name for path in run_file.parent.glob("out*")] == ["out.lock"]
    assert run(command, run_file) == 0
    assert list(run_file.parent.glob("out*")) == [out]


@pytest.mark.parametrize("command", ["prune", "distill"])
def test_a_run_killed_while_saving_resumes(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It repeats no step, as the state is saved once more after the last one."""
    kill_in("ms_parallel.weights.save._publish", command, run_file)
    assert not (run_file.parent / "out").exists()
    capsys.readouterr()
    assert run(command, run_file) == 0
    assert "step" not in capsys.readouterr().err
    load_model(run_file.parent / "out")
    assert [path.name for path in run_file.parent.glob("out*")] == ["out"]


def test_a_run_killed_after_its_export_removes_its_state_next_time(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command sees that it is finished and removes it; another run's state stays."""
    kill_in("ms_compress.run.output.RunOutput.end", "qat", run_file)
    state = run_file.parent / "out.training"
    weights_bytes = (run_file.parent / "out" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert run("qat", run_file, "tuning.seed=1") == 2
    error = capsys.readouterr().err
    assert "belongs to a run of 'ms-compress qat', started " in error
    assert "and finished with other settings: tuning.seed is 1, was 0; remove it" in error
    assert state.is_file()
    assert run("qat", run_file) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert not state.exists()
    assert (run_file.parent / "out" / "model.safetensors").read_bytes() == weights_bytes


@pytest.mark.parametrize("command", COMMANDS)
def test_a_finished_run_is_not_repeated(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command ends immediately; results of another command or model are refused."""
    assert run(command, run_file) == 0
    files = {path: path.stat().st_mtime_ns for path in (run_file.parent / "out").iterdir()}
    capsys.readouterr()
    assert run(command, run_file) == 0
    assert capsys.readouterr().out.count("this run is finished") == 1
    other_command = "prune" if command != "prune" else "distill"
    assert run(other_command, run_file) == 2
    assert f"belongs to a run of 'ms-compress {command}'" in capsys.readouterr().err
    shutil.copytree(run_file.parent / "model", run_file.parent / "same")
    assert run(command, run_file, f"model={run_file.parent}/same") == 2
    assert "with other settings: model is" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (run_file.parent / "out").iterdir()} == files


def test_a_damaged_state_or_seal_is_refused_before_any_work(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the file, before the model is read."""
    kill_in("ms_compress.commands.qat.export_run", "qat", run_file)
    state = run_file.parent / "out.training"
    state_bytes = state.read_bytes()
    for position in range(0, len(state_bytes), len(state_bytes) // 20):
        state.write_bytes(
            state_bytes[:position]
            + bytes([state_bytes[position] ^ 4])
            + state_bytes[position + 1 :]
        )
        capsys.readouterr()
        assert run("qat", run_file, "model=nowhere") == 2
        assert "out.training is damaged" in capsys.readouterr().err
    state.write_bytes(state_bytes)
    assert run("qat", run_file) == 0
    seal = run_file.parent / "out" / "run.json"
    seal_bytes = seal.read_bytes()
    for position in range(0, len(seal_bytes), len(seal_bytes) // 40):
        seal.write_bytes(
            seal_bytes[:position] + bytes([seal_bytes[position] ^ 1]) + seal_bytes[position + 1 :]
        )
        capsys.readouterr()
        code, error = run("qat", run_file), capsys.readouterr().err
        # Whitespace may be other whitespace: its content is not used.
        assert code == (0 if seal_bytes[position : position + 1] in b" \n" and not error else 2), (
            position
        )


def test_settings_that_do_not_affect_training_may_change_on_resume(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer, verification, and the folder's name."""
    tokenizer = run_file.parent / "other.json"
    letters = {letter: number for number, letter in enumerate(string.ascii_letters)}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(tokenizer))
    kill_in("ms_compress.commands.qat.export_run", "qat", run_file)
    (run_file.parent / "out.training").rename(run_file.parent / "new.training")
    capsys.readouterr()
    overrides = [f"tokenizer={tokenizer}", "verify=true", f"output_dir={run_file.parent}/new"]
    assert run("qat", run_file, *overrides) == 0
    assert "step" not in capsys.readouterr().err
    assert (run_file.parent / "new" / "tokenizer.json").is_file()


def test_a_resumed_gptq_run_is_not_calibrated_again(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved state has its codes; the result equals an uninterrupted run."""
    folder = run_file.parent
    assert run("qat", run_file, "start=gptq", f"output_dir={folder}/whole") == 0
    assert "layer" in capsys.readouterr().err
    kill_in("ms_compress.commands.qat.export_run", "qat", run_file, "start=gptq")
    capsys.readouterr()
    assert run("qat", run_file, "start=gptq") == 0
    assert "layer" not in capsys.readouterr().err
    name = "model.safetensors"
    assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()


@pytest.mark.parametrize("changed", ["model", "teacher"])
def test_a_run_resumes_only_from_the_same_weights(
    changed: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder whose weights changed under the same name is another model."""
    teacher = f"teacher={run_file.parent}/teacher"
    save_model(load_model(run_file.parent / "model"), run_file.parent / "teacher")
    kill_in("ms_compress.commands.qat.export_run", "qat", run_file, teacher)
    model = load_model(run_file.parent / changed)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    save_model(model, run_file.parent / changed)
    assert run("qat", run_file, teacher) == 2
    assert (
        f"belongs to a run with other settings: contents of {changed} changed"
        in capsys.readouterr().err
    )


MISSING = {"onnx": "ONNX files", "gguf": "GGUF files", "compressed_tensors": "verify needs"}
"""Libraries, and the start of the error message if one is not installed."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tokenizer=nowhere.json"], "nowhere.json does not exist"),
        (["tokenizer=model/config.json"], "model/config.json is not a tokenizer.json"),
        (["scheme=gguf.q4_0", "tokenizer=strange.json"], "must be byte-level BPE"),
        (["scheme=gguf.q4_0", "model=window"], "sliding_window must be null, as llama.cpp"),
        (["scheme=ort.matmulnbits"], "ONNX files need the onnx library"),
        (["scheme=gguf.q4_0"], "GGUF files need the gguf library"),
        (["verify=true"], "verify needs compressed_tensors: pip install 'ms-compress[ct]'"),
        (["teacher=narrow"], "teacher must have the model's vocabulary of 192, got 100"),
    ],
)
def test_runs_that_cannot_finish_are_refused_before_any_step(
    settings: list[str],
    message: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after hours of calibration and training that would be lost."""
    monkeypatch.chdir(run_file.parent)
    write_unsupported_folders()
    for library, start in MISSING.items():
        if message.startswith(start):
            monkeypatch.setitem(sys.modules, library, None)
    capsys.readouterr()
    assert run("qat", run_file, "start=gptq", *settings) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(run_file.parent.glob("out*"))


def write_unsupported_folders() -> None:
    """Write a model with a window, one with fewer tokens, and a word tokenizer."""
    words = {"model": {"type": "WordPiece", "vocab": {}}}
    Path("strange.json").write_text(json.dumps(words))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    window = transformers.MistralConfig(vocab_size=192, sliding_window=16, **sizes, **heads)
    transformers.MistralForCausalLM(window).save_pretrained("window")
    narrow = transformers.LlamaConfig(vocab_size=100, **sizes, **heads)
    transformers.LlamaForCausalLM(narrow).save_pretrained("narrow")
