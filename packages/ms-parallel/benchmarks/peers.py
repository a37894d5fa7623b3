"""A step of our pipeline runtime beside torch.distributed.pipelining's, in the same processes.

    python packages/ms-parallel/benchmarks/peers.py            # two processes, all schedules
    python packages/ms-parallel/benchmarks/peers.py --steps 40 --size medium

Both perform one table of actions on modules of the same classes and weights, with the same loss, on
the same microbatches: forwards and backwards, no optimizer. Losses and all gradients are compared
before anything is timed. Steps alternate, and a figure is the median ratio of neighbors, ours over
theirs: of the wall clock between two barriers, and of the processor time of both processes, which
other work on the machine touches less. Memory is the most that torch's allocator holds from the
making of a fresh runtime to the end of its second step, weights apart, as the profiler's record of
allocations tells, of the larger process: what a runtime keeps between steps counts too.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

from ms_parallel import operators as ops
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.output import HeadOutput
from ms_parallel.models import DecoderConfig, build_model
from ms_parallel.pipeline.runtime import Runtime
from ms_parallel.schedules import Schedule, gpipe, one_f_one_b
from ms_parallel.split.part import local_part
from ms_parallel.split.stages import cut_layers
from ms_parallel.weights import initialize

PROCESSES = 2
LIMIT = 1.0
"""Most that the median ratio of processor time, or the ratio of memory, may be..."""
NOISE = 0.02
"""...and by how much runs of one program on a shared machine differ."""
SIZES = {"small": (8, 128, 64, 2048, 2), "medium": (8, 256, 128, 4096, 2)}
"""Layers, hidden size, sequence length, vocabulary, rows of a microbatch."""
MICROBATCHES = 8
CASES: dict[str, tuple[Any, int]] = {
    "GPipe": (schedules.ScheduleGPipe, 1),
    "1F1B": (schedules.Schedule1F1B, 1),
    "interleaved 1F1B": (schedules.ScheduleInterleaved1F1B, 2),
    "looped BFS": (schedules.ScheduleLoopedBFS, 2),
    "interleaved ZB": (schedules.ScheduleInterleavedZeroBubble, 2),
    "ZBV": (schedules.ScheduleZBVZeroBubble, 2),
    "DualPipeV": (schedules.ScheduleDualPipeV, 2),
}
"""torch's class, and stages a rank."""
VEES = ("ZBV", "DualPipeV")


class Stage(nn.Module):
    """A stage as torch's runtime calls it: one tensor in, one out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states to hidden states."""
        hidden: Tensor = self.model(x, logits=False)
        return hidden


class Peer:
    """torch.distributed.pipelining on stages of the same model."""

    def __init__(self, name: str, config: DecoderConfig, groups: Groups, weight: float) -> None:
        kind, each = CASES[name]
        rank, stages = groups.place.pipeline, PROCESSES * each
        homes = [rank + PROCESSES * turn for turn in range(each)]
        if name in VEES:
            homes = [rank, stages - 1 - rank]
        layers = cut_layers(config.num_hidden_layers, stages, range(config.num_hidden_layers))
        self.modules: dict[int, nn.Module] = {}
        for stage in homes:
            first, last = stage == 0, stage == stages - 1
            module = build_model(config, layers=layers[stage], first=first, last=last)
            initialize(module, 0)
            self.modules[stage] = module

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            head = self.modules[stages - 1].head_weight
            return (
                HeadOutput(hidden, head, ops, groups, {}, split=False).token_losses(targets).sum()
                / weight
            )

        def runtime() -> Any:
            made = [
                PipelineStage(Stage(module), stage, stages, groups.device)
                for stage, module in self.modules.items()
            ]
            several = made if each > 1 else made[0]
            return kind(several, MICROBATCHES, loss_fn=loss, scale_grads=False)

        self.runtime = runtime
        self.schedule = runtime()
        self.first, self.last = 0 in homes, stages - 1 in homes

    def table(self) -> Schedule | None:
        """The table that its class plans; None where it has one stage a rank."""
        order = getattr(self.schedule, "pipeline_order", None)
        if order is None or len(self.modules) == 1:
            return None
        rows = [",".join(str(a) for a in order[rank] if a) for rank in range(PROCESSES)]
        return Schedule.from_csv("\n".join(rows), name="torch's")

    def step(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Forwards and backwards; the losses of the last stage."""
        losses: list[Tensor] = []
        self.schedule.step(
            *((batch["tokens"],) if self.first else ()),
            target=batch["targets"] if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        return losses

    def renew(self) -> None:
        """Begin with a fresh runtime."""
        self.schedule = self.runtime()

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, of this process's stages."""
        return {n: p for module in self.modules.values() for n, p in module.named_parameters()}


class Ours:
    """`Engine` under the same table."""

    def __init__(
        self, name: str, config: DecoderConfig, groups: Groups, table: Schedule | None, rows: int
    ) -> None:
        made = {"GPipe": gpipe, "1F1B": one_f_one_b}
        schedule = table or made[name](PROCESSES, MICROBATCHES)
        self.engine = Engine(config, groups=groups, schedule=schedule, microbatch_size=rows)
        self.rows = rows
        self.loss = NextTokenLoss()

    def step(self, batch: dict[str, Tensor], weight: float) -> None:
        """Run a step's forwards and backwards."""
        cut = {name: value.split(self.rows) for name, value in batch.items()}
        microbatches = [
            {name: parts[index] for name, parts in cut.items()} for index in range(MICROBATCHES)
        ]
        self.engine.runner.forward_backward(microbatches, self.loss, weight, self.engine.reduction)

    def renew(self) -> None:
        """Begin with a fresh runtime."""
        runner = self.engine.runner
        runner.runtime = Runtime(self.engine.stages, self.engine.groups, runner.runtime.calls)


def compare(name: str, size: str, steps: int) -> dict[str, Any]:
    """Check that both compute the same, then time and weigh them in turn."""
    layers, hidden, length, vocabulary, rows = SIZES[size]
    config = DecoderConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        head_dim=hidden // 4,
    )  # fmt: skip
    groups = connect(Layout(pipeline=PROCESSES), device="cpu", timeout_s=120)
    text = torch.randint(
        0, vocabulary, (MICROBATCHES * rows, length + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    weight = float(batch["targets"].numel())
    peer = Peer(name, config, groups, weight)
    ours = Ours(name, config, groups, peer.table(), rows)
    sides: list[tuple[Callable[[], list[Tensor]], dict[str, Any]]] = [
        (lambda: ours.step(batch, weight), dict(ours.engine.parameters)),
        (lambda: peer.step(batch), dict(peer.parameters())),
    ]
    check(sides)
    walls, works = alternate(sides, steps)
    peaks = [weigh(*side, one.renew) for side, one in zip(sides, (ours, peer), strict=True)]
    totals = torch.tensor([*works[0], *works[1]], dtype=torch.float64)
    dist.all_reduce(totals)
    most = torch.tensor(peaks, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    own, other = totals[:steps], totals[steps:]
    return {
        "schedule": name,
        "ours_ms": 1e3 * median(walls[0]),
        "torch_ms": 1e3 * median(walls[1]),
        "wall": median(a / b for a, b in zip(*walls, strict=True)),
        "processor": float((own / other).median()),
        "ours_mib": float(most[0]) / 2**20,
        "torch_mib": float(most[1]) / 2**20,
        "memory": float(most[0] / most[1]),
    }


def check(sides: list[tuple[Callable[[], list[Tensor]], dict[str, Any]]]) -> None:
    """Losses and gradients agree to float32's last digits; the second step is checked too."""
    for _ in range(2):
        losses, gradients = [], []
        for step, parameters in sides:
            found = step()
            losses.append(float(torch.stack(list(found)).detach().sum()) if found else 0.0)
            gradients.append({n: local_part(p.grad).clone() for n, p in parameters.items()})
            clear(parameters)
        apart = max(
            float((gradients[0][n] - g).abs().max() / g.abs().max())
            for n, g in gradients[1].items()
        )
        if abs(losses[0] - losses[1]) > 1e-5 * abs(losses[1]) or apart > 1e-4:
            raise SystemExit(f"losses {losses} or gradients ({apart:.1e} apart) differ")


def clear(parameters: dict[str, Any]) -> None:
    """Let gradients go."""
    for parameter in parameters.values():
        parameter.grad = None


def alternate(
    sides: list[tuple[Callable[[], list[Tensor]], dict[str, Any]]], steps: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of the wall clock and of this process's processor, of each side."""
    walls: list[list[float]] = [[], []]
    works: list[list[float]] = [[], []]
    for index in range(steps):
        for which in (0, 1) if index % 2 else (1, 0):
            step, parameters = sides[which]
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            step()
            works[which].append(time.process_time() - spent)
            dist.barrier()
            walls[which].append(time.perf_counter() - began)
            clear(parameters)
    return walls, works


def weigh(
    step: Callable[[], list[Tensor]], parameters: dict[str, Any], renew: Callable[[], None]
) -> int:
    """Most bytes held by a fresh runtime in two steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        renew()
        step()
        clear(parameters)
        step()
    held = most = 0
    told = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(told, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    clear(parameters)
    return most


def worker(arguments: argparse.Namespace) -> None:
    """One of the processes; the first tells what was found."""
    torch.set_num_threads(1)
    for name in arguments.schedule or CASES:
        found = compare(name, arguments.size, arguments.steps)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)


def main() -> int:
    """Print a line a schedule, and fail where a ratio is above the limit by more than noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--schedule", action="append", choices=CASES, help="default: all")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PROCESSES), __file__, *sys.argv[1:]]
    told = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    if arguments.json:
        print(json.dumps(found))
    else:
        print(f"torch {torch.__version__}, {platform.machine()}, {PROCESSES} processes")
        for row in found:
            print(
                f"{row['schedule']:17} ours {row['ours_ms']:8.1f} ms  torch {row['torch_ms']:8.1f} "
                f"ms  wall {row['wall']:.3f}  processor {row['processor']:.3f}  memory "
                f"{row['ours_mib']:6.1f} / {row['torch_mib']:6.1f} MiB = {row['memory']:.3f}"
            )
    slow = any(row["processor"] > LIMIT + NOISE for row in found)
    return int(slow or any(round(row["memory"], 3) > LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
