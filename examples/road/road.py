"""From Python's standard library to a model that answers in three runtimes.

    python examples/road/road.py

Each step is a command that you can also type yourself; `--list` prints them all. Finished steps are
skipped. Stop the script at any time, even with kill -9: the same command continues, and an
interrupted training resumes from its last checkpoint. The result is one page, `road/road.html`.
"""

import argparse
import ctypes
import fcntl
import importlib.util
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from attrs import frozen

HERE = Path(__file__).resolve().parent
CODE = shlex.quote(str(HERE))
"""This folder as a word of a command line."""
SCHEMES = {"ct": "ct.int4_g32", "onnx": "ort.matmulnbits", "gguf": "gguf.q4_0"}
"""Compression scheme of each folder in `deploy/`."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: a signal for the child when its parent dies."""


@frozen(kw_only=True)
class Step:
    """Commands that run in the road's folder, and the files they write there."""

    name: str
    purpose: str
    commands: tuple[str, ...]
    """Command lines without the leading `python`."""
    outputs: tuple[str, ...]
    """Files and folders that `--from` deletes before the step runs again."""
    seconds: float
    """Duration on 2 idle cores, for the estimate of the time left."""


def recorded(name: str, command: str, *, processes: int = 1) -> str:
    """Return a training command under ms-profile's recorder, which writes to `profile/NAME`."""
    launcher = f" --nproc-per-node {processes}" if processes > 1 else ""
    return (
        f"-m ms_profile run --train-script {CODE}/module.py --output-dir profile/{name}"
        f" --overwrite --every 150{launcher} -- {command}"
    )


def training(name: str, purpose: str, command: str, seconds: float, *, processes: int = 1) -> Step:
    """Return the step that trains with the run file `NAME.toml`."""
    return Step(
        name=name,
        purpose=purpose,
        commands=(recorded(name, f"{command} {CODE}/{name}.toml", processes=processes),),
        outputs=(name, f"profile/{name}"),
        seconds=seconds,
    )


def quantization(name: str, scheme: str) -> Step:
    """Return the step that trains with quantized weights and writes `deploy/NAME`."""
    # A GGUF file is verified by llama.cpp, which takes minutes to build and may not be installed.
    verify = name != "gguf" or importlib.util.find_spec("llama_cpp") is not None
    command = (
        f"ms_compress qat {CODE}/qat.toml --set scheme={scheme} --set output_dir=deploy/{name}"
        f" --set verify={str(verify).lower()}"
    )
    return Step(
        name=f"qat-{name}",
        purpose=f"train with weights quantized as {scheme}, with the float model as teacher",
        commands=(recorded(f"qat-{name}", command),),
        outputs=(f"deploy/{name}", f"deploy/{name}.training", f"profile/qat-{name}"),
        seconds=35,
    )


def steps() -> list[Step]:
    """Return all steps in order."""
    chats = f"--tokenizer tokenizer.json --chat-template {CODE}/chat.jinja"
    return [
        Step(
            name="clean",
            purpose="read the standard library, repair texts, mask personal data",
            commands=(f"-m ms_data clean stdlib {CODE}/clean.toml --out cleaned",),
            outputs=("cleaned",),
            seconds=6,
        ),
        Step(
            name="dedup",
            purpose="keep one copy of identical and near-identical files",
            commands=("-m ms_data dedup cleaned --out unique",),
            outputs=("unique",),
            seconds=5,
        ),
        Step(
            name="tokenizer",
            purpose="train a byte-level BPE tokenizer with 4,096 tokens",
            commands=("-m ms_data tokenizer unique --vocab-size 4096 --out tokenizer.json",),
            outputs=("tokenizer.json",),
            seconds=9,
        ),
        Step(
            name="shards",
            purpose="write compressed token shards with checksums, and hold out 2% of the files",
            commands=(
                "-m ms_data build unique --tokenizer tokenizer.json --held-out-fraction 0.02"
                " --out shards",
            ),
            outputs=("shards",),
            seconds=5,
        ),
        Step(
            name="tasks",
            purpose="make docstring tasks, sums, preference pairs and held-out questions",
            commands=(
                f"{CODE}/../docstrings.py docstrings",
                f"{CODE}/tasks.py docstrings tasks",
                f"-m ms_data build tasks/add.jsonl {chats} --held-out-fraction 0.02"
                " --out chats/add",
                f"-m ms_data build tasks/describe.jsonl {chats} --held-out-fraction 0.02"
                " --out chats/describe",
                f"-m ms_data build tasks/implement.jsonl {chats} --held-out-fraction 0.02"
                " --out chats/implement",
                f"-m ms_data build tasks/pairs.jsonl --pairs {chats} --held-out-fraction 0.05"
                " --out chats/pairs",
            ),
            outputs=("docstrings", "tasks", "chats"),
            seconds=12,
        ),
        training(
            "pretrain",
            "pre-train a Llama-style decoder on two processes",
            "ms_parallel train",
            110,
            processes=2,
        ),
        training("sft", "tune it on three tasks, sampled by difficulty", "ms_align sft", 115),
        training("reward", "train a reward model on answer pairs", "ms_align reward", 35),
        training("ppo", "optimize it with PPO for correct sums", "ms_align ppo", 155),
        *(quantization(name, scheme) for name, scheme in SCHEMES.items()),
        Step(
            name="ask",
            purpose="ask every model the held-out questions, each in its own runtime",
            commands=(f"{CODE}/ask.py --out answers.json",),
            outputs=("answers.json",),
            seconds=12,
        ),
        Step(
            name="evaluate",
            purpose="measure size, speed and perplexity of each export",
            commands=(f"-m ms_compress evaluate {CODE}/evaluate.toml",),
            outputs=("report",),
            seconds=6,
        ),
        Step(
            name="page",
            purpose="draw one page of all results",
            commands=(
                "-m ms_profile report profile/pretrain --out waiting.html",
                f"{CODE}/page.py --out road.html",
            ),
            outputs=("waiting.html", "road.html"),
            seconds=6,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 0, or the exit code of the step that failed, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="road", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("road"), help="output folder")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    parser.add_argument("--from", dest="first", metavar="STEP", help="repeat the steps from STEP")
    options = parser.parse_args(arguments)
    plan, folder = steps(), options.folder
    names = [step.name for step in plan]
    if options.first and options.first not in names:
        print(f"road: no step {options.first!r}; the steps are {', '.join(names)}", file=sys.stderr)
        return 2
    if options.list:
        for step in plan:
            print(f"{step.name}: {step.purpose}{' (done)' if is_done(step, folder) else ''}")
            print("".join(f"    python {command}\n" for command in step.commands), end="")
        return 0
    (folder / "done").mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        # Children inherit the lock, so this also waits for the children of a killed run.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if options.first:
            for step in plan[names.index(options.first) :]:
                remove(step, folder)
        return run_steps(plan, folder, lock)


def run_steps(plan: Sequence[Step], folder: Path, lock: IO[bytes]) -> int:
    """Run the steps that are not done; return 0, or the exit code of the failed step."""
    expected_s = elapsed_s = 0.0
    for number, step in enumerate(plan, 1):
        title = f"[{number}/{len(plan)}] {step.name}"
        if is_done(step, folder):
            print(f"{title}: done before", flush=True)
            continue
        pace = elapsed_s / expected_s if expected_s else 1.0
        todo = [item for item in plan[number - 1 :] if not is_done(item, folder)]
        left_s = pace * sum(item.seconds for item in todo)
        print(f"{title}: {step.purpose}; about {left_s / 60:.0f} min left in all", flush=True)
        start_s, start_cpu_s = time.monotonic(), children_cpu_s()
        for command in step.commands:
            code = run(command, folder, lock)
            if code:
                print(f"road: {step.name} failed; fix the error above, and the same command"
                      " continues", file=sys.stderr)  # fmt: skip
                return code
        wall_s, cpu_s = time.monotonic() - start_s, children_cpu_s() - start_cpu_s
        marker(step, folder).write_text(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s}))
        expected_s, elapsed_s = expected_s + step.seconds, elapsed_s + wall_s
    return 0


def run(command: str, folder: Path, lock: IO[bytes]) -> int:
    """Run one command line in the road's folder and return its exit code."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command)],
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path},
        pass_fds=(lock.fileno(),),
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        return process.wait()
    except KeyboardInterrupt:  # the child received it too and saves a checkpoint first
        process.wait()
        raise


def marker(step: Step, folder: Path) -> Path:
    """Return the file that marks a step as done; it holds the step's duration."""
    return folder / "done" / f"{step.name}.json"


def is_done(step: Step, folder: Path) -> bool:
    """Return whether the step finished and its output is still there."""
    return marker(step, folder).exists() and (folder / step.outputs[0]).exists()


def remove(step: Step, folder: Path) -> None:
    """Delete the step's marker and outputs."""
    marker(step, folder).unlink(missing_ok=True)
    for name in step.outputs:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def children_cpu_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("road: stopped; the same command continues", file=sys.stderr)
        sys.exit(130)
