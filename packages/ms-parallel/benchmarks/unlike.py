"""What unequal shares and unequal stages bring where one of two ranks is slow.

    python packages/ms-parallel/benchmarks/unlike.py

A rank is made slow by waiting: so many seconds in each of its forwards for each row, or in each
block, beside what the model takes. So it is as slow as planted whatever else the machine does. Each
line is a run of its own, in one or two processes; a figure is the median of its last steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from ms_parallel import DistributedTrainer, Engine, Layout, NextTokenLoss, search_schedule
from ms_parallel.cluster.connection import connect
from ms_parallel.models import architecture
from ms_parallel.models.parts.block import Block
from ms_parallel.models.staged import StagedModel

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ROW_S, BLOCK_S = (0.05, 0.1), (0.01, 0.04)
"""Seconds that each rank waits for a row, and in a block."""
TEXT = Path(json.__file__).parents[1] / "email"
"""A few modules of the running Python's library."""
ROWS, STEPS, COUNTED = 24, 24, 10
LAYERS, MICROBATCHES = 8, 8


def plant(kind: type[nn.Module], seconds: float) -> None:
    """Make modules of a kind take so much longer for each row that they train on."""

    def wait(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, kind) and torch.is_grad_enabled():
            time.sleep(seconds * inputs[0].shape[0])

    nn.modules.module.register_module_forward_pre_hook(wait)


def shares(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """A run: `equal` or `measured` on two data ranks, or one of the ranks alone."""
    alone = name.startswith("alone")
    plant(StagedModel, ROW_S[int(name[-1]) if alone else rank])
    times: list[float] = []
    losses: list[float] = []

    def listen(kind: str, fields: Any) -> None:
        if kind == "step":
            times.append(time.monotonic())
            losses.append(fields["loss"])

    trainer = DistributedTrainer(
        "llama",
        {"data": 1 if alone else 2},
        sharding="replicate",
        shares="equal" if alone else name,
        batch_size=ROWS,
        model_config={**SIZES, "num_hidden_layers": 2},
        sequence_length=64,
        vocab_size=512,
        checkpoint_every=None,
        output_dir=folder / name,
        device="cpu",
        on_event=listen,
        progress=False,
    )
    shards = folder / "shards"
    result = trainer.train(shards if shards.exists() else TEXT, steps=STEPS)
    if rank > 0:  # the first process alone is told
        return {}
    last = [after - before for before, after in pairwise(times)][-COUNTED:]
    return {"rows/s": ROWS / median(last), "shares": result.shares, "losses": losses}


def stages(rank: int) -> dict[str, Any]:
    """Seconds of a step of two stages, layers shared out equally and as the search finds."""
    plant(Block, BLOCK_S[rank])
    groups = connect(Layout(pipeline=2), device="cpu")
    config = architecture("llama", {**SIZES, "vocab_size": 512, "num_hidden_layers": LAYERS})
    tokens = torch.randint(0, 512, (MICROBATCHES, 65), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    found = search_schedule(
        config, groups, rows=MICROBATCHES, sequence_length=64, microbatch_size=1
    )
    told: dict[str, Any] = {
        "layers": found.layers,
        "placement": found.staged.schedule.placement,
        "slowness": found.costs["rank_slowness"],
    }
    for name, schedule in (("equal", "1f1b"), ("found", found.staged)):
        engine = Engine(config, groups=groups, schedule=schedule, microbatch_size=1)
        seconds = []
        for _ in range(1 + COUNTED):
            began = time.monotonic()
            engine.step(batch, NextTokenLoss())
            seconds.append(time.monotonic() - began)
        told[name] = median(seconds[1:])
    return told


def perform(part: str, folder: Path) -> dict[str, Any]:
    """Run a part in processes of its own, and read what its first one found."""
    count = 1 if part.startswith("alone") else 2
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = [*(launcher if count > 1 else []), __file__, "--part", part, "--folder", str(folder)]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    told: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return told


def main() -> None:
    """Compare the runs, or perform one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part:
        rank = int(os.environ.get("RANK", "0"))
        found = stages(rank) if given.part == "stages" else shares(given.folder, given.part, rank)
        if rank == 0:
            (given.folder / f"{given.part}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = {"alone-0": perform("alone-0", folder)}
        (folder / "alone-0/shards").rename(folder / "shards")
        told |= {part: perform(part, folder) for part in ("alone-1", "equal", "measured")}
        both = told["alone-0"]["rows/s"] + told["alone-1"]["rows/s"]
        for part, each in told.items():
            share = each["rows/s"] / both
            print(f"{part:9} {each['rows/s']:6.2f} rows/s, {share:.3f} of both; {each['shares']}")
        pairs = zip(told["equal"]["losses"], told["measured"]["losses"], strict=True)
        print(f"losses differ by {max(abs(one / other - 1) for one, other in pairs):.1e} at most")
        each = perform("stages", folder)
        print(f"a step of equal stages {each['equal']:.3f} s, as found {each['found']:.3f} s:")
        print(f"layers {each['layers']} on ranks {each['placement']}, slowness {each['slowness']}")


if __name__ == "__main__":
    main()
