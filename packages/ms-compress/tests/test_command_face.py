"""The command line: fast help and version, generated run files, and JSON output."""

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from chats import write_chat_model, write_conversations
from folders import write_run
from processes import Command as Process

from ms_compress.cli import main
from ms_compress.commands import COMMANDS, Command
from ms_compress.settings.keys import Key
from ms_compress.settings.run_file import build
from ms_compress.training.checkpoint import read_header
from ms_data import build as build_shards

NAMES = [command.name for command in COMMANDS]


def output_of(*arguments: str) -> str:
    """Return the command's output; it must succeed without importing torch."""
    command = [sys.executable, "-X", "importtime", "-m", "ms_compress", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert " torch" not in process.stderr
    return process.stdout


def test_the_version_needs_no_torch() -> None:
    """It prints the package's version."""
    assert output_of("--version") == "ms-compress 0.1.0\n"


def every_key(command: Command) -> list[Key]:
    """Return the keys of a command's run files, including keys inside tables."""
    keys = [key for group in command.groups() for key in group.keys]
    return [inner_key for key in keys for inner_key in (key, *key.inner)]


@pytest.mark.parametrize("name", ["", *NAMES, "init"])
def test_help_has_an_example_and_every_key_and_needs_no_torch(name: str) -> None:
    """Every key comes with its description."""
    text = output_of(*filter(None, [name]), "--help")
    assert "example: ms-compress" in text
    for command in COMMANDS:
        for key in every_key(command) if command.name == name else ():
            assert key.name in text
            assert key.meaning, f"{name}: {key.name} does not say what it means"
            assert key.meaning in " ".join(text.split())


@pytest.mark.parametrize("name", ["", *NAMES, "init"])
def test_the_example_in_the_help_parses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys and values are valid; only the model named in the file is missing."""
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(
        r"example: ms-compress (.*)", output_of(*filter(None, [name]), "--help")
    )
    words = example.split()
    if words[0] != "init":
        assert main(["init", words[0], "--out", "RUN.toml"]) == 0
    code = main(words)
    error = capsys.readouterr().err
    if words[0] == "init":
        assert code == 0
    else:  # the files named in a new run file do not exist
        assert code == 2
        assert re.search("'?(runs/train/model|shards)'?.* (does not exist|no shards)", error), error
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_init_writes_a_run_file_with_every_key(name: str, tmp_path: Path) -> None:
    """It loads unchanged and means the same as a file with only the required keys."""
    file = tmp_path / "RUN.toml"
    assert main(["init", name, "--out", str(file)]) == 0
    assert main(["init", name, "--out", str(file)]) == 2
    command = next(item for item in COMMANDS if item.name == name)
    settings = tomllib.loads(file.read_text())
    build(command.options, settings, where="RUN.toml")
    for key in every_key(command):
        assert f"{key.name} = " in file.read_text() or f"[{key.name}]" in file.read_text()
    assert command.template() == file.read_text()


def test_an_init_run_file_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once its paths exist; stdout is a single JSON document."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    Path("runs/train").mkdir(parents=True)
    Path("model").rename("runs/train/model")
    assert main(["init", "quantize", "--out", "RUN.toml"]) == 0
    assert main(["quantize", "RUN.toml", "--set", "scheme=ct.int4_g32", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == "runs/quantize"
    assert facts["scheme"] == "ct.int4_g32"
    assert facts["verified"] is False


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_that_is_only_a_target_is_checked_too(
    token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last token of a row is only a target, and would otherwise fail in mid-training."""
    file = write_run(tmp_path)
    path = Path(tomllib.loads(file.read_text())["dataset"])
    rows = json.loads(path.read_text())
    rows[0][-1] = token
    path.write_text(json.dumps(rows))
    assert main(["qat", str(file), "--set", "scheme=ct.int4_g32", "--set", "rows=2"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_with_the_checkpoints_name_is_left_alone(tmp_path: Path) -> None:
    """It belongs to someone else, so the run goes without a checkpoint."""
    file = write_run(tmp_path)
    (tmp_path / "out.training").mkdir()
    settings = ("scheme=ct.int4_g32", "tuning.steps=2", f"output_dir={tmp_path / 'out'}")
    assert (
        main(
            [
                "qat",
                str(file),
                *(argument for setting in settings for argument in ("--set", setting)),
            ]
        )
        == 0
    )
    assert (tmp_path / "out.training").is_dir()
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("number", "code", "last_line"),
    [
        (signal.SIGINT, 130, "ms-compress: interrupted"),
        (signal.SIGTERM, 1, "ms-compress: stopped by SIGTERM at step "),
    ],
)
def test_a_signal_stops_training_with_its_state_saved(
    number: signal.Signals, code: int, last_line: str, tmp_path: Path
) -> None:
    """After the current step, long before a checkpoint is due; one line and no traceback."""
    file = write_run(tmp_path)
    command = ["-m", "ms_compress", "qat", str(file)]
    settings = ["--set", "scheme=ct.int4_g32", "--set", "tuning.steps=100000"]
    log = tmp_path / "log"
    run = Process([*command, *settings], log=log, imports=("ms_compress.commands.qat",))
    deadline = time.monotonic() + 60
    while "\n" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "step 1/" in log.read_text().splitlines()[0]
    run.send_signal(number)
    lines = run.communicate(timeout=60)[1].splitlines()
    assert run.returncode == code
    assert lines[-1].startswith(last_line)
    assert not any("Traceback" in line for line in lines)
    saved_steps = len(read_header(tmp_path / "out.training").losses)
    assert f"stopped by {number.name} at step {saved_steps} of 100000; " in "\n".join(lines)
    assert not (tmp_path / "out.lock").exists()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained to answer, and its conversations."""
    folder = tmp_path_factory.mktemp("chats")
    write_chat_model(folder / "model", write_conversations(folder / "chats.jsonl"))
    return folder


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qat", ["scheme=ct.int4_g32", "start=gptq"]),
        ("quantize", ["scheme=ct.int4_g32", "method=gptq", "by_loss=true"]),
        ("prune", ["pattern=2:4", "method=wanda"]),
        ("distill", ["layers=1"]),
    ],
)
def test_every_command_takes_conversations(
    name: str,
    settings: list[str],
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rendered with the folder's chat template; only answers are trained on."""
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{chats}/model"\noutput_dir = "{tmp_path}/out"\n'
        f'dataset = "{chats}/chats.jsonl"\nrows = 8\n'
        "[tuning]\nsteps = 2\nbatch_size = 4\nsequence_length = 40\n"
    )
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert main([name, str(file), "--json", *overrides]) == 0
    facts = json.loads(capsys.readouterr().out)
    if name != "quantize":
        assert facts["steps"] == 2
    if name == "qat":  # the model has memorized the answers but not the questions
        assert facts["first_loss"] < 0.1


def test_qat_takes_shards_of_conversations(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards from ms-data: only the memorized answers are trained on, so the loss is small."""
    model = chats / "model"
    build_shards(chats / "chats.jsonl", tokenizer=model, out=tmp_path / "shards", chat=model)
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{model}"\noutput_dir = "{tmp_path}/out"\ndataset = "{tmp_path}/shards"\n'
        'rows = 8\nscheme = "ct.int4_g32"\n'
        "[tuning]\nsteps = 2\nbatch_size = 4\nsequence_length = 40\n"
    )
    assert main(["qat", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_loss"] < 0.1


@pytest.mark.parametrize("kind", ["lines", "shards"])
def test_evaluate_measures_on_conversations(
    kind: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memorized answers have a perplexity near 1; all of their tokens count."""
    dataset = chats / "chats.jsonl"
    if kind == "shards":
        model = chats / "model"
        build_shards(
            dataset, tokenizer=model, out=tmp_path / "shards", chat=model, held_out_fraction=0.5
        )
        dataset = tmp_path / "shards"
    file = tmp_path / "run.toml"
    file.write_text(
        f'baseline = "{chats}/model"\ndataset = "{dataset}"\n'
        f'output_dir = "{tmp_path}/report"\nsequence_length = 40\nsequences = 4\n'
        "prefill_tokens = 16\ndecode_tokens = 2\nrounds = 1\n[models]\n"
    )
    assert main(["evaluate", str(file), "--json"]) == 0
    (float_alone,) = json.loads(capsys.readouterr().out)["results"]
    assert 1.0 < float_alone["perplexity"] < 1.1
