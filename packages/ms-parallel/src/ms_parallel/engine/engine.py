"""Runs a model under any layout: one object that trainers of every kind ask for work."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.cluster.groups import Groups, connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import Given, build_stages, describe
from ms_parallel.engine.generation import Sampling, generate
from ms_parallel.engine.gradients import (
    is_counted,
    reduce_gradients,
    scale,
    squared_norm,
)
from ms_parallel.engine.loss import Batch, HeadOutput, LogitsOutput, Loss, Output
from ms_parallel.engine.microbatches import cut_batch, measure
from ms_parallel.engine.optimizer import AdamW, AdamWConfig, learning_rate
from ms_parallel.engine.state import load_state, state_of
from ms_parallel.errors import ConfigError, ParallelError
from ms_parallel.models import KeyValueCache
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators import Ops
from ms_parallel.pipeline.choice import Choice, Tables
from ms_parallel.pipeline.recorder import Recorder, gather_times
from ms_parallel.pipeline.runtime import Runtime, call_stage
from ms_parallel.pipeline.step_file import RecordedStep
from ms_parallel.split.own_model import OwnModelConfig, call_own
from ms_parallel.split.part import drop_gathered, local_part
from ms_parallel.split.precision import warn_of_slow_bfloat16
from ms_parallel.split.recompute import Recompute
from ms_parallel.split.tensor_parallel import is_whole

__all__ = ["Engine", "Update"]


@frozen(kw_only=True)
class Update:
    """What one update did; the same on every process."""

    loss: float
    """Mean loss over the global batch."""
    grad_norm: float
    """Euclidean norm of the whole gradient, before it was clipped."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch."""
    skipped: bool = False
    """The gradient was not finite, or nothing had a loss: weights and moments are as before."""


class Engine:
    """A model, its optimizer, and the processes that share them.

    Args:
        model: an architecture's name, a configuration, or a folder with a config.json; the weights
            of a folder that has them are read, each process its part. Or a module of your own (see
            `ms_parallel.split.own_model`), which is taken over with its weights: those of the first
            process, on all.
        layout: how the processes split the work; one process by default.
        optimizer: AdamW's settings.
        schedule: a generator's name, such as `"1f1b"` or `"zb-v"`; the path of a CSV file in
            torch.distributed.pipelining's form; or a table. A file or table is of its own number of
            microbatches. Each stage of it gets its share of the layers, or as many as a `Staged`,
            what `search_schedule` finds, says.
        microbatch_size: rows of this data rank that pass at once, the last time perhaps fewer;
            None for all of them.
        mixed_precision: compute in bfloat16; weights, moments and sums stay float32.
        recompute: `"full"` keeps only each block's input and runs it again in the backward.
        seed: of fresh weights, which are the same under every layout.
        device: `"cpu"` or an accelerator; by default the machine's best.
        ops: operators of the model; plain torch by default.
        on_nonfinite: what a gradient with an infinity or NaN does: `"skip"` the update and say
            so, or `"raise"`. Weights are never touched by it.
        groups: processes that are already connected; by default `layout` is connected here.
        plan: how a module of your own may be split; without one, over the data axis alone.
        prepare: called with each stage of this process once it is split over the tensor axis and
            before it is sharded; may change layers in place. Parameters that it adds begin at zero.

    Raises:
        LayoutError: the layout does not fit the processes or the model.
        LaunchError: the processes were not started as the layout needs.
        ConfigError: a setting cannot be used as given.
        ScheduleError: there is no such schedule, or it is not right.
        ModelError: the folder's model cannot be read.
    """

    def __init__(
        self,
        model: Given,
        layout: Layout | None = None,
        *,
        optimizer: AdamWConfig | None = None,
        schedule: Choice = "1f1b",
        microbatch_size: int | None = None,
        mixed_precision: bool = False,
        recompute: Recompute = "none",
        seed: int = 0,
        device: str | torch.device | None = None,
        ops: Ops | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        groups: Groups | None = None,
        plan: ModelPlan | None = None,
        prepare: Callable[[Any], object] | None = None,
    ) -> None:
        if microbatch_size is not None and microbatch_size < 1:
            raise ConfigError(f"microbatch_size is {microbatch_size}; give at least 1, or None")
        if on_nonfinite not in ("skip", "raise"):
            raise ConfigError(f"on_nonfinite is {on_nonfinite!r}; give skip or raise")
        layout = groups.layout if groups else layout or Layout()
        self.config, self.plan = describe(model, plan, layout, recompute)
        self.groups = groups or connect(layout, device=device)
        if mixed_precision and dist.get_rank() == 0:
            warn_of_slow_bfloat16(self.device)
        self.ops: Ops = ops or operators
        self.microbatch_size = microbatch_size
        self.on_nonfinite = on_nonfinite
        self.step = 0
        """Updates asked for so far, skipped ones included."""
        self.tables = Tables(schedule, layout.pipeline)
        self.placement = self.tables.placement
        """Pipeline rank of each stage."""
        self.stages = build_stages(
            model,
            self.config,
            self.plan,
            self.tables,
            self.groups,
            mixed_precision=mixed_precision,
            recompute=recompute,
            seed=seed,
            ops=self.ops,
            prepare=prepare,
        )
        own = isinstance(model, nn.Module)
        self.runtime = Runtime(self.stages, self.groups, call_own if own else call_stage)
        self.parameters: dict[str, Tensor] = {
            name: parameter
            for stage in self.stages.values()
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad or not own
        }
        # Kept, as matching hundreds of names against patterns each step would cost.
        self.whole = [
            name for name in self.parameters if layout.tensor > 1 and is_whole(name, self.plan)
        ]
        self.counted = [
            name
            for name in self.parameters
            if is_counted(name, self.plan, self.placement, self.groups)
        ]
        local = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        self.optimizer = AdamW(local, optimizer or AdamWConfig())

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.groups.device

    def update(self, batch: Mapping[str, Any], loss: Loss) -> Update:
        """One step of the optimizer on the global batch, of which `batch` is this data rank's rows.

        Args:
            batch: tensors or arrays (b, S) as in the Batch seam; all processes of one data rank
                pass the same.
            loss: summed over microbatches, divided once by its weight over the global batch.

        Raises:
            ConfigError: there are no rows, or the sequence does not divide over `tensor`.
            ParallelError: the gradient is not finite and `on_nonfinite="raise"`.
        """
        rows = self._microbatches(batch)
        weight, tokens = measure(rows, loss, self.groups)
        rate = learning_rate(self.step, self.optimizer.config)
        if weight <= 0.0:
            self.step += 1
            return Update(loss=0.0, grad_norm=0.0, learning_rate=rate, tokens=tokens, skipped=True)

        losses = self.backward(rows, loss, weight)
        gradients = reduce_gradients(
            self.parameters, self.whole, self.plan.tied, self.placement, self.groups
        )
        value, norm = self._summary(losses, gradients)
        finite = bool(np.isfinite(value) and np.isfinite(norm))
        if finite:
            self._apply(gradients, norm, rate)
        for parameter in self.parameters.values():
            parameter.grad = None
        if not finite and self.on_nonfinite == "raise":
            raise ParallelError(
                f"update {self.step}: loss {value}, gradient norm {norm}: not finite; weights are "
                "unchanged; lower the learning rate or look at this batch"
            )
        self.step += 1
        _mark_step(self.stages.values())
        return Update(
            loss=value, grad_norm=norm, learning_rate=rate, tokens=tokens, skipped=not finite
        )

    def backward(self, microbatches: Sequence[Batch], loss: Loss, weight: float) -> list[Tensor]:
        """Forwards and backwards of an update; gradients are left in the parameters.

        Returns:
            Each microbatch's share of the loss; an empty list away from the last stage.
        """

        def finish(hidden: Tensor, microbatch: Batch) -> Tensor:
            return loss(self._output(hidden), microbatch) / weight

        on_device = [self._to_device(microbatch) for microbatch in microbatches]
        return self.runtime.run(self.tables.training(len(on_device)), on_device, finish)

    def recorded_update(
        self, batch: Mapping[str, Any], loss: Loss
    ) -> tuple[Update, RecordedStep | None]:
        """`update`, and when each rank of this pipeline computed what; every process calls it.

        Returns:
            What `update` does, and the recorded step, None where nothing had a loss.
        """
        recorder, step = Recorder(self.device), self.step
        self.runtime.recorder = recorder
        try:
            update = self.update(batch, loss)
        finally:
            self.runtime.recorder = None
        if recorder.schedule is None:
            return update, None
        return update, RecordedStep(
            step=step,
            layout=str(self.groups.layout),
            name=recorder.schedule.name,
            table=recorder.schedule.to_csv(),
            times_ns=tuple(map(tuple, gather_times(recorder, self.groups))),
        )

    @torch.no_grad()
    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor]
    ) -> Tensor:
        """`function(output, batch)` of each microbatch, (b, ...), put together.

        Returns:
            The result for this data rank's rows, on every process of that data rank.
        """
        results = self.forward(self._microbatches(batch), function)
        for stage in self.stages.values():
            drop_gathered(stage)
        whole = torch.cat(results) if results else None
        return self.runtime.mailbox.share(whole, self.placement[-1])

    def forward(
        self,
        microbatches: Sequence[Batch],
        function: Callable[[Output, Batch], Tensor],
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
    ) -> list[Tensor]:
        """`function(output, microbatch)` of each; an empty list away from the last stage."""
        return self.runtime.run(
            self.tables.forwards(len(microbatches)),
            [self._to_device(microbatch) for microbatch in microbatches],
            lambda hidden, microbatch: function(self._output(hidden), microbatch),
            caches=caches,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop_token: int | Collection[int] | Literal["eos"] | None = "eos",
    ) -> list[list[int]]:
        """Continue each of this data rank's prompts; see `ms_parallel.engine.generation`.

        Args:
            prompts: tokens of each prompt, at least one.
            max_new_tokens: how many to write at most.
            temperature: divides the logits; 0 always takes the likeliest token.
            top_k: only so many likeliest tokens are ever chosen; None for all.
            top_p: only the likeliest that together reach this probability are ever chosen.
            min_p: only those of at least this share of the likeliest one's probability are.
            seed: of chance; the same under every layout gives the same tokens.
            stop_token: ends a row: one token or any of several; by default those that the model's
                configuration names as `eos_token_id`. None lets each row run to max_new_tokens.

        Returns:
            The new tokens of each row, without the prompt, on every process of the data rank.
        """
        return generate(
            self,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
            ),
            stops=self._stops(stop_token),
        )

    def _stops(self, stop_token: int | Collection[int] | str | None) -> Collection[int]:
        chosen: Any = self.config.eos_token_id if stop_token == "eos" else stop_token
        return () if chosen is None else (chosen,) if isinstance(chosen, int) else tuple(chosen)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, moments and counters by name, ready for torch.distributed.checkpoint."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave; another layout's goes through the checkpoint first.

        Raises:
            CheckpointError: names or shapes are not this engine's.
        """
        load_state(self, state)

    def _microbatches(self, batch: Mapping[str, Any]) -> list[Batch]:
        return cut_batch(batch, self.microbatch_size, self.groups.layout.tensor)

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def _output(self, hidden: Tensor) -> Output:
        if isinstance(self.config, OwnModelConfig):
            return LogitsOutput(hidden)
        last = self.stages[len(self.placement) - 1]
        return HeadOutput(hidden, last.head_weight, self.ops, self.groups)

    def _summary(
        self, losses: Sequence[Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """Loss of the global batch and norm of its gradient, each part counted once."""
        counted = [gradients[name] for name in self.counted]
        facts = torch.zeros(2, device=self.device)
        if losses and self.groups.place.tensor == 0:
            facts[0] = torch.stack(list(losses)).sum()
        facts[1] = squared_norm(counted, self.device)
        value, square = self.groups.all_reduce(facts).tolist()
        return value, square**0.5

    def _apply(self, gradients: Mapping[str, Tensor], norm: float, rate: float) -> None:
        limit = self.optimizer.config.max_grad_norm
        if limit is not None and norm > limit:
            scale(list(gradients.values()), limit / (norm + 1e-6))
        local = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        self.optimizer.step(local, gradients, rate)


def _mark_step(stages: Iterable[nn.Module]) -> None:
    """Tell ms-profile, where it runs, that weights moved: no torch optimizer is here to show it."""
    profiler = sys.modules.get("ms_profile")
    if profiler is not None:
        profiler.mark_step(*stages)
