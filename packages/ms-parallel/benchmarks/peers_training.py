"""Complete updates compared with transformers' Trainer and a loop over torch's FSDP2.

    python packages/ms-parallel/benchmarks/peers_training.py            # two processes
    python packages/ms-parallel/benchmarks/peers_training.py --steps 30 --size small

One Llama with the same weights on the same rows of Python's source code, AdamW with clipping at 1,
in float32 with one thread per process. The Trainer with its default on two processes
(DistributedDataParallel) is compared with our engine with `sharding="replicate"`, and transformers'
model under `fully_shard` per block, as in torch's example, with our engine's default, which also
shards. The losses of all updates must agree. All alternate within the same processes in changing
order, so a busy machine slows all equally. A figure is the median ratio of neighboring updates,
ours over theirs, of the wall-clock time between two barriers and of the CPU time of all processes.
Memory is the peak of a separate process beyond its memory after imports.
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
from ms_parallel.optim.optimizers.adamw import AdamWConfig

PROCESSES = 2
LIMIT = 1.0
"""Limit of the median ratio to the peer..."""
NOISE = 0.02
"""...and tolerance above it."""
SIZES = {"small": (4, 128, 4096, 128, 8), "medium": (8, 256, 8192, 256, 4)}
"""Layers, hidden size, vocabulary, positions, rows per process."""
RATE = 1e-3
PEERS = {"replicate": "trainer", "shard": "fsdp2"}
"""Our sharding, and the peer with the same one."""
SIDES = (*PEERS, *PEERS.values())
WARM = 3


def model_config(size: str) -> LlamaConfig:
    """Config of a size's model."""
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
    """Rows (rows, positions + 1) of this process for each update: byte pairs of source code."""
    _, _, vocabulary, positions, rows = SIZES[size]
    needed = count * PROCESSES * rows * (positions + 1)
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
    pairs = torch.frombuffer(bytearray(text * (1 + 2 * needed // len(text))), dtype=torch.uint8)
    tokens = pairs[: 2 * needed].view(-1, 2).long() @ torch.tensor([256, 1]) % vocabulary
    return list(tokens.view(count, PROCESSES, rows, positions + 1)[:, rank])


class Ours:
    """The engine with a sharding."""

    def __init__(self, folder: str, updates: list[Tensor], sharding: str) -> None:
        groups = connect(Layout(data=PROCESSES), device="cpu", timeout_s=120)
        optimizer = AdamWConfig(learning_rate=RATE, weight_decay=0.0, betas=(0.9, 0.999))
        self.engine = Engine(folder, groups=groups, optimizer=optimizer, sharding=sharding)
        self.updates, self.loss = updates, NextTokenLoss()

    def step(self, index: int) -> float:
        """Take an update and return the loss."""
        rows = self.updates[index]
        update = self.engine.step({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, self.loss)
        return float(update.loss)


class Sharded:
    """A loop over torch's FSDP2."""

    def __init__(self, folder: str, updates: list[Tensor]) -> None:
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        for block in self.model.model.layers:
            fully_shard(block)
        fully_shard(self.model)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)
        self.updates = updates

    def step(self, index: int) -> float:
        """Take an update and return the loss."""
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
    """Times the Trainer's updates, and runs the others' updates before or after them."""

    def __init__(self, others: dict[str, Any]) -> None:
        self.others, self.index = others, 0
        self.start = (0.0, 0.0)
        self.walls: dict[str, list[float]] = {name: [] for name in SIDES}
        self.works: dict[str, list[float]] = {name: [] for name in SIDES}
        self.losses: dict[str, list[float]] = {name: [] for name in SIDES}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Run the others that come before, then start the clock."""
        self._run_others(list(self.others)[: self.index % (1 + len(self.others))])
        dist.barrier()
        self.start = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, then run the others that come after."""
        spent = time.process_time() - self.start[1]
        dist.barrier()
        self._record("trainer", time.perf_counter() - self.start[0], spent)
        self._run_others(list(self.others)[self.index % (1 + len(self.others)) :])
        self.index += 1

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Record the loss that the Trainer logs."""
        if "loss" in logs:
            self.losses["trainer"].append(float(logs["loss"]))

    def _run_others(self, names: list[str]) -> None:
        for name in names:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = self.others[name].step(self.index)
            spent = time.process_time() - cpu_start
            dist.barrier()
            self._record(name, time.perf_counter() - start, spent)
            self.losses[name].append(loss)

    def _record(self, name: str, wall: float, work: float) -> None:
        self.walls[name].append(wall)
        self.works[name].append(work)


def trainer_of(folder: str, size: str, updates: list[Tensor], callback: Any) -> Trainer:
    """The transformers Trainer on the same rows in the same order."""
    # Its sampler distributes batches over processes, and each process here only has its own rows.
    # The Trainer counts all labels except a row's first as targets.
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
    """Build a side, which takes one update per call of `step`."""
    if name == "fsdp2":
        return Sharded(folder, updates)
    return Ours(folder, updates, "auto" if name == "shard" else name)


def compare(folder: str, size: str, steps: int) -> dict[str, Any]:
    """Alternate all sides; return times, and differences of the losses."""
    updates = batches(size, steps + WARM, int(os.environ["RANK"]))
    others = {name: side_of(name, folder, updates) for name in SIDES if name != "trainer"}
    turns = Turns(others)
    trainer_of(folder, size, updates, turns).train()
    works = torch.tensor([turns.works[name] for name in SIDES], dtype=torch.float64)
    dist.all_reduce(works)
    results: dict[str, Any] = {"size": size, "updates": steps}
    for name, work in zip(SIDES, works.tolist(), strict=True):
        results[f"{name}_ms"] = 1e3 * median(turns.walls[name][WARM:])
        results[f"{name}_processor_ms"] = 1e3 * median(work[WARM:])
    work_of = dict(zip(SIDES, works.tolist(), strict=True))
    for ours, name in PEERS.items():
        walls = zip(turns.walls[ours], turns.walls[name], strict=True)
        results[f"wall_{ours}_to_{name}"] = median([a / b for a, b in walls][WARM:])
        ratios = zip(work_of[ours], work_of[name], strict=True)
        results[f"processor_{ours}_to_{name}"] = median([a / b for a, b in ratios][WARM:])
        pairs = list(zip(turns.losses[ours], turns.losses[name], strict=True))
        difference = max(abs(a - b) / b for a, b in pairs)
        if difference > 1e-3:  # float32 sums in different orders, amplified over the updates
            raise SystemExit(f"losses of {ours} and {name} are {difference:.1e} apart: {pairs}")
        results[f"losses_{ours}_to_{name}"] = difference
    return results


def peak_memory(folder: str, size: str, name: str) -> dict[str, Any]:
    """Peak bytes of a process in four updates of a side, beyond its memory after imports."""
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
    """Run this file on all processes and return the results of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PROCESSES), __file__, *arguments]
    completed = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    (line,) = (line for line in completed.stdout.splitlines() if line.startswith('{"'))
    results: dict[str, Any] = json.loads(line)
    return results


def main() -> int:
    """Print the results; exit with 1 if ours is slower or larger than its peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="timed updates per side")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--weigh", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        results = (
            peak_memory(options.folder, options.size, options.weigh)
            if options.weigh
            else compare(options.folder, options.size, options.steps)
        )
        if os.environ["RANK"] == "0":
            print(json.dumps(results), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(model_config(options.size)).save_pretrained(folder)
        common = ("--size", options.size, "--steps", str(options.steps), "--folder", folder)
        times = launch(*common)
        print(f"torch {torch.__version__}, {platform.machine()}, {PROCESSES} processes")
        print(json.dumps(times))
        memory = {name: launch(*common, "--weigh", name)["mib"] for name in SIDES}
    print(json.dumps({"mib": memory}))
    slow = any(times[f"processor_{a}_to_{b}"] > LIMIT + NOISE for a, b in PEERS.items())
    return int(slow or any(memory[a] > memory[b] * (LIMIT + NOISE) for a, b in PEERS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
