"""An output folder belongs to one run: locked, recorded, and never silently restarted."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from launching import events, training, wait_for, write_corpus, write_run

from ms_parallel import checkpoint
from ms_parallel.cli import main
from ms_parallel.files.run_folder import lock_run_folder, read_seal
from ms_parallel.training import ownership


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a locked folder."""
    monkeypatch.setattr(ownership, "WAIT_S", 0.3)


def refusal(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    """The one line of a refused run."""
    capsys.readouterr()
    assert main(["train", str(run), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_two_runs_in_one_folder_never_interleave(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused with the command and process id of the first."""
    run = write_run(tmp_path / "run.toml", shards, steps=100_000)
    with training(run, 1) as started:
        wait_for(lambda: events(run, "step"), started)
        line = refusal(capsys, run)
        assert f"in use by ms-parallel train, process {started.pid} on " in line
        assert started.poll() is None
    assert len(events(run, "begin")) == 1


def test_a_run_waits_for_one_that_is_just_ending(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It prints the owner of the folder, and continues when the folder is free."""
    monkeypatch.setattr(ownership, "WAIT_S", 60.0)
    run = write_run(tmp_path / "run.toml", shards, steps=200, checkpoint_every=None)
    with training(run, 1) as started:
        wait_for(lambda: events(run, "step"), started)
        started.terminate()
        assert main(["train", str(run), "--set", "steps=40"]) == 0
    assert "waiting up to 60 s for " in capsys.readouterr().out
    assert events(run, "resume")


@pytest.mark.parametrize("content", ["nothing", "shards"])
def test_a_folder_of_another_command_is_refused(
    content: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owner is named, also if it contains only shards, and nothing is written."""
    run = write_run(tmp_path / "run.toml", shards)
    folder = run.with_suffix("")
    identity = {"model": "llama", "dataset": "pairs"}
    with lock_run_folder(folder, command="ms-align ppo", identity=identity, settings={}):
        if content == "shards":
            (folder / "shards").mkdir()
    line = refusal(capsys, run)
    assert "belongs to a run of 'ms-align ppo', started " in line
    assert "and this is 'ms-parallel train'" in line
    assert not (folder / "events.jsonl").exists()


def test_a_folder_whose_owner_is_unknown_is_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing model may be someone's."""
    run = write_run(tmp_path / "run.toml", shards)
    (run.with_suffix("") / "model").mkdir(parents=True)
    assert "contains 'model' but no record of a run of 'ms-parallel train'" in refusal(capsys, run)


def test_a_model_in_the_output_folder_is_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its training would overwrite it."""
    run = write_run(tmp_path / "run.toml", shards, steps=2)
    assert main(["train", str(run)]) == 0
    before = (run.with_suffix("") / "model" / "model.safetensors").read_bytes()
    setting = f"model={run.with_suffix('') / 'model'}"
    assert "is inside output_dir" in refusal(capsys, run, "--set", setting)
    assert (run.with_suffix("") / "model" / "model.safetensors").read_bytes() == before


def test_other_data_and_another_model_are_refused(
    corpus: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has both values; moved shards count as the same."""
    run = write_run(tmp_path / "run.toml", shards, steps=2)
    assert main(["train", str(run)]) == 0
    assert "whose dataset was" in refusal(capsys, run, "--set", f"dataset={corpus}")
    assert 'whose model was "llama"' in refusal(capsys, run, "--set", "model=qwen3")
    moved = shutil.copytree(shards, tmp_path / "elsewhere")
    assert main(["train", str(run), "--set", f"dataset={moved}"]) == 0


def test_a_corpus_written_again_is_compared_by_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text with newer times resumes; other text of the same size is refused."""
    corpus = write_corpus(tmp_path / "corpus")
    run = write_run(tmp_path / "run.toml", corpus, steps=1)
    assert main(["train", str(run)]) == 0
    module = corpus / "heapq.py"
    module.write_bytes(module.read_bytes())
    os.utime(module, ns=(0, module.stat().st_mtime_ns + 1))
    assert main(["train", str(run), "--set", "steps=2"]) == 0
    assert events(run, "resume")
    text = module.read_bytes()
    module.write_bytes(text.replace(b"heap", b"pile"))
    assert "the corpus content changed" in refusal(capsys, run, "--set", "steps=3")
    module.write_bytes(text)
    assert main(["train", str(run), "--set", "steps=3"]) == 0


def test_a_run_without_output_leaves_the_folder_free(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped corpus does not claim the folder."""
    run = write_run(tmp_path / "run.toml", tmp_path / "corpsu", steps=1)
    assert "corpsu" in refusal(capsys, run)
    assert main(["train", str(run), "--set", f"dataset={corpus}"]) == 0


def test_changed_settings_are_logged_or_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rate, batch size and weight decay may change, but not the seed, which orders the data."""
    run = write_run(tmp_path / "run.toml", shards, steps=3)
    assert main(["train", str(run)]) == 0
    capsys.readouterr()
    words = ("steps=4", "learning_rate=0.001", "batch_size=8", "weight_decay=0.2")
    changed = [part for word in words for part in ("--set", word)]
    assert main(["train", str(run), *changed]) == 0
    output = capsys.readouterr().out
    assert "changed: learning_rate is 0.001, was 0.003" in output
    assert "changed: batch_size is 8, was 4" in output
    assert "changed: weight_decay is 0.2, was 0.1" in output
    assert "changed: steps is 4, was 3" in output
    assert len(events(run, "changed_setting")) == 4
    assert main(["train", str(run), *changed]) == 0
    output = capsys.readouterr().out
    assert "changed:" not in output
    assert "already trained to step 4; nothing left to do" in output
    line = refusal(capsys, run, *changed, "--set", "seed=3")
    assert "cannot resume with changed settings: seed is 3, was 0" in line
    seal = read_seal(run.with_suffix(""))
    assert seal is not None
    assert seal.settings["seed"] == 0


def test_a_checkpoint_without_a_manifest_is_set_aside(
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run resumes from the previous one and repeats the damaged step."""
    run = write_run(tmp_path / "run.toml", shards, steps=12)
    assert main(["train", str(run)]) == 0
    checkpoints = run.with_suffix("") / "checkpoints"
    (checkpoints / "step-00000012" / "checkpoint.json").unlink()
    capsys.readouterr()
    assert main(["train", str(run)]) == 0
    assert "checkpoint.json: cannot be read: No such file" in caplog.text
    assert "kept as step-00000012.damaged-1" in caplog.text
    assert "resuming from" in capsys.readouterr().out
    assert checkpoint.complete_steps(checkpoints) == [6, 9, 12]


@pytest.mark.parametrize("lost", ["manifests", "folders"])
def test_a_run_never_starts_over_silently(
    lost: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any checkpoint it refuses to start; moving the folder away is consent."""
    run = write_run(tmp_path / "run.toml", shards, steps=6)
    assert main(["train", str(run)]) == 0
    checkpoints = run.with_suffix("") / "checkpoints"
    for folder in checkpoints.glob("step-*"):
        if lost == "manifests":
            (folder / "checkpoint.json").unlink()
        else:
            shutil.rmtree(folder)
    for _ in range(2):
        assert "no complete checkpoint is left" in refusal(capsys, run)
    checkpoints.rename(tmp_path / "away")
    capsys.readouterr()
    assert main(["train", str(run)]) == 0
    assert "step 1/6" in capsys.readouterr().out


def test_a_run_restarts_after_a_crash_in_its_first_checkpoint(shards: Path, tmp_path: Path) -> None:
    """Nothing had been completed, so the run starts over."""
    run = write_run(tmp_path / "run.toml", shards, steps=2)
    assert main(["train", str(run)]) == 0
    checkpoints = run.with_suffix("") / "checkpoints"
    (checkpoints / "step-00000002").rename(checkpoints / "step-00000002.partial")
    (checkpoints / "last").unlink()
    assert main(["train", str(run)]) == 0
