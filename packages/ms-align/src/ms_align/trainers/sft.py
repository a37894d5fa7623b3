"""Instruction tuning: chosen tokens, weighted by token, sample and task, tasks by difficulty."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.engines.protocol import Engine, StepReport
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.losses.learnt_weights import Uncertainty
from ms_align.losses.protocol import Batch, Output
from ms_align.losses.sft import SFTLoss, token_weights
from ms_align.run.initial_weights import frozen_checksum
from ms_align.run.loop import RunLog
from ms_align.settings import flag, number, numbers, one_of, whole
from ms_align.streams.folders import instructions
from ms_align.streams.protocol import HeldOut, TaskStream, next_batch
from ms_align.streams.task_sampler import TaskOptions, TaskSampler, task_options
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.frame.offline import OfflineLearner, OfflineTrainer, TrainingData


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class SFTOptions:
    """How losses are weighted and tasks are chosen."""

    task_weights: Mapping[str, float] = field(factory=dict, validator=numbers())
    """Factor of each task's loss; empty for 1."""
    uncertainty: bool = field(default=False, validator=flag)
    """Learn the factors instead (Kendall et al., 2018)."""
    uncertainty_rate: float = field(default=0.05, validator=number())
    """Step size of their log-variances."""
    tasks: TaskOptions | None = field(
        default=None,
        converter=task_options,
        metadata={"table": TaskOptions},
    )
    """Choose each row's task by its difficulty; None reads the stream as it comes."""

    def __attrs_post_init__(self) -> None:
        if self.task_weights and self.uncertainty:
            raise ConfigError("task_weights are given and uncertainty learns them; choose one")


@frozen(kw_only=True, slots=False)
class SFTTrainer(SFTOptions, OfflineTrainer):
    """Tune a model on instructions.

    `SFTTrainer(model=model, steps=100).train(dataset)`; every setting is a keyword, and nothing
    starts before `train`.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
    """

    algorithm = "sft"

    weights: dict[str, float] | None = field(default=None, validator=numbers(optional=True))
    """How often samples of each source are drawn; by default as many as each holds."""
    long: str = field(default="truncate", validator=one_of("truncate", "split"))
    """What becomes of a sample longer than a row."""
    open_rows: int = field(default=512, validator=whole(least=0))
    """Rows packed at a time for each source; 0 gives each sample a row of its own."""
    weighting: str = field(default="token", validator=one_of("token", "sample"))
    """What counts alike: each `token`, or each `sample`."""

    def __attrs_post_init__(self) -> None:
        SFTOptions.__attrs_post_init__(self)
        OfflineTrainer.__attrs_post_init__(self)
        if self.tasks is not None and self.steps is None:
            raise ConfigError("tasks are drawn without an end, so epochs mean nothing; give steps")

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that cannot change while a run goes on."""
        return ("seed", "uncertainty", "lora")

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "SFTLearner":
        """Build what learns from the rows."""
        return SFTLearner(engine, data, ends, self.part(SFTOptions), seed=self.seed)

    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the packed rows of a dataset's folders; held-out ones come as they are."""
        mixed: dict[str, Any] = {"weights": self.weights, "weighting": self.weighting}
        if settings.get("split") == "held_out":
            mixed = {"weights": None, "weighting": "token"}
        return instructions(
            dataset,
            engine,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            long=self.long,
            open_rows=self.open_rows,
            seed=self.seed,
            **{"epochs": None, **mixed, **settings},
        )

    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the batches in `epochs` passes over a dataset's folders."""
        return sum(1 for _ in self.stream(dataset, engine, epochs=self.epochs))


class SFTLearner(OfflineLearner):
    """Learns from rows of one task or several."""

    no_targets = (
        "the batch of step {step} has no target, so nothing would be learned; look at the loss "
        "mask: the chat template, or sequence_length, may cut all answers"
    )

    def __init__(
        self, engine: Engine, data: TrainingData, ends: TextEnds, options: SFTOptions, *, seed: int
    ) -> None:
        super().__init__(engine, data, ends)
        self.options = options
        self.names: tuple[str, ...] = tuple(getattr(data.stream, "names", ()))
        self._tasks = len(self.names) if len(self.names) > 1 else 0
        self.sampler = self._sampler(seed)
        self._probabilities: Sequence[float] = ()
        """With which the tasks of the last batch were drawn, where they were."""
        self.uncertainty: Uncertainty | None = None
        if options.uncertainty:
            self.uncertainty = Uncertainty(
                log_variances=[0.0] * self._tasks, rate=options.uncertainty_rate
            )
        self._factors = self._given_factors()
        self.identity = {
            "frozen_weights": frozen_checksum(engine),
            "tasks": ", ".join(self.names),
            "signal": options.tasks.signal if options.tasks else "",
        }

    def _sampler(self, seed: int) -> TaskSampler | None:
        if self.options.tasks is None:
            if self.options.uncertainty and not self._tasks:
                raise ConfigError("uncertainty weighs tasks, and the data has only one source")
            return None
        if not isinstance(self.data.stream, TaskStream) or len(self.names) < 2:
            raise ConfigError(
                "tasks are to be chosen by difficulty, and the data has only one; give two "
                "sources or more, by name"
            )
        return TaskSampler(self.names, self.options.tasks, seed=seed)

    def _given_factors(self) -> tuple[float, ...]:
        given = self.options.task_weights
        if not given:
            return ()
        if set(given) != set(self.names):
            raise ConfigError(
                f"task_weights are for {sorted(given)}; the data has {sorted(self.names)}"
            )
        return tuple(float(given[name]) for name in self.names)

    def _task_weights(self) -> tuple[float, ...]:
        return tuple(self.uncertainty.weights()) if self.uncertainty else self._factors

    def loss(self) -> SFTLoss:
        """Build the mean loss of chosen tokens."""
        return SFTLoss(
            tasks=self._tasks,
            task_weights=self._task_weights(),
            per_row=self.sampler is not None,
        )

    def next_batch(self) -> Mapping[str, Any]:
        """Take the next batch; where tasks are chosen, of those that are drawn."""
        if self.sampler is None or not isinstance(self.data.stream, TaskStream):
            return next_batch(self.data.stream)
        rows = self.data.stream.batch_size
        self._probabilities = self.sampler.probabilities()
        tasks, weights = self.sampler.draw(rows)
        batch = dict(self.data.stream.of_tasks(tasks))
        share = rows // self.engine.data_ranks
        own = slice(self.engine.data_rank * share, (self.engine.data_rank + 1) * share)
        batch["row_weights"] = np.array(weights[own], np.float32)
        return batch

    def observe(self, update: StepReport, log: RunLog) -> Mapping[str, float]:
        """Take in what an update says of its tasks, and log it; the losses of those that came."""
        if not self._tasks:
            return update.statistics
        sums, shares = (
            [update.statistics.get(f"{kind}.{task}", 0.0) for task in range(len(self.names))]
            for kind in ("sum", "weight")
        )
        losses = [s / w if w > 0 else None for s, w in zip(sums, shares, strict=True)]
        if self.uncertainty:
            self.uncertainty.observe(losses, shares)
        if self.sampler:
            self.sampler.observe(losses)
        metrics = self._task_metrics(losses, shares)
        log.event("tasks", {"step": self.step, **metrics})
        return {name: value for name, value in metrics.items() if name.startswith("loss.")}

    def _task_metrics(
        self, losses: Sequence[float | None], shares: Sequence[float]
    ) -> dict[str, float]:
        """Return each task's loss, share, probability and factor."""
        metrics: dict[str, float] = {}
        factors = self._task_weights()
        for task, name in enumerate(self.names):
            loss = losses[task]
            if loss is not None:
                metrics[f"loss.{name}"] = loss
            metrics[f"share.{name}"] = shares[task]
            if self._probabilities:
                metrics[f"probability.{name}"] = self._probabilities[task]
            if factors:
                metrics[f"factor.{name}"] = factors[task]
        return metrics

    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Compute the mean held-out loss a token, over all and for each task."""
        totals = torch.zeros(2, max(1, len(self.names)), dtype=torch.float64)
        for batch in held_out():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            sums = self.engine.gather(self.engine.evaluate(rows, _row_sums)).double().cpu()
            task = self.engine.gather(rows["task"]) if self.names and "task" in rows else None
            which = torch.zeros(len(sums), dtype=torch.int64) if task is None else task.cpu()
            totals.index_add_(1, which, sums.T)
        if totals[1].sum() == 0:
            raise NothingToLearnError(
                "the held-out data has no target; hold out more, or raise sequence_length"
            )
        metrics = {"held_out_loss": float(totals[0].sum() / totals[1].sum())}
        if len(self.names) > 1:
            for name, (total, count) in zip(self.names, totals.T.tolist(), strict=True):
                if count:
                    metrics[f"held_out_loss.{name}"] = total / count
        return metrics

    def extra_state(self) -> dict[str, Any]:
        """Return what is known about the tasks."""
        return {
            "sampler": self.sampler.state() if self.sampler else None,
            "log_variances": self.uncertainty.log_variances if self.uncertainty else None,
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken."""
        if self.sampler:
            self.sampler.load(state["sampler"])
        if self.uncertainty:
            self.uncertainty.log_variances = list(state["log_variances"])


def _row_sums(output: Output, batch: Batch) -> Tensor:
    """Sum the losses and count the targets of each row, float32 (B, 2)."""
    weights = token_weights({"targets": batch["targets"]}, per_row=False)
    losses = output.token_losses(batch["targets"])
    return torch.stack((losses.sum(1), weights.sum(1)), 1)
