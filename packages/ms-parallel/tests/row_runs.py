"""Runs in which ranks get the rows of other ranks, for `run_processes`."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from runs import VOCABULARY, build, global_batch, local_rows, token_losses
from torch import Tensor

from ms_data import TokenStream
from ms_parallel import NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ConfigError
from ms_parallel.planner.layouts.messages import MessageLog
from ms_parallel.split.part import local_part


def engine(layout: str, **options: Any) -> Engine:
    """An engine of the tiny model under a layout."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=60)
    return build({"num_key_value_heads": 4}, groups, **options)


def refusal(call: Callable[[], object]) -> str:
    """Message of a refusal; empty if the call passes."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def weights(model: Engine) -> list[Tensor]:
    """Copies of this rank's weights."""
    return [local_part(value).detach().clone() for value in model.parameters.values()]


def updates(
    layout: str, steps: list[list[int]], rows: int, *, copies: int = 1, **options: Any
) -> list[Any]:
    """Update a model per step; `steps` has each rank's batch number, one list per step.

    Returns:
        A pair per step: the refusal, and whether the weights changed.
    """
    model = engine(layout, **options)
    results = []
    for numbers in steps:
        batch = global_batch(numbers[dist.get_rank()], rows=rows)
        batch = {name: value.repeat(copies, 1) for name, value in batch.items()}
        before = weights(model)
        text = refusal(lambda batch=batch: model.step(batch, NextTokenLoss()))
        changed = not all(map(torch.equal, before, weights(model)))
        results.append([text, changed])
    return results


def within(layout: str, **options: Any) -> dict[str, Any]:
    """Refusals of every call that takes rows, if two ranks of a data rank pass different ones."""
    model = engine(layout, **options)
    same = local_rows(global_batch(0), model.groups)
    other = local_rows(global_batch(dist.get_rank()), model.groups)
    results: dict[str, Any] = {
        "first": refusal(lambda: model.step(other, NextTokenLoss())),
        "same": refusal(lambda: model.step(same, NextTokenLoss())),
    }
    before = weights(model)
    results["later"] = refusal(lambda: model.step(other, NextTokenLoss()))
    results["evaluate"] = refusal(lambda: model.evaluate(other, token_losses))
    prompts = [[5 + dist.get_rank()], [7]]
    results["generate"] = refusal(lambda: model.generate(prompts, max_new_tokens=2))
    results["unchanged"] = all(map(torch.equal, before, weights(model)))
    after = [
        refusal(lambda: model.step(same, NextTokenLoss())),
        refusal(lambda: model.evaluate(same, token_losses)),
        refusal(lambda: model.generate([[5], [7]], max_new_tokens=2)),
    ]
    results["after"] = after
    return results


def streams(folder: str) -> list[str]:
    """Refusals of first updates from a `TokenStream`, without and with the data rank's place."""
    results = []
    for placed in (False, True):
        model = engine("data=2")
        place = model.groups.place if placed else None
        batch = next(TokenStream(folder, sequence_length=16, batch_size=4, place=place))
        rows = {name: np.asarray(value) for name, value in batch.items()}
        for name in ("tokens", "targets"):  # into the tiny model's vocabulary
            rows[name] = np.where(rows[name] < 0, rows[name], rows[name] % VOCABULARY)
        results.append(refusal(lambda model=model, rows=rows: model.step(rows, NextTokenLoss())))
    return results


def messages(layout: str, **options: Any) -> list[dict[str, int]]:
    """Collectives of three updates on this rank, by kind."""
    model = engine(layout, **options)
    steps = []
    for step in range(3):
        batch = local_rows(global_batch(step), model.groups)
        with MessageLog() as log:
            model.step(batch, NextTokenLoss())
        kinds: Counter[str] = Counter()
        for message, count in log.messages.items():
            kinds[message.kind] += count
        steps.append(dict(kinds))
    return steps


def refusals_of_padding(layout: str) -> list[str]:
    """Refusals of updates with only padding on all data ranks but the first, and on all."""
    model = engine(layout)
    results = []
    for empty in (model.data_rank > 0, True):
        batch = global_batch(0)
        if empty:
            batch["targets"].fill_(-100)
        results.append(refusal(lambda batch=batch: model.step(batch, NextTokenLoss())))
    return results
