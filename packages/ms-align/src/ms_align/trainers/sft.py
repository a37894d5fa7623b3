"""Instruction tuning: chosen tokens, weighted by token, sample and task, tasks by difficulty."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.protocol import Engine, Update
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.losses.protocol import Batch, Output
from ms_align.losses.sft import SFTLoss, token_weights
from ms_align.losses.uncertainty import Uncertainty
from ms_align.run.checkpoint import State
from ms_align.run.initial_weights import frozen_checksum, name_of
from ms_align.run.loop import Loop, Result, Tell
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership, plain
from ms_align.run.results import check_finite, result_of, write_result
from ms_align.run.samples import Showing
from ms_align.settings import flag, number, numbers
from ms_align.streams.protocol import Stream, TaskStream, check_fit, endless
from ms_align.streams.task_sampler import TaskOptions, TaskSampler
from ms_align.streams.text_ends import Endings, tokenizer_beside

__all__ = ["SFTOptions", "SFTTrainer"]

HeldOut = Callable[[], Iterable[Mapping[str, Any]]]


@frozen(kw_only=True, slots=False)  # a run file inherits from more than one
class SFTOptions:
    """How losses are weighed and tasks are chosen."""

    task_weights: Mapping[str, float] = field(factory=dict, validator=numbers())
    """Factor of each task's loss; empty for 1."""
    uncertainty: bool = field(default=False, validator=flag)
    """Learn the factors instead (Kendall et al., 2018)."""
    uncertainty_rate: float = field(default=0.05, validator=number())
    """Step size of their log-variances."""
    tasks: TaskOptions | None = field(default=None, metadata={"table": TaskOptions})
    """Choose each row's task by its difficulty; None reads the stream as it comes."""

    def __attrs_post_init__(self) -> None:
        if self.task_weights and self.uncertainty:
            raise ConfigError("task_weights are given and uncertainty learns them; choose one")


class SFTTrainer:
    """Tunes a model on the chosen tokens of a stream.

    Args:
        model: any causal language model, which is run in this process; or an engine.
        stream: training batches; see `ms_data.InstructionStream`.
        held_out: makes an iterator of held-out batches, each process its rows; read to its end at
            each evaluation.
        showing: prompts whose answers are told at each evaluation.
        sft: weighting and tasks.
        optimizer: AdamW's settings, for a model; an engine has its own.
        microbatch_size: rows that pass at once, for a model.
        options: how the run goes on, shows and keeps.
        tokenizer: what is put beside the trained model: a folder or a tokenizer; by default what
            lies in the stream's folder.
        merge: with adapters, write the merged model too.
        owner: what else the run says of itself when it takes `output_dir`.

    Raises:
        ModelError: tokenizer and model disagree, or rows are longer than the context.
        ConfigError: a setting cannot be used as given.
    """

    def __init__(
        self,
        model: nn.Module | Engine,
        stream: Stream,
        *,
        held_out: HeldOut | None = None,
        showing: Showing | None = None,
        sft: SFTOptions | None = None,
        optimizer: OptimizerOptions | None = None,
        microbatch_size: int | None = None,
        options: RunOptions | None = None,
        tokenizer: Any = None,
        merge: bool = True,
        owner: Ownership | None = None,
    ) -> None:
        self.engine: Engine = (
            LocalEngine(model, optimizer, microbatch_size=microbatch_size)
            if isinstance(model, nn.Module)
            else model
        )
        self.stream = stream
        self.held_out = held_out
        self.showing = showing
        self.sft = sft or SFTOptions()
        self.options = options or RunOptions()
        self.step = 0
        self.merge = merge
        self.owner = owner
        self.tokenizer = tokenizer_beside(tokenizer, stream)
        self.endings = Endings.of(self.tokenizer)
        check_fit(self.engine, stream, "training data")
        self.names: tuple[str, ...] = tuple(getattr(stream, "names", ()))
        self._tasks = len(self.names) if len(self.names) > 1 else 0
        self.sampler = self._sampler()
        self.uncertainty = (
            Uncertainty(log_variances=[0.0] * self._tasks, rate=self.sft.uncertainty_rate)
            if self.sft.uncertainty
            else None
        )
        self._factors = self._given_factors()

    @property
    def output_dir(self) -> Path:
        """Where the run lies."""
        return self.options.output_dir or Path("runs", "sft")

    def train(self, steps: int) -> Result:
        """Make `steps` updates over all launches; goes on from the last checkpoint.

        The model is then in `output_dir/model`, its tokenizer beside it; adapters are in
        `output_dir/adapter`.

        Args:
            steps: of the whole run.

        Raises:
            NothingToLearnError: a batch has no target.
            NonFiniteError: a weight is infinite or no number.
            AlignError: see `ms_align.run.loop.Loop`.
        """
        check_finite(self.engine)
        return Loop(
            self,
            steps=steps,
            options=self.options,
            folder=self.output_dir,
            owner=self._owner(),
            write=self._write,
            result=result_of(self.engine, self.output_dir, merge=self.merge),
        ).run()

    def _write(self) -> None:
        tokenizer = self.tokenizer and self.tokenizer.ending(self.endings.found)
        write_result(self.engine, self.output_dir, tokenizer, merge=self.merge)

    def update(self, tell: Tell) -> Update:
        """One update, and what it teaches about the tasks."""
        batch, chances = self._batch()
        self.endings.look(batch)
        loss = SFTLoss(
            tasks=self._tasks,
            task_weights=self._task_weights(),
            per_row=self.sampler is not None,
        )
        update = self.engine.update(batch, loss)
        if update.skipped and update.loss == 0.0 and update.grad_norm == 0.0:
            raise NothingToLearnError(
                f"the batch of step {self.step + 1} has no target, so nothing would be learned; "
                "look at the loss mask: the chat template, or sequence_length, may cut all answers"
            )
        self.step += 1
        return self._observe(update, chances, tell)

    def evaluate(self, tell: Tell) -> Mapping[str, float]:
        """Mean held-out loss a token, over all and for each task; samples are told."""
        if self.showing is not None:
            self.showing.tell(self.engine, tell)
        if self.held_out is None:
            return {}
        tasks = max(1, len(self.names))
        totals = torch.zeros(2, tasks, dtype=torch.float64)
        for batch in self.held_out():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            told = self.engine.gather(self.engine.evaluate(rows, _row_sums)).double().cpu()
            task = self.engine.gather(rows["task"]) if self.names and "task" in rows else None
            which = torch.zeros(len(told), dtype=torch.int64) if task is None else task.cpu()
            totals.index_add_(1, which, told.T)
        if totals[1].sum() == 0:
            raise NothingToLearnError(
                "the held-out data has no target; hold out more, or raise sequence_length"
            )
        figures = {"held_out_loss": float(totals[0].sum() / totals[1].sum())}
        if len(self.names) > 1:
            for name, (total, count) in zip(self.names, totals.T.tolist(), strict=True):
                if count:
                    figures[f"held_out_loss.{name}"] = total / count
        return figures

    def state(self) -> State:
        """Weights, moments, the stream's place, and what is known about the tasks."""
        facts = {
            "step": self.step,
            "stream": self.stream.state_dict(),
            "sampler": self.sampler.state() if self.sampler else None,
            "log_variances": self.uncertainty.log_variances if self.uncertainty else None,
            "endings": sorted(self.endings.found),
        }
        return State(tensors=self.engine.state_dict(), facts=facts)

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""
        self.engine.load_state_dict(state.tensors)
        self.step = int(state.facts["step"])
        self.endings.found |= set(state.facts["endings"])
        self.stream.load_state_dict(state.facts["stream"])
        if self.sampler:
            self.sampler.load(state.facts["sampler"])
        if self.uncertainty:
            self.uncertainty.log_variances = list(state.facts["log_variances"])

    def _owner(self) -> Ownership:
        tasks = self.sft.tasks
        identity = {
            "model": name_of(getattr(self.engine, "module", self.engine)),
            **(self.owner.identity if self.owner else {}),
            "frozen_weights": frozen_checksum(self.engine),
            "tasks": ", ".join(self.names),
            "signal": tasks.signal if tasks else "",
        }
        settings = {**plain(self.sft), **plain(self.options)}
        return Ownership(
            kind="ms-align sft",
            identity=identity,
            settings=self.owner.settings if self.owner else settings,
            fixed=("seed", "uncertainty", "lora"),
            reads=self.owner.reads if self.owner else {},
        )

    def _sampler(self) -> TaskSampler | None:
        if self.sft.tasks is None:
            if self.sft.uncertainty and not self._tasks:
                raise ConfigError("uncertainty weighs tasks, and the data has only one source")
            return None
        if not isinstance(self.stream, TaskStream) or len(self.names) < 2:
            raise ConfigError(
                "tasks are to be chosen by difficulty, and the data has only one; give two "
                "sources or more, by name"
            )
        return TaskSampler(self.names, self.sft.tasks, seed=self.options.seed)

    def _given_factors(self) -> tuple[float, ...]:
        given = self.sft.task_weights
        if not given:
            return ()
        if set(given) != set(self.names):
            raise ConfigError(
                f"task_weights are for {sorted(given)}; the data has {sorted(self.names)}"
            )
        return tuple(float(given[name]) for name in self.names)

    def _task_weights(self) -> tuple[float, ...]:
        return tuple(self.uncertainty.weights()) if self.uncertainty else self._factors

    def _batch(self) -> tuple[Mapping[str, Any], Sequence[float]]:
        """The next batch; and, where tasks were chosen, with which chances."""
        if self.sampler is None or not isinstance(self.stream, TaskStream):
            return endless(self.stream), ()
        rows = self.stream.batch_size
        chances = self.sampler.probabilities()
        tasks, weights = self.sampler.draw(rows)
        batch = dict(self.stream.of_tasks(tasks))
        share = rows // self.engine.data_ranks
        own = slice(self.engine.data_rank * share, (self.engine.data_rank + 1) * share)
        batch["row_weights"] = np.array(weights[own], np.float32)
        return batch, chances

    def _observe(self, update: Update, chances: Sequence[float], tell: Tell) -> Update:
        """What an update says of its tasks, told, kept and put into the update's figures."""
        if not self._tasks:
            return update
        sums, shares = (
            [update.statistics.get(f"{kind}.{task}", 0.0) for task in range(len(self.names))]
            for kind in ("sum", "weight")
        )
        losses = [s / w if w > 0 else None for s, w in zip(sums, shares, strict=True)]
        if self.uncertainty:
            self.uncertainty.observe(losses, shares)
        if self.sampler:
            self.sampler.observe(losses)
        facts = self._facts(losses, shares, chances)
        tell.event("tasks", {"step": self.step, **facts})
        return _SFTUpdate(update, {k: v for k, v in facts.items() if k.startswith("loss.")})

    def _facts(
        self, losses: Sequence[float | None], shares: Sequence[float], chances: Sequence[float]
    ) -> dict[str, float]:
        """What an event says of each task: its loss, share, probability and factor."""
        facts: dict[str, float] = {}
        factors = self._task_weights()
        for task, name in enumerate(self.names):
            loss = losses[task]
            if loss is not None:
                facts[f"loss.{name}"] = loss
            facts[f"share.{name}"] = shares[task]
            if chances:
                facts[f"probability.{name}"] = chances[task]
            if factors:
                facts[f"factor.{name}"] = factors[task]
        return facts


class _SFTUpdate:
    """An update whose figures are the losses of the tasks that came."""

    def __init__(self, update: Update, statistics: Mapping[str, float]) -> None:
        self.loss, self.grad_norm = update.loss, update.grad_norm
        self.learning_rate, self.tokens = update.learning_rate, update.tokens
        self.skipped, self.statistics = update.skipped, statistics


def _row_sums(output: Output, batch: Batch) -> Tensor:
    """Sum of losses and number of targets of each row, float32 (B, 2)."""
    weights = token_weights({"targets": batch["targets"]}, per_row=False)
    losses = output.token_losses(batch["targets"])
    return torch.stack((losses.sum(1), weights.sum(1)), 1)
