"""Supervised fine-tuning on packed instruction data, with task weights and task sampling."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.engines.protocol import Engine, StepReport
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.losses.learned_weights import Uncertainty
from ms_align.losses.protocol import Batch, Output
from ms_align.losses.sft import SFTLoss, token_weights
from ms_align.run.initial_weights import frozen_checksum
from ms_align.run.loop import RunLog
from ms_align.settings import flag, integer, number, numbers, one_of
from ms_align.streams.folders import instructions
from ms_align.streams.protocol import HeldOut, TaskStream, next_batch
from ms_align.streams.task_sampler import TaskOptions, TaskSampler, task_options
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.base.offline import OfflineLearner, OfflineTrainer, TrainingData
from ms_align.used_settings import UsedIf


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class SFTOptions:
    """Task weighting and task sampling."""

    task_weights: Mapping[str, float] = field(factory=dict, validator=numbers())
    """Weight of each task's loss. Default: 1."""
    uncertainty: bool = field(default=False, validator=flag)
    """Learn the task weights instead (Kendall et al., 2018)."""
    uncertainty_rate: float = field(default=0.05, validator=number())
    """Learning rate of the tasks' log-variances."""
    tasks: TaskOptions | None = field(
        default=None,
        converter=task_options,
        metadata={"table": TaskOptions},
    )
    """Sample tasks by difficulty. None: use the order of the stream."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf("uncertainty_rate", "with uncertainty=true", lambda run: run.uncertainty),
    )

    def __attrs_post_init__(self) -> None:
        if self.task_weights and self.uncertainty:
            raise ConfigError(
                "task_weights and uncertainty cannot be combined, as uncertainty learns the "
                "weights; remove one"
            )


@frozen(kw_only=True, slots=False)
class SFTTrainer(SFTOptions, OfflineTrainer):
    """Fine-tune a model on instructions.

    `SFTTrainer(model=model, steps=100).train(dataset)`; every setting is a keyword argument, and
    training starts with `train`.

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "sft"

    weights: dict[str, float] | None = field(default=None, validator=numbers(optional=True))
    """Sampling weight of each source. Default: its number of samples."""
    long: str = field(default="truncate", validator=one_of("truncate", "split"))
    """Samples longer than `sequence_length`: `truncate` them, or `split` them into several."""
    open_rows: int = field(default=512, validator=integer(minimum=0))
    """Rows packed at the same time per source; 0 puts each sample in a row alone."""
    weighting: str = field(default="token", validator=one_of("token", "sample"))
    """Weigh every `token` or every `sample` equally in the loss."""

    def __attrs_post_init__(self) -> None:
        SFTOptions.__attrs_post_init__(self)
        OfflineTrainer.__attrs_post_init__(self)
        if self.tasks is not None and self.steps is None:
            raise ConfigError(
                "epochs cannot be used with task sampling, which never ends; set steps"
            )

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that cannot change when a run resumes."""
        return ("seed", "uncertainty", "lora")

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "SFTLearner":
        """Build the SFT learner."""
        return SFTLearner(engine, data, ends, self.subset(SFTOptions), seed=self.seed)

    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open packed rows of the dataset folders; held-out data is neither mixed nor weighted."""
        mixing: dict[str, Any] = {"weights": self.weights, "weighting": self.weighting}
        if settings.get("split") == "held_out":
            # Held-out losses must not depend on training weights.
            mixing = {"weights": None, "weighting": "token"}
        return instructions(
            dataset,
            engine,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            long=self.long,
            open_rows=self.open_rows,
            seed=self.seed,
            **{"epochs": None, **mixing, **settings},
        )

    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over the dataset folders."""
        # The number of rows is known only after packing.
        return sum(1 for _ in self.stream(dataset, engine, epochs=self.epochs))


class SFTLearner(OfflineLearner):
    """Learns from packed rows of one or several tasks."""

    no_targets = (
        "the batch of step {step} has no target tokens, so nothing would be learned; check whether "
        "the chat template or sequence_length masks all answers"
    )

    def __init__(
        self, engine: Engine, data: TrainingData, ends: TextEnds, options: SFTOptions, *, seed: int
    ) -> None:
        super().__init__(engine, data, ends)
        self.options = options
        self.names: tuple[str, ...] = tuple(getattr(data.stream, "names", ()))
        # 0: the loss reports no sums by task.
        self._tasks = len(self.names) if len(self.names) > 1 else 0
        self.sampler = self._sampler(seed)
        self._probabilities: Sequence[float] = ()
        """Sampling probability of each task in the last batch, with task sampling."""
        self.uncertainty: Uncertainty | None = None
        if options.uncertainty:
            self.uncertainty = Uncertainty(
                log_variances=[0.0] * self._tasks, rate=options.uncertainty_rate
            )
        self._factors = self._configured_factors()
        self.identity = {
            "frozen_weights": frozen_checksum(engine),
            "tasks": ", ".join(self.names),
            "signal": options.tasks.signal if options.tasks else "",
        }

    def _sampler(self, seed: int) -> TaskSampler | None:
        if self.options.tasks is None:
            if self.options.uncertainty and not self._tasks:
                raise ConfigError(
                    "uncertainty needs several tasks, and the data has one source; make `dataset` "
                    "a table of several, or remove uncertainty"
                )
            return None
        if not isinstance(self.data.stream, TaskStream) or len(self.names) < 2:
            raise ConfigError(
                "task sampling needs at least two named sources, and the data has one; add sources "
                "or remove tasks"
            )
        return TaskSampler(self.names, self.options.tasks, seed=seed)

    def _configured_factors(self) -> tuple[float, ...]:
        weights = self.options.task_weights
        if not weights:
            return ()
        if set(weights) != set(self.names):
            raise ConfigError(
                f"task_weights must name the tasks {sorted(self.names)}, got {sorted(weights)}; "
                "rename them"
            )
        return tuple(float(weights[name]) for name in self.names)

    def _task_weights(self) -> tuple[float, ...]:
        return tuple(self.uncertainty.weights()) if self.uncertainty else self._factors

    def loss(self) -> SFTLoss:
        """Return the loss of the next update."""
        return SFTLoss(
            tasks=self._tasks,
            task_weights=self._task_weights(),
            per_row=self.sampler is not None,
        )

    def next_batch(self) -> Mapping[str, Any]:
        """Read the next batch, with task sampling from the sampled tasks."""
        if self.sampler is None or not isinstance(self.data.stream, TaskStream):
            return next_batch(self.data.stream)
        rows = self.data.stream.batch_size
        self._probabilities = self.sampler.probabilities()
        tasks, weights = self.sampler.draw(rows)
        batch = dict(self.data.stream.of_tasks(tasks))
        # of_tasks returns this rank's rows, so only their importance weights are needed.
        count = rows // self.engine.data_ranks
        local = slice(self.engine.data_rank * count, (self.engine.data_rank + 1) * count)
        batch["row_weights"] = np.array(weights[local], np.float32)
        return batch

    def observe(self, update: StepReport, log: RunLog) -> Mapping[str, float]:
        """Update task sampling and task weights from an update's losses; return these by task."""
        if not self._tasks:
            return update.statistics
        # The loss reports a weighted loss sum and a weight for each task.
        sums, shares = (
            [update.statistics.get(f"{statistic}.{task}", 0.0) for task in range(len(self.names))]
            for statistic in ("sum", "weight")
        )
        # None: the task was not in the batch.
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
        """Return loss, share, probability and weight of each task."""
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
        """Return the mean held-out loss per token, in total and for each task."""
        totals = torch.zeros(2, max(1, len(self.names)), dtype=torch.float64)  # loss, tokens
        for batch in held_out():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            sums = self.engine.gather(self.engine.evaluate(rows, _row_sums)).double().cpu()
            task = self.engine.gather(rows["task"]) if self.names and "task" in rows else None
            task_ids = torch.zeros(len(sums), dtype=torch.int64) if task is None else task.cpu()
            # (2, tasks) += (2, B) by task
            totals.index_add_(1, task_ids, sums.T)
        if totals[1].sum() == 0:
            raise NothingToLearnError(
                "the held-out data has no target tokens; hold out more, or raise sequence_length"
            )
        metrics = {"held_out_loss": float(totals[0].sum() / totals[1].sum())}
        if len(self.names) > 1:
            for name, (total, count) in zip(self.names, totals.T.tolist(), strict=True):
                # A task may have no held-out rows.
                if count:
                    metrics[f"held_out_loss.{name}"] = total / count
        return metrics

    def extra_state(self) -> dict[str, Any]:
        """Return the state of task sampling and task weights."""
        return {
            "sampler": self.sampler.state_dict() if self.sampler else None,
            "log_variances": self.uncertainty.log_variances if self.uncertainty else None,
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of task sampling and task weights."""
        if self.sampler:
            self.sampler.load_state_dict(state["sampler"])
        if self.uncertainty:
            self.uncertainty.log_variances = list(state["log_variances"])


def _row_sums(output: Output, batch: Batch) -> Tensor:
    """Return the summed loss and the number of targets of each row, float32 (B, 2)."""
    weights = token_weights({"targets": batch["targets"]}, per_row=False)
    losses = output.token_losses(batch["targets"])
    return torch.stack((losses.sum(1), weights.sum(1)), 1)
