"""Pipelines of uncommon shape; called by `run_processes`."""

import weakref
from typing import Any

import torch
from runs import answers, build, global_batch, local_rows, train
from torch import Tensor, nn

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.schedules import Schedule

FOUR = {"num_hidden_layers": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}


def tables(texts: list[str], steps: int) -> list[dict[str, Any]]:
    """Curves and answers under each table; an empty text is 1F1B."""
    torch.set_num_threads(1)
    found = []
    for text in texts:
        schedule: Any = Schedule.from_csv(text) if text else "1f1b"
        ranks = schedule.ranks if text else 1
        groups = connect(Layout(pipeline=ranks), device="cpu", timeout_s=60)
        engine = build(FOUR, groups, schedule=schedule, microbatch_size=1)
        found.append({"curve": train(engine, steps), **answers(engine)})
    return found


def under(schedules: list[str], steps: int) -> list[dict[str, Any]]:
    """Curves and answers under each generator, of four rows that pass as three and one."""
    torch.set_num_threads(1)
    found = []
    for name in schedules:
        groups = connect(Layout(pipeline=2 if name != "alone" else 1), device="cpu", timeout_s=60)
        # DualPipeV wants four microbatches; what is asked of it afterwards is uneven all the same.
        engine = build(FOUR, groups, schedule="1f1b" if name == "alone" else name)
        engine.runner.microbatch_size = 1 if name == "dualpipe-v" else 3
        curve = train(engine, steps)
        engine.runner.microbatch_size = 3
        found.append({"curve": curve, **answers(engine)})
    return found


def losses(layout: str, steps: int) -> list[float]:
    """Losses of global batches of twelve rows; four microbatches where there are stages."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=120)
    size = 3 if groups.layout.pipeline > 1 else None
    engine = build(FOUR, groups, microbatch_size=size)
    batches = (local_rows(global_batch(step, rows=12), groups) for step in range(steps))
    return [engine.step(batch, NextTokenLoss()).loss for batch in batches]


def most_held(schedule: str) -> int:
    """Most microbatches whose activations are alive at once on this rank, of eight."""
    groups = connect(Layout(pipeline=2), device="cpu", timeout_s=60)
    engine = build(FOUR, groups, schedule=schedule, microbatch_size=1)
    (stage,) = engine.stages.values()
    layers = stage.model.get_submodule("layers")
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(output))  # the next block's norm keeps it for the backward
        most = max(most, sum(entry() is not None for entry in alive))

    next(iter(layers.children())).register_forward_hook(watch)
    engine.step(global_batch(0, rows=8), NextTokenLoss())
    return most
