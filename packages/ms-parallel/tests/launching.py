"""Runs of the command in real processes: started, killed and compared."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import Command, run_command

TRAIN = ["-m", "ms_parallel", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
MODULES = ("json/decoder.py", "textwrap.py", "heapq.py", "dataclasses.py", "ast.py", "inspect.py")
RUN = {
    "model_arch": "llama",
    "sequence_length": 32,
    "batch_size": 4,
    "vocab_size": 320,
    "held_out_fraction": 0.4,
    "learning_rate": 3e-3,
    "steps": 12,
    "checkpoint_every": 3,
    "eval_batches": 2,
    "log_every": 1,
    "device": "cpu",
}
FROM_RAW_TEXT = ("vocab_size", "held_out_fraction")
"""Settings of `RUN` that are refused if the dataset is shards."""
IMPORTS = (
    "ms_parallel.training.trainer",
    "ms_parallel.cluster.error_report",
    "ms_data",
    "ms_kernels",
)
"""Modules of a run that the fork server imports once."""
IN_FILES = {"model_arch": "model", "dataset_path": "dataset"}
"""Names in run files of the trainer's arguments."""
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def write_corpus(folder: Path) -> Path:
    """Copy a few modules of the standard library."""
    folder.mkdir(parents=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        (folder / Path(module).name).write_bytes((library / module).read_bytes())
    return folder


def run_of(dataset: str | Path) -> dict[str, Any]:
    """`RUN`, for shards without the settings of raw text."""
    is_shards = "://" in str(dataset) or Path(dataset, "index.json").is_file()
    return {k: v for k, v in RUN.items() if not (is_shards and k in FROM_RAW_TEXT)}


def write_run(path: Path, dataset: Path, **settings: Any) -> Path:
    """Write a run file; its output folder has the same path without the suffix."""
    output = {"output_dir": str(path.with_suffix("")), "dataset_path": str(dataset)}
    values = {**run_of(dataset), **output, **settings}
    values = {IN_FILES.get(key, key): value for key, value in values.items()}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    lines += ["[model_config]", *(f"{key} = {value}" for key, value in MODEL.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(**overrides: str) -> dict[str, str]:
    """Environment with the packages on the path and one thread, without launcher variables."""
    path = os.pathsep.join(part for part in sys.path if part)
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {
        **inherited,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **overrides,
    }


def words(run: Path, processes: int, *arguments: str, restarts: int = 0) -> list[str]:
    """Arguments of `python` that start a run."""
    launcher = [*TORCHRUN, "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return [*(launcher if processes > 1 else []), *TRAIN, str(run), *arguments]


def command(run: Path, processes: int, *arguments: str) -> list[str]:
    """Full command that starts a run."""
    return [sys.executable, *words(run, processes, *arguments)]


def train(run: Path, processes: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run until the end."""
    command_words = words(run, processes, *arguments)
    return run_command(command_words, environment=environment(), imports=IMPORTS)


@contextmanager
def training(run: Path, processes: int, *arguments: str, restarts: int = 0) -> Iterator[Command]:
    """A running command; all its processes are killed at the end."""
    command_words = words(run, processes, *arguments, restarts=restarts)
    log = run.with_suffix(".log")
    started = Command(command_words, environment=environment(), log=log, imports=IMPORTS)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def training_in_new_interpreters(run: Path, processes: int) -> Iterator["subprocess.Popen[str]"]:
    """The same in new interpreters, which takes seconds longer; needed if torch's agent matters."""
    with (run.with_suffix(".log")).open("w") as log:
        started = subprocess.Popen(
            command(run, processes), stdout=log, stderr=log, text=True, env=environment()
        )
        try:
            yield started
        finally:
            for child in workers(started.pid):
                signal_process(child, signal.SIGKILL)
            started.kill()
            started.wait(timeout=60)


def workers(agent: int) -> list[int]:
    """Processes started by a launcher, in their order of start."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    except FileNotFoundError:
        return []
    ours = (b"ms_parallel", b"nursery.py")  # the agent also starts other processes
    return [
        int(child) for child in children if any(name in command_line(int(child)) for name in ours)
    ]


def command_line(process: int) -> bytes:
    """Command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def signal_process(process: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def wait_for(condition: Callable[[], object], started: "Command | subprocess.Popen[str]") -> None:
    """Wait until a condition holds or the run has ended."""
    deadline = time.monotonic() + 180
    while not condition():
        if started.poll() is not None:
            return
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.001)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Complete events of a kind that a run has logged."""
    path = run.with_suffix("") / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    recorded = [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]
    return [event for event in recorded if event["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Loss of each step; of repeated steps, the last."""
    return {event["step"]: event["loss"] for event in events(run, "step")}


def weights(run: Path) -> bytes:
    """Bytes of the trained model; with a pipeline every stage writes a file."""
    files = sorted((run.with_suffix("") / "model").glob("*.safetensors"))
    assert files
    return b"".join(file.read_bytes() for file in files)


def partial_checkpoints(run: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((run.with_suffix("") / "checkpoints").glob("*.partial"))


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints."""
    return sorted((run.with_suffix("") / "checkpoints").glob("step-????????/checkpoint.json"))
