"""Pre-train a small Llama-style decoder on the running Python's own library, in two processes.

    python examples/pretrain_stdlib.py --layout tensor=2

Nothing is downloaded: the corpus is the source code of the standard library. Stopped at any point,
even by kill -9, the same command resumes from the last checkpoint.
"""

import argparse
import ctypes
import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import ms_data
from ms_parallel import Layout, ParallelError

RUN_FILE = Path(__file__).with_suffix(".toml")
VOCABULARY = 2048
HELD_OUT_SHARE = 0.02
GOAL = 0.60
"""Final held-out loss as a fraction of the untrained model's; a higher one counts as a failure."""
BEGAN = float(os.environ.get("DEMO_BEGAN", time.time()))
"""Start of the whole command in seconds since the epoch; under nox before the installation."""
PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the shards, train, and explain the result; 0 if the model has learned."""
    options = _parser().parse_args(arguments)
    try:
        layout = choose_layout(options.layout)
        build_shards(options.folder)
    except (ParallelError, ms_data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = options.folder / f"run-{layout}"
    if holder := lock_holder(output):
        print(f"error: {output} is in use by {holder}; wait for it, or kill it", file=sys.stderr)
        return 2
    code = train(layout, options.folder / "shards", output, options.set)
    return code or report(output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Pre-train a small language model on the running Python's own library.",
        epilog="example: python examples/pretrain_stdlib.py --layout tensor=2",
    )
    parser.add_argument("--layout", help="data=2, tensor=2, pipeline=2, data=2,tensor=2, ...")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="output folder")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the run file")
    return parser


def say(text: str) -> None:
    """Print a line with the time since the command started."""
    print(f"[{time.time() - BEGAN:3.0f} s] {text}", flush=True)


def choose_layout(requested: str | None) -> Layout:
    """The requested layout; default: two data ranks, or one with a single accelerator."""
    if requested is not None:
        return Layout.parse(requested)
    return Layout(data=1 if torch.accelerator.device_count() == 1 else 2)


def build_shards(folder: Path) -> None:
    """Train the tokenizer and write the shards, unless an earlier run did."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting: another demo is building the shards in {folder}.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        _build_shards(folder)


def _build_shards(folder: Path) -> None:
    tokenizer, shards = folder / "tokenizer.json", folder / "shards"
    if not tokenizer.is_file():
        say(
            f"Tokenizer: learning {VOCABULARY:,} byte-level BPE tokens from the source code of"
            " Python's standard library."
        )
        ms_data.train_tokenizer("stdlib", vocab_size=VOCABULARY, out=tokenizer)
    if (shards / "index.json").is_file():
        say(f"Shards: {shards} is complete and will be reused.")
        return
    say(
        f"Shards: writing the token ids into compressed, checksummed files; {HELD_OUT_SHARE:.0%} of"
        " the source files are held out to measure the model on text it has not seen."
    )
    summary = ms_data.build(
        "stdlib", tokenizer=tokenizer, out=shards, held_out_fraction=HELD_OUT_SHARE
    )
    size = f"{summary.size_bytes / 2**20:.1f} MiB"
    print(f"{summary.documents:,} documents, {summary.tokens:,} tokens, {size}", flush=True)


def lock_holder(output: Path) -> str | None:
    """The live run that holds the output folder's lock.

    Checked before the launch, because torchrun's output would bury the error of the ranks.
    """
    if not (output / "lock").exists():
        return None
    with (output / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip() or "another process"
    return None


def train(layout: Layout, shards: Path, output: Path, overrides: Sequence[str]) -> int:
    """Run the training under torchrun and return its exit code."""
    processes = layout.world_size
    settings = [f"layout.{axis}" for axis in str(layout).split(",")]
    settings += [f"dataset={shards}", f"output_dir={output}"]
    if torch.accelerator.device_count() < processes:
        settings.append("device=cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "ms_parallel", "train", str(RUN_FILE)]
    command += [part for setting in [*settings, *overrides] for part in ("--set", setting)]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    say(
        f"Training: a Llama-style decoder under {layout} in {processes} processes. Each printed"
        " loss is the mean over a batch in nats per token, and it should fall."
    )
    with subprocess.Popen(
        command, env={"OMP_NUM_THREADS": str(threads), **os.environ}, preexec_fn=_end_with_parent
    ) as torchrun:
        # Ctrl-C also reaches torchrun: wait for its processes to save a checkpoint.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return torchrun.wait()


def _end_with_parent() -> None:
    """Ask the kernel to kill torchrun when this process dies; its ranks do the same.

    Otherwise a killed demo would keep training and keep the folder locked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def report(output: Path) -> int:
    """Explain the held-out loss and suggest next commands; 0 if the loss reached the goal."""
    with (output / "events.jsonl").open() as lines:
        events = [
            json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")
        ]
    losses = [event["held_out_loss"] for event in events if event["kind"] == "evaluate"]
    before, after = losses[0], losses[-1]
    say(
        f"Result: the loss on held-out files fell from {before:.2f} to {after:.2f} nats per token."
        f" Untrained, the model was as unsure as among {math.exp(before):,.0f} equally likely"
        f" tokens; now it is among {math.exp(after):,.0f}. It knows Python's common tokens and"
        " layout, not its logic: that takes a larger model and more steps."
    )
    print("\nNext:")
    for description, command in next_commands(output):
        print(f"  # {description}\n  {command}")
    return 0 if after <= GOAL * before else 1


def next_commands(output: Path) -> list[tuple[str, str]]:
    """Commands to try next, each with a description."""
    relative_python = os.path.relpath(sys.executable)
    python = sys.executable if relative_python.startswith("..") else relative_python
    prompt = ["-m", "ms_parallel", "generate", str(output / "model"), "--prompt", "class Stack:"]
    demo = [os.path.relpath(__file__), "--folder", str(output.parent)]
    commands = {
        "let the model continue your text": prompt,
        "continue from the last checkpoint to three times the number of steps": [
            *demo,
            *("--set", "steps=900"),
        ],
        "train the same model with weight matrices split over two processes": [
            *demo,
            *("--layout", "tensor=2"),
        ],
    }
    return [
        (description, shlex.join([python, *arguments]))
        for description, arguments in commands.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
