"""Pre-train a small Llama-style decoder on the running Python's own library, in two processes.

    python examples/pretrain_stdlib.py --layout tensor=2

No download: the corpus is the standard library's sources. A byte-level BPE is trained on it, the
text is written as compressed token shards, and torchrun starts as many processes as the layout
needs. The same command again goes on where it was interrupted, or says that all is done.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import ms_data
from ms_parallel import Layout, ParallelError

RUN_FILE = Path(__file__).with_suffix(".toml")
VOCABULARY = 4096
HELD_OUT_SHARE = 0.02
GOAL = 0.6
"""Held-out loss after training, as a share of the untrained model's, that counts as learnt."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the shards, train, and say what came of it; 0 if the model has learnt."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    try:
        layout = choose_layout(options.layout)
        build_shards(options.folder)
    except (ParallelError, ms_data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = options.folder / f"run-{layout}"
    code = train(layout, options.folder / "shards", output, options.set)
    if code == 0:
        code = report(output)
        print(f"took {time.monotonic() - began:.0f} s; the model is in {output / 'model'}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Pre-train a small language model on the running Python's own library.",
        epilog="example: python examples/pretrain_stdlib.py --layout tensor=2",
    )
    parser.add_argument("--layout", help="data=2, tensor=2, pipeline=2, data=2,tensor=2, ...")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything goes")
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE, a setting of the run"
    )
    return parser


def choose_layout(asked: str | None) -> Layout:
    """The layout asked for; else two data ranks, or on a machine with one accelerator just one."""
    if asked is not None:
        return Layout.parse(asked)
    return Layout(data=1 if torch.accelerator.device_count() == 1 else 2)


def build_shards(folder: Path) -> None:
    """Train the tokenizer and write the shards, unless they are there."""
    if (folder / "shards" / "index.json").is_file():
        print(f"shards are in {folder / 'shards'}", flush=True)
        return
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        print(f"training a byte-level BPE of {VOCABULARY} tokens on the library", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        ms_data.train_tokenizer("stdlib", vocab_size=VOCABULARY, out=tokenizer)
    print("writing token shards", flush=True)
    summary = ms_data.build(
        "stdlib", tokenizer=tokenizer, out=folder / "shards", hold_out=HELD_OUT_SHARE
    )
    size = f"{summary.size_bytes / 2**20:.1f} MiB"
    print(f"{summary.documents:,} documents, {summary.tokens:,} tokens, {size}", flush=True)


def train(layout: Layout, shards: Path, output: Path, overrides: Sequence[str]) -> int:
    """Start the run file's training under torchrun; its exit code."""
    settings = [f"dataset={shards}", f"output_dir={output}", *overrides]
    axes = [f"layout.{axis}" for axis in str(layout).split(",")]
    processes = layout.world_size
    if torch.accelerator.device_count() < processes:
        settings.append("device=cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "ms_parallel", "train", str(RUN_FILE)]
    command += [part for setting in [*axes, *settings] for part in ("--set", setting)]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    print(f"training under {layout} in {processes} processes", flush=True)
    return subprocess.run(command, env=environment, check=False).returncode


def report(output: Path) -> int:
    """Held-out loss before and after, from the run's events; 0 if it has reached the goal."""
    with (output / "events.jsonl").open() as lines:
        events = [
            json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")
        ]
    evaluations = [event for event in events if event["kind"] == "evaluate"]
    before, after = evaluations[0]["held_out_loss"], evaluations[-1]["held_out_loss"]
    share = after / before
    print(
        f"held-out loss {before:.3f} before, {after:.3f} after: {share:.0%} of the untrained one's"
    )
    return 0 if share <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
