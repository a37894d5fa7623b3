"""A step of our pipeline runtime compared with torch.distributed.pipelining's.

    python packages/ms-parallel/benchmarks/peers.py            # two processes, all schedules
    python packages/ms-parallel/benchmarks/peers.py --steps 40 --size medium

Both run the same table of actions in the same processes, on modules of the same classes and
weights, with the same loss and microbatches: forward and backward passes without an optimizer.
Losses and all gradients are compared before anything is timed. Steps alternate, and a figure is the
median ratio of neighboring steps, ours over theirs: of the wall-clock time between two barriers,
and of the CPU time of both processes, which other load affects less. Memory is the peak of torch's
allocator, without weights, from the creation of a new runtime to the end of its second step, in the
larger process, from the profiler's allocation events. It includes buffers kept between steps.
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
"""Limit of the median ratio of CPU time, and of the ratio of memory..."""
NOISE = 0.02
"""...and the difference between runs of one program on a shared machine."""
SIZES = {"small": (8, 128, 64, 2048, 2), "medium": (8, 256, 128, 4096, 2)}
"""Layers, hidden size, sequence length, vocabulary, rows per microbatch."""
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
"""Class of torch, and stages per rank."""
VEES = ("ZBV", "DualPipeV")


class Stage(nn.Module):
    """A stage with the interface of torch's runtime: one tensor in, one out."""

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
        schedule_class, stages_per_rank = CASES[name]
        rank, stages = groups.place.pipeline, PROCESSES * stages_per_rank
        local_stages = [rank + PROCESSES * loop for loop in range(stages_per_rank)]
        if name in VEES:
            local_stages = [rank, stages - 1 - rank]
        layers = cut_layers(config.num_hidden_layers, stages, range(config.num_hidden_layers))
        self.modules: dict[int, nn.Module] = {}
        for stage in local_stages:
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
            pipeline_stages = [
                PipelineStage(Stage(module), stage, stages, groups.device)
                for stage, module in self.modules.items()
            ]
            argument = pipeline_stages if stages_per_rank > 1 else pipeline_stages[0]
            return schedule_class(argument, MICROBATCHES, loss_fn=loss, scale_grads=False)

        self.runtime = runtime
        self.schedule = runtime()
        self.first, self.last = 0 in local_stages, stages - 1 in local_stages

    def table(self) -> Schedule | None:
        """The table planned by its class; None with one stage per rank."""
        order = getattr(self.schedule, "pipeline_order", None)
        if order is None or len(self.modules) == 1:
            return None
        rows = [",".join(str(a) for a in order[rank] if a) for rank in range(PROCESSES)]
        return Schedule.from_csv("\n".join(rows), name="torch's")

    def step(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Run forward and backward passes; return the losses of the last stage."""
        losses: list[Tensor] = []
        self.schedule.step(
            *((batch["tokens"],) if self.first else ()),
            target=batch["targets"] if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        return losses

    def renew(self) -> None:
        """Create a new runtime."""
        self.schedule = self.runtime()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this process's stages by name."""
        return {n: p for module in self.modules.values() for n, p in module.named_parameters()}


class Ours:
    """`Engine` with the same table."""

    def __init__(
        self, name: str, config: DecoderConfig, groups: Groups, table: Schedule | None, rows: int
    ) -> None:
        generators = {"GPipe": gpipe, "1F1B": one_f_one_b}
        schedule = table or generators[name](PROCESSES, MICROBATCHES)
        self.engine = Engine(config, groups=groups, schedule=schedule, microbatch_size=rows)
        self.rows = rows
        self.loss = NextTokenLoss()

    def step(self, batch: dict[str, Tensor], weight: float) -> None:
        """Run the forward and backward passes of a step."""
        cut = {name: value.split(self.rows) for name, value in batch.items()}
        microbatches = [
            {name: parts[index] for name, parts in cut.items()} for index in range(MICROBATCHES)
        ]
        self.engine.runner.forward_backward(microbatches, self.loss, weight, self.engine.reduction)

    def renew(self) -> None:
        """Create a new runtime."""
        runner = self.engine.runner
        runner.runtime = Runtime(self.engine.stages, self.engine.groups, runner.runtime.calls)


def compare(name: str, size: str, steps: int) -> dict[str, Any]:
    """Check that both compute the same, then compare times and memory."""
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
    peaks = [
        peak_memory(*side, owner.renew) for side, owner in zip(sides, (ours, peer), strict=True)
    ]
    totals = torch.tensor([*works[0], *works[1]], dtype=torch.float64)
    dist.all_reduce(totals)
    peak = torch.tensor(peaks, dtype=torch.float64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    our_cpu, torch_cpu = totals[:steps], totals[steps:]
    return {
        "schedule": name,
        "ours_ms": 1e3 * median(walls[0]),
        "torch_ms": 1e3 * median(walls[1]),
        "wall": median(a / b for a, b in zip(*walls, strict=True)),
        "processor": float((our_cpu / torch_cpu).median()),
        "ours_mib": float(peak[0]) / 2**20,
        "torch_mib": float(peak[1]) / 2**20,
        "memory": float(peak[0] / peak[1]),
    }


def check(sides: list[tuple[Callable[[], list[Tensor]], dict[str, Any]]]) -> None:
    """Check that losses and gradients of two steps agree to float32's last digits."""
    for _ in range(2):
        losses, gradients = [], []
        for step, parameters in sides:
            step_losses = step()
            losses.append(
                float(torch.stack(list(step_losses)).detach().sum()) if step_losses else 0.0
            )
            gradients.append({n: local_part(p.grad).clone() for n, p in parameters.items()})
            clear(parameters)
        difference = max(
            float((gradients[0][n] - g).abs().max() / g.abs().max())
            for n, g in gradients[1].items()
        )
        if abs(losses[0] - losses[1]) > 1e-5 * abs(losses[1]) or difference > 1e-4:
            raise SystemExit(f"losses {losses} or gradients ({difference:.1e} apart) differ")


def clear(parameters: dict[str, Any]) -> None:
    """Discard gradients."""
    for parameter in parameters.values():
        parameter.grad = None


def alternate(
    sides: list[tuple[Callable[[], list[Tensor]], dict[str, Any]]], steps: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Wall-clock seconds, and CPU seconds of this process, of each side."""
    walls: list[list[float]] = [[], []]
    works: list[list[float]] = [[], []]
    for index in range(steps):
        for which in (0, 1) if index % 2 else (1, 0):
            step, parameters = sides[which]
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            works[which].append(time.process_time() - cpu_start)
            dist.barrier()
            walls[which].append(time.perf_counter() - start)
            clear(parameters)
    return walls, works


def peak_memory(
    step: Callable[[], list[Tensor]], parameters: dict[str, Any], renew: Callable[[], None]
) -> int:
    """Peak bytes of a new runtime in two steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        renew()
        step()
        clear(parameters)
        step()
    current = peak = 0
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    clear(parameters)
    return peak


def worker(arguments: argparse.Namespace) -> None:
    """Run the cases in this process; rank 0 prints the results."""
    torch.set_num_threads(1)
    for name in arguments.schedule or CASES:
        result = compare(name, arguments.size, arguments.steps)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)


def main() -> int:
    """Print a line per schedule; exit with 1 if a ratio exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="timed steps per side")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--schedule", action="append", choices=CASES, help="default: all")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PROCESSES), __file__, *sys.argv[1:]]
    completed = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    results = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    if arguments.json:
        print(json.dumps(results))
    else:
        print(f"torch {torch.__version__}, {platform.machine()}, {PROCESSES} processes")
        for row in results:
            print(
                f"{row['schedule']:17} ours {row['ours_ms']:8.1f} ms  torch {row['torch_ms']:8.1f} "
                f"ms  wall {row['wall']:.3f}  processor {row['processor']:.3f}  memory "
                f"{row['ours_mib']:6.1f} / {row['torch_mib']:6.1f} MiB = {row['memory']:.3f}"
            )
    slow = any(row["processor"] > LIMIT + NOISE for row in results)
    return int(slow or any(round(row["memory"], 3) > LIMIT for row in results))


if __name__ == "__main__":
    raise SystemExit(main())
