"""Whole updates beside transformers' Trainer and a loop over torch's FSDP2, on the same text.

    python packages/ms-parallel/benchmarks/peers_training.py            # two processes
    python packages/ms-parallel/benchmarks/peers_training.py --steps 30 --size small

One Llama with the same weights, the same rows of the running Python's own source, AdamW with
clipping at 1, in float32 on one thread a process. The Trainer does what it does by default on two
processes (DistributedDataParallel), beside our engine with `sharding="replicate"`; transformers'
model under `fully_shard`, block by block, as torch's own example has it, beside our engine with
what it chooses by itself, which shards too. Losses of all updates must agree. In one run all take
turns within the same processes, in another order each time, so that a busy machine slows all alike;
a figure is the median ratio of neighbors, ours over theirs, of the wall clock between two barriers
and of the processor time of all processes. Memory is the most that a process of its own held,
beyond what it held with everything imported.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.optimizers.adamw import AdamWConfig

PROCESSES = 2
LIMIT = 1.0
"""Most that the median ratio to the fastest may be..."""
NOISE = 0.02
"""...and by how much it may be above."""
SIZES = {"small": (4, 128, 4096, 128, 8), "medium": (8, 256, 8192, 256, 4)}
"""Layers, hidden size, vocabulary, positions, rows a process."""
RATE = 1e-3
RIVALS = {"replicate": "trainer", "shard": "fsdp2"}
"""Ours by how it shares out weights, and who does the same."""
SIDES = (*RIVALS, *RIVALS.values())
WARM = 3


def model_config(size: str) -> LlamaConfig:
    """Settings of the size's model."""
    layers, hidden, vocabulary, positions, _ = SIZES[size]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )


def batches(size: str, count: int, rank: int) -> list[Tensor]:
    """Rows (rows, positions + 1) of this process for each update: pairs of bytes of source."""
    _, _, vocabulary, positions, rows = SIZES[size]
    needed = count * PROCESSES * rows * (positions + 1)
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
    pairs = torch.frombuffer(bytearray(text * (1 + 2 * needed // len(text))), dtype=torch.uint8)
    tokens = pairs[: 2 * needed].view(-1, 2).long() @ torch.tensor([256, 1]) % vocabulary
    return list(tokens.view(count, PROCESSES, rows, positions + 1)[:, rank])


class Ours:
    """The engine, sharing out weights over the data axis or not."""

    def __init__(self, folder: str, updates: list[Tensor], sharding: str) -> None:
        groups = connect(Layout(data=PROCESSES), device="cpu", timeout_s=120)
        optimizer = AdamWConfig(learning_rate=RATE, weight_decay=0.0, betas=(0.9, 0.999))
        self.engine = Engine(folder, groups=groups, optimizer=optimizer, sharding=sharding)
        self.updates, self.loss = updates, NextTokenLoss()

    def step(self, index: int) -> float:
        """One update; the loss."""
        rows = self.updates[index]
        update = self.engine.step({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, self.loss)
        return float(update.loss)


class Sharded:
    """torch's FSDP2 in a loop."""

    def __init__(self, folder: str, updates: list[Tensor]) -> None:
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        for block in self.model.model.layers:
            fully_shard(block)
        fully_shard(self.model)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)
        self.updates = updates

    def step(self, index: int) -> float:
        """One update; the loss."""
        rows = self.updates[index]
        logits = self.model(rows[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / PROCESSES


class Turns(TrainerCallback):  # type: ignore[misc]
    """Times the Trainer's updates, and lets the others make theirs before them or after."""

    def __init__(self, others: dict[str, Any]) -> None:
        self.others, self.index = others, 0
        self.began = (0.0, 0.0)
        self.walls: dict[str, list[float]] = {name: [] for name in SIDES}
        self.works: dict[str, list[float]] = {name: [] for name in SIDES}
        self.losses: dict[str, list[float]] = {name: [] for name in SIDES}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Those whose turn comes before, then the clock."""
        self._let(list(self.others)[: self.index % (1 + len(self.others))])
        dist.barrier()
        self.began = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The clock, then those whose turn comes after."""
        spent = time.process_time() - self.began[1]
        dist.barrier()
        self._note("trainer", time.perf_counter() - self.began[0], spent)
        self._let(list(self.others)[self.index % (1 + len(self.others)) :])
        self.index += 1

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """The loss that the Trainer tells."""
        if "loss" in logs:
            self.losses["trainer"].append(float(logs["loss"]))

    def _let(self, names: list[str]) -> None:
        for name in names:
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            loss = self.others[name].step(self.index)
            spent = time.process_time() - spent
            dist.barrier()
            self._note(name, time.perf_counter() - began, spent)
            self.losses[name].append(loss)

    def _note(self, name: str, wall: float, work: float) -> None:
        self.walls[name].append(wall)
        self.works[name].append(work)


def trainer_of(folder: str, size: str, updates: list[Tensor], callback: Any) -> Trainer:
    """Transformers' Trainer over the same rows, in their order."""
    # Its sampler deals batches out to processes in turn; each here knows its own alone. It counts
    # as targets all labels but a row's first.
    items = [
        {"input_ids": row[:-1], "labels": row}
        for update in updates
        for _ in range(PROCESSES)
        for row in update
    ]

    def loss(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits, targets = output.logits.flatten(0, 1), labels[:, 1:].flatten()
        summed = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return summed / num_items_in_batch  # of all processes

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=SIZES[size][4],
        max_steps=len(updates),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Trainer(
        model=model, args=arguments, train_dataset=items, compute_loss_func=loss,
        callbacks=[callback],
    )  # fmt: skip


def side_of(name: str, folder: str, updates: list[Tensor]) -> Any:
    """Whoever makes an update when told."""
    if name == "fsdp2":
        return Sharded(folder, updates)
    return Ours(folder, updates, "auto" if name == "shard" else name)


def compare(folder: str, size: str, steps: int) -> dict[str, Any]:
    """Let all take turns; times, and how far the losses are apart."""
    updates = batches(size, steps + WARM, int(os.environ["RANK"]))
    others = {name: side_of(name, folder, updates) for name in SIDES if name != "trainer"}
    turns = Turns(others)
    trainer_of(folder, size, updates, turns).train()
    works = torch.tensor([turns.works[name] for name in SIDES], dtype=torch.float64)
    dist.all_reduce(works)
    found: dict[str, Any] = {"size": size, "updates": steps}
    for name, work in zip(SIDES, works.tolist(), strict=True):
        found[f"{name}_ms"] = 1e3 * median(turns.walls[name][WARM:])
        found[f"{name}_processor_ms"] = 1e3 * median(work[WARM:])
    work_of = dict(zip(SIDES, works.tolist(), strict=True))
    for ours, name in RIVALS.items():
        walls = zip(turns.walls[ours], turns.walls[name], strict=True)
        found[f"wall_{ours}_to_{name}"] = median([a / b for a, b in walls][WARM:])
        both = zip(work_of[ours], work_of[name], strict=True)
        found[f"processor_{ours}_to_{name}"] = median([a / b for a, b in both][WARM:])
        pairs = list(zip(turns.losses[ours], turns.losses[name], strict=True))
        apart = max(abs(a - b) / b for a, b in pairs)
        if apart > 1e-3:  # float32 sums in other orders, grown over the updates
            raise SystemExit(f"losses of {ours} and {name} are {apart:.1e} apart: {pairs}")
        found[f"losses_{ours}_to_{name}"] = apart
    return found


def weigh(folder: str, size: str, name: str) -> dict[str, Any]:
    """Most bytes that a process held in four updates of one side, beyond what imports took."""
    updates = batches(size, 4, int(os.environ["RANK"]))
    connect(Layout(data=PROCESSES), device="cpu", timeout_s=120)
    before = torch.tensor(_resident(), dtype=torch.float64)
    if name == "trainer":
        trainer_of(folder, size, updates, TrainerCallback()).train()
    else:
        side = side_of(name, folder, updates)
        for index in range(len(updates)):
            side.step(index)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"memory_of": name, "mib": float(peak) / 2**20}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def launch(*arguments: str) -> dict[str, Any]:
    """Run this file on all processes; what the first told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PROCESSES), __file__, *arguments]
    told = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    (line,) = (line for line in told.stdout.splitlines() if line.startswith('{"'))
    found: dict[str, Any] = json.loads(line)
    return found


def main() -> int:
    """Print what was found, and fail where ours is slower or larger than the best of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="timed updates of each")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--weigh", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        made = (
            weigh(given.folder, given.size, given.weigh)
            if given.weigh
            else compare(given.folder, given.size, given.steps)
        )
        if os.environ["RANK"] == "0":
            print(json.dumps(made), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(model_config(given.size)).save_pretrained(folder)
        common = ("--size", given.size, "--steps", str(given.steps), "--folder", folder)
        found = launch(*common)
        print(f"torch {torch.__version__}, {platform.machine()}, {PROCESSES} processes")
        print(json.dumps(found))
        held = {name: launch(*common, "--weigh", name)["mib"] for name in SIDES}
    print(json.dumps({"mib": held}))
    slow = any(found[f"processor_{a}_to_{b}"] > LIMIT + NOISE for a, b in RIVALS.items())
    return int(slow or any(held[a] > held[b] * (LIMIT + NOISE) for a, b in RIVALS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
