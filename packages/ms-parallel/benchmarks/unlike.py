"""Speedup from unequal data shares and unequal pipeline stages when one of two ranks is slow.

    python packages/ms-parallel/benchmarks/unlike.py

A rank is slowed down by sleeping in its forward passes, for a fixed time per row or per block, so
the slowdown does not depend on other load on the machine. Each line is a separate run in one or two
processes; figures are medians over its last steps.
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
"""Seconds that each of the two ranks sleeps per row, and per block."""
TEXT = Path(json.__file__).parents[1] / "email"
"""Corpus: a package of Python's standard library."""
ROWS, STEPS, COUNTED = 24, 24, 10
LAYERS, MICROBATCHES = 8, 8


def plant(module_class: type[nn.Module], seconds: float) -> None:
    """Make every module of a type sleep for `seconds` per row in training."""

    def wait(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, module_class) and torch.is_grad_enabled():
            time.sleep(seconds * inputs[0].shape[0])

    nn.modules.module.register_module_forward_pre_hook(wait)


def shares(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Train with "equal" or "measured" shares on two data ranks, or on one rank alone."""
    is_single = name.startswith("alone")
    plant(StagedModel, ROW_S[int(name[-1]) if is_single else rank])
    times: list[float] = []
    losses: list[float] = []

    def on_event(event: str, fields: Any) -> None:
        if event == "step":
            times.append(time.monotonic())
            losses.append(fields["loss"])

    shards = folder / "shards"  # has its own tokenizer
    trainer = DistributedTrainer(
        "llama",
        {"data": 1 if is_single else 2},
        sharding="replicate",
        shares="equal" if is_single else name,
        batch_size=ROWS,
        model_config={**SIZES, "num_hidden_layers": 2},
        sequence_length=64,
        **({} if shards.exists() else {"vocab_size": 512}),
        checkpoint_every=None,
        output_dir=folder / name,
        device="cpu",
        on_event=on_event,
        progress=False,
    )
    result = trainer.train(shards if shards.exists() else TEXT, steps=STEPS)
    if rank > 0:  # only rank 0 gets events
        return {}
    last = [after - before for before, after in pairwise(times)][-COUNTED:]
    return {"rows/s": ROWS / median(last), "shares": result.shares, "losses": losses}


def stages(rank: int) -> dict[str, Any]:
    """Time a step of two pipeline stages, with equal layers and with the layers of the search."""
    plant(Block, BLOCK_S[rank])
    groups = connect(Layout(pipeline=2), device="cpu")
    config = architecture("llama", {**SIZES, "vocab_size": 512, "num_hidden_layers": LAYERS})
    tokens = torch.randint(0, 512, (MICROBATCHES, 65), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    search = search_schedule(
        config, groups, rows=MICROBATCHES, sequence_length=64, microbatch_size=1
    )
    results: dict[str, Any] = {
        "layers": search.layers,
        "placement": search.staged.schedule.placement,
        "slowness": search.costs["rank_slowness"],
    }
    for name, schedule in (("equal", "1f1b"), ("searched", search.staged)):
        engine = Engine(config, groups=groups, schedule=schedule, microbatch_size=1)
        seconds = []
        for _ in range(1 + COUNTED):
            start = time.monotonic()
            engine.step(batch, NextTokenLoss())
            seconds.append(time.monotonic() - start)
        results[name] = median(seconds[1:])
    return results


def perform(part: str, folder: Path) -> dict[str, Any]:
    """Run one part in new processes and return the results of rank 0."""
    count = 1 if part.startswith("alone") else 2
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = [*(launcher if count > 1 else []), __file__, "--part", part, "--folder", str(folder)]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    results: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return results


def main() -> None:
    """Run all parts and compare them, or run the part given by --part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part:
        rank = int(os.environ.get("RANK", "0"))
        results = stages(rank) if args.part == "stages" else shares(args.folder, args.part, rank)
        if rank == 0:
            (args.folder / f"{args.part}.json").write_text(json.dumps(results))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {"alone-0": perform("alone-0", folder)}
        (folder / "alone-0/shards").rename(folder / "shards")
        runs |= {part: perform(part, folder) for part in ("alone-1", "equal", "measured")}
        both = runs["alone-0"]["rows/s"] + runs["alone-1"]["rows/s"]
        for part, run in runs.items():
            ratio = run["rows/s"] / both
            print(f"{part:9} {run['rows/s']:6.2f} rows/s, {ratio:.3f} of both; {run['shares']}")
        pairs = zip(runs["equal"]["losses"], runs["measured"]["losses"], strict=True)
        print(f"losses differ by at most {max(abs(a / b - 1) for a, b in pairs):.1e}")
        run = perform("stages", folder)
        print(f"step with equal stages {run['equal']:.3f} s, searched {run['searched']:.3f} s:")
        print(f"layers {run['layers']} on ranks {run['placement']}, slowness {run['slowness']}")


if __name__ == "__main__":
    main()
