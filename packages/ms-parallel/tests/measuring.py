"""Schedules searched by measurement, for `run_processes`."""

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import MODEL, RUN
from runs import build, global_batch, local_rows, tiny, train

from ms_parallel import DistributedTrainer
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.pipeline.recorder import offset_ns, recorded_step
from ms_parallel.pipeline.step_file import write_step
from ms_parallel.planner.tuning import measure_segments, search_schedule
from ms_parallel.schedules import SegmentCosts

SETTINGS = {"num_hidden_layers": 6, "num_key_value_heads": 4, "vocab_size": 48}


def search_and_train(layout: str, steps: int) -> dict[str, Any]:
    """A searched schedule, results with it, and whether random state was left unchanged."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=120)
    before = torch.random.get_rng_state()
    result = search_schedule(
        tiny(**SETTINGS), groups, rows=4, sequence_length=16, microbatch_size=1
    )
    rng_unchanged = torch.equal(before, torch.random.get_rng_state())
    engine = build(SETTINGS, groups, schedule=result.staged, microbatch_size=1)
    batches = (
        local_rows(global_batch(step, 4 * groups.layout.data), groups) for step in range(steps)
    )
    losses = [engine.step(batch, NextTokenLoss()).loss for batch in batches]
    evaluated = engine.evaluate(
        local_rows(global_batch(9, 4 * groups.layout.data), groups), token_losses
    )
    generated = engine.generate([[3, 5, 7]], max_new_tokens=3, temperature=0.0)
    return {
        "table": result.table,
        "layers": result.layers,
        "conditions": result.conditions,
        "costs": {name: list(values) for name, values in result.costs.items()},
        "digest": hashlib.sha256(repr(result).encode()).hexdigest(),
        "rng_unchanged": rng_unchanged,
        "losses": losses,
        "evaluated": float(evaluated.sum()),
        "generated": generated,
    }


def token_losses(output: Any, batch: Any) -> Any:
    """Token losses of a batch, for an evaluation."""
    return output.token_losses(batch["targets"])


def one_process(rows: int, steps: int) -> list[float]:
    """Losses of the same model on the same rows in one process."""
    torch.set_num_threads(1)
    engine = build(SETTINGS, connect(Layout(), device="cpu"), microbatch_size=1)
    batches = (global_batch(step, rows) for step in range(steps))
    return [engine.step(batch, NextTokenLoss()).loss for batch in batches]


def layer_facts(recompute: str) -> dict[str, list[float]]:
    """Measured bytes and times of each layer, in one process."""
    torch.set_num_threads(1)
    sizes = {**SETTINGS, "hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
    config = tiny(**sizes)
    groups = connect(Layout(), device="cpu")
    costs: SegmentCosts = measure_segments(
        config, groups, rows=2, sequence_length=64, recompute=recompute
    )
    names = ("forward", "backward_input", "backward_weight", "activation", "retained")
    return {name: [float(value) for value in getattr(costs, name)] for name in names}


def record_update(schedule: str, path: str, shift_ns: int) -> dict[str, Any]:
    """Times of a recorded update, whether its loss is unchanged, and the measured clock offset."""
    torch.set_num_threads(1)
    groups = connect(Layout(pipeline=2), device="cpu", timeout_s=60)
    engine = build(SETTINGS, groups, schedule=schedule, microbatch_size=2)
    plain = train(build(SETTINGS, groups, schedule=schedule, microbatch_size=2), 1)[0][0]
    update, recorder = engine.record_step(global_batch(0), NextTokenLoss())
    step = recorded_step(recorder, engine.groups, 0)
    assert step is not None
    if groups.place.pipeline == 0:
        write_step(Path(path), step)
    delay = shift_ns if groups.place.pipeline else 0
    return {
        "same loss": update.loss == plain,
        "times": [list(map(list, row)) for row in step.times_ns],
        "offset": offset_ns(groups, lambda: time.monotonic_ns() - delay),
    }


def stop_and_resume(corpus: str, folder: str) -> dict[str, Any]:
    """Compare a stopped and resumed run with an uninterrupted one under the same schedule."""
    torch.set_num_threads(1)
    connect(Layout(pipeline=2), device="cpu", timeout_s=120)
    settings: dict[str, Any] = {
        **{name: value for name, value in RUN.items() if name != "steps"},
        "model_config": {**MODEL, "num_hidden_layers": 4},
        "parallel_config": {"pipeline": 2},
        "schedule": "search",
        "record_every": 2,
        "progress": False,
    }
    stopped, uninterrupted = Path(folder, "broken"), Path(folder, "uninterrupted")
    first = DistributedTrainer(**settings, output_dir=stopped, on_event=_stop_at(3))
    assert not first.train(corpus, steps=6).finished
    first_schedule = (stopped / "schedule.json").read_bytes()
    DistributedTrainer(**settings, output_dir=stopped).train(corpus, steps=6)
    if not dist.get_rank():
        uninterrupted.mkdir()
        (uninterrupted / "schedule.json").write_bytes(first_schedule)
    dist.barrier()
    DistributedTrainer(**settings, output_dir=uninterrupted).train(corpus, steps=6)
    return {
        "same schedule": (stopped / "schedule.json").read_bytes() == first_schedule,
        "same bits": _weights(stopped) == _weights(uninterrupted),
        "recordings": sorted(path.name for path in (uninterrupted / "timelines").iterdir()),
    }


def _stop_at(step: int) -> Any:
    def on_event(event: str, fields: Any) -> None:
        if event == "step" and fields["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_event


def _weights(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors"))]
