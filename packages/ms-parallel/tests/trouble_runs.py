"""Trainer runs with planted bad batches, for `run_processes`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import FROM_RAW_TEXT, MODEL, RUN
from torch import Tensor

from ms_parallel import DistributedTrainer, NextTokenLoss, ParallelError
from ms_parallel.engine.loss import Output
from ms_parallel.models.batch import Batch
from ms_parallel.split.part import gather_full_tensor
from ms_parallel.training import run as runs
from ms_parallel.training.read_ahead import ReadAhead

SETTINGS: dict[str, Any] = {
    **{n: value for n, value in RUN.items() if n != "steps" and n not in FROM_RAW_TEXT},
    "model_config": MODEL,
    "progress": False,
    "checkpoint_every": 3,
}


class ScaledLoss(NextTokenLoss):
    """Loss multiplied by a factor that all processes of a batch know."""

    factor = 1.0

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """The loss times the factor."""
        return super().__call__(output, batch) * self.factor


@contextmanager
def planting(factors: Mapping[int, float]) -> Iterator[None]:
    """Multiply the losses of some batches, numbered from 1 in data order."""
    next_batch, loss = ReadAhead.__next__, runs.NextTokenLoss

    def planted(self: ReadAhead) -> Any:
        batch = next_batch(self)
        index = self.state_dict()["consumed_samples"] // SETTINGS["batch_size"]
        ScaledLoss.factor = factors.get(index, 1.0)
        return batch

    ReadAhead.__next__ = planted  # type: ignore[method-assign]
    runs.NextTokenLoss = ScaledLoss  # type: ignore[misc]
    try:
        yield
    finally:
        ReadAhead.__next__ = next_batch  # type: ignore[method-assign]
        runs.NextTokenLoss = loss  # type: ignore[misc]


def run_with_faults(
    shards: str | Path, output: str | Path, planted: Mapping[int, float], **settings: Any
) -> dict[str, Any]:
    """Results and events of a run with planted batches; `fails_at` is a step where it crashes."""
    events: list[tuple[str, dict[str, Any]]] = []
    fails_at, steps = settings.pop("fails_at", None), settings.pop("steps", 12)

    def on_event(event: str, fields: Mapping[str, Any]) -> None:
        events.append((event, dict(fields)))
        if (
            event == "step"
            and fields["step"] == fails_at
            and any(name == "skipped" for name, _ in events)
        ):
            raise OSError("a crash of this test")

    window = {"spike_window": 4} if "on_spike" in settings else {}
    trainer = DistributedTrainer(
        **{**SETTINGS, "output_dir": output, "on_event": on_event, **window, **settings}
    )
    error_text = ""
    with planting(planted):
        try:
            trainer.train(shards, steps=steps)
        except (ParallelError, OSError) as error:
            error_text = f"{type(error).__name__}: {error}"
    run = trainer._run
    assert run is not None
    return {
        "error": error_text,
        "skipped": [fields for event, fields in events if event == "skipped"],
        "steps": [[fields["step"], fields["loss"]] for event, fields in events if event == "step"],
        "updates": run.engine.optimizer.update_count,
        "counts": run.progress.skipped,
        "rolled_back": run.progress.rolled_back,
        "weights": {
            name: gather_full_tensor(parameter.detach()).double().norm().item()
            for name, parameter in run.engine.parameters.items()
        },
    }


def run_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run each job; its planted batches are a list of pairs."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        planted = dict(job.pop("planted"))
        results.append(run_with_faults(planted=planted, **job))
        if dist.is_initialized():
            dist.barrier()
    return results
