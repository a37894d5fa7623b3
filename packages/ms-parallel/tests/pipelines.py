"""Pipelines of unusual shape, for `run_processes`."""

import weakref
from typing import Any

import torch
from runs import build, evaluation_results, global_batch, local_rows, train
from torch import Tensor, nn

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.schedules import Schedule

FOUR = {"num_hidden_layers": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}


def tables(texts: list[str], steps: int) -> list[dict[str, Any]]:
    """Curves and evaluation results under each table; an empty text is 1F1B."""
    torch.set_num_threads(1)
    results = []
    for text in texts:
        schedule: Any = Schedule.from_csv(text) if text else "1f1b"
        ranks = schedule.ranks if text else 1
        groups = connect(Layout(pipeline=ranks), device="cpu", timeout_s=60)
        engine = build(FOUR, groups, schedule=schedule, microbatch_size=1)
        results.append({"curve": train(engine, steps), **evaluation_results(engine)})
    return results


def train_schedules(schedules: list[str], steps: int) -> list[dict[str, Any]]:
    """Curves and evaluation results of each schedule, with microbatches of three rows and one."""
    torch.set_num_threads(1)
    results = []
    for name in schedules:
        groups = connect(Layout(pipeline=2 if name != "single" else 1), device="cpu", timeout_s=60)
        # DualPipeV needs four microbatches for training; the evaluation is uneven for it, too.
        engine = build(FOUR, groups, schedule="1f1b" if name == "single" else name)
        engine.runner.microbatch_size = 1 if name == "dualpipe-v" else 3
        curve = train(engine, steps)
        engine.runner.microbatch_size = 3
        results.append({"curve": curve, **evaluation_results(engine)})
    return results


def losses(layout: str, steps: int) -> list[float]:
    """Losses of global batches with twelve rows, with four microbatches if there are stages."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=120)
    size = 3 if groups.layout.pipeline > 1 else None
    engine = build(FOUR, groups, microbatch_size=size)
    batches = (local_rows(global_batch(step, rows=12), groups) for step in range(steps))
    return [engine.step(batch, NextTokenLoss()).loss for batch in batches]


def max_live_microbatches(schedule: str) -> int:
    """Maximum number of microbatches with live activations on this rank, of eight."""
    groups = connect(Layout(pipeline=2), device="cpu", timeout_s=60)
    engine = build(FOUR, groups, schedule=schedule, microbatch_size=1)
    (stage,) = engine.stages.values()
    layers = stage.model.get_submodule("layers")
    alive: list[weakref.ref[Tensor]] = []
    maximum = 0

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> None:
        nonlocal maximum
        alive.append(weakref.ref(output))  # the next block's norm saves it for the backward pass
        maximum = max(maximum, sum(entry() is not None for entry in alive))

    next(iter(layers.children())).register_forward_hook(watch)
    engine.step(global_batch(0, rows=8), NextTokenLoss())
    return maximum
