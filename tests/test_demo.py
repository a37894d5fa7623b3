"""The demo explains its result, names commands that work, and survives being killed."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from packages import ROOT
from test_examples import load

SCRIPT = ROOT / "examples" / "pretrain_stdlib.py"
SMALL = ["steps=12", "checkpoint_every=2", "eval_every=6", "eval_batches=1"]
SMALL += ["model_config.hidden_size=32", "model_config.intermediate_size=64", "sample_tokens=8"]
SMALL += ["model_config.num_hidden_layers=1", "sequence_length=32", "log_every=1"]
ARGUMENTS = [word for setting in SMALL for word in ("--set", setting)]


def write_events(folder: Path, losses: list[float]) -> None:
    """Write the held-out losses of a run and the truncated line of a killed process."""
    lines = [json.dumps({"kind": "evaluate", "held_out_loss": loss}) for loss in losses]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"kind": "evalu']) + "\n")


@pytest.mark.parametrize(("last", "code"), [(4.0, 0), (7.9, 1)])
def test_the_result_is_explained_and_three_commands_follow(
    last: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses in nats and as a number of equally likely tokens; exit code 1 without learning."""
    write_events(tmp_path, [8.0, last])
    assert load("pretrain_stdlib.py").report(tmp_path) == code
    result, _, following = capsys.readouterr().out.partition("Next:")
    assert f"from 8.00 to {last:.2f} nats per token" in result
    assert "2,981 equally likely" in result  # e^8
    commands = [shlex.split(line) for line in re.findall(r"^  (?!#)(.+)$", following, re.MULTILINE)]
    assert len(commands) == 3
    assert commands[0][1:4] == ["-m", "ms_parallel", "generate"]


def test_an_installer_that_outlives_its_demo_does_not_write_into_the_next_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run leaves a folder without the final name; the next run uses a new one."""
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("demo_noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    folder, prefixes = tmp_path / "demo", []
    session = SimpleNamespace(log=lambda _: None, error=pytest.fail)

    def run_to_end(command: list[str], *, env: dict[str, str]) -> int:
        assert not folder.exists()
        prefix = command[-1] if "venv" in command else str(Path(command[0]).parents[1])
        prefixes.append(prefix)
        Path(prefix).mkdir(exist_ok=True)
        if len(prefixes) == 2:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(noxfile, "run_to_end", run_to_end)
    with (tmp_path / "lock").open("a") as lock, pytest.raises(KeyboardInterrupt):
        noxfile.make_demo_environment(session, folder, lock)
    killed = set(prefixes)
    assert not folder.exists()
    monkeypatch.setattr("os.getpid", lambda: 1)
    with (tmp_path / "lock").open("a") as lock:
        noxfile.make_demo_environment(session, folder, lock)
        assert len(prefixes) == 5
        noxfile.make_demo_environment(session, folder, lock)  # complete: nothing is installed
    assert len(prefixes) == 5
    assert killed.isdisjoint(prefixes[2:])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["demo"]


def processes(marker: str) -> list[int]:
    """Ids of processes whose command line contains `marker`."""
    running = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if marker in command:
                running.append(int(entry.name))
    return running


def wait_for_no_processes(folder: Path) -> None:
    """Wait until no process of the folder is running."""
    deadline = time.monotonic() + 60
    while processes(str(folder)):
        assert time.monotonic() < deadline, "orphaned processes use the folder"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the demo's tokenizer and shards."""
    folder = tmp_path_factory.mktemp("demo")
    load("pretrain_stdlib.py").build_shards(folder)
    yield folder
    wait_for_no_processes(folder)


def start(folder: Path, *extra_arguments: str) -> subprocess.Popen[str]:
    """Start the demo in its own process group."""
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *ARGUMENTS, *extra_arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True], ids=["script alone", "whole group"])
@pytest.mark.parametrize("until", ["Training:", "step 1/", "step 7/"])
def test_a_killed_demo_leaves_no_processes_and_resumes(
    demo_folder: Path, group: bool, until: str
) -> None:
    """Without the script, torchrun and its ranks exit at once, and the same command resumes."""
    output = demo_folder / "run-data=2"
    subprocess.run(["rm", "-rf", str(output)], check=True)
    killed = start(demo_folder)
    assert killed.stdout is not None
    assert any(until in line for line in killed.stdout)
    if group:
        os.killpg(killed.pid, signal.SIGKILL)
    else:
        killed.kill()
    killed.wait()
    killed.stdout.close()
    wait_for_no_processes(demo_folder)
    with start(demo_folder) as resumed:
        text, _ = resumed.communicate(timeout=300)
    # Twelve steps of a tiny model may teach it nothing: exit code 1.
    assert resumed.returncode in (0, 1)
    assert "in use by" not in text
    assert "Tokenizer:" not in text
    assert re.search(r"trained 12 steps in ", text), text
    if until == "step 7/":
        assert "before this launch" in text
        assert "step 1/12" not in text


def test_two_demos_build_the_shards_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first and reuses its shards."""
    demo, calls, waiting = load("pretrain_stdlib.py"), [], threading.Event()

    def train_tokenizer(*_: object, out: Path, **__: object) -> None:
        calls.append("tokenizer")
        assert waiting.wait(60)
        out.write_text("{}")

    def build(*_: object, out: Path, **__: object) -> SimpleNamespace:
        calls.append("shards")
        out.mkdir()
        (out / "index.json").write_text("{}")
        return SimpleNamespace(documents=1, tokens=1, size_bytes=1)

    monkeypatch.setattr(demo.ms_data, "train_tokenizer", train_tokenizer)
    monkeypatch.setattr(demo.ms_data, "build", build)
    # The message of the waiting demo lets the first one continue.
    messages: list[str] = []

    def say(text: str) -> None:
        messages.append(text)
        if "Waiting" in text:
            waiting.set()

    monkeypatch.setattr(demo, "say", say)
    threads = [threading.Thread(target=demo.build_shards, args=[tmp_path]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["tokenizer", "shards"]
    assert sum("is complete and will be reused" in text for text in messages) == 1


@pytest.mark.slow
def test_a_second_demo_in_the_folder_of_a_live_one_is_refused(demo_folder: Path) -> None:
    """One line names the process that uses the folder."""
    output = demo_folder / "run-data=2"
    subprocess.run(["rm", "-rf", str(output)], check=True)
    first = start(demo_folder, "--set", "steps=100000")
    assert first.stdout is not None
    assert any("step 1/" in line for line in first.stdout)
    with start(demo_folder) as second:
        transcript, _ = second.communicate(timeout=300)
    live = first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    assert (second.returncode, live) == (2, True)
    (line,) = [line for line in transcript.splitlines() if "in use by" in line]
    assert "ms-parallel train, process" in line
    assert "Traceback" not in transcript
