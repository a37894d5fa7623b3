"""Forwards and backwards of this process's stages, under any layout and in any precision."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.further import HasFurther, depths_of, divisors, further_shares
from ms_parallel.engine.heads import heads_of
from ms_parallel.engine.loss import Loss, LossWithStatistics, Output
from ms_parallel.engine.microbatches import cut_batch
from ms_parallel.engine.options import EngineOptions
from ms_parallel.engine.output import HeadOutput, LogitsOutput
from ms_parallel.engine.reproducible.update import Reproducible
from ms_parallel.engine.updates.loss_scale import scale_gradient
from ms_parallel.engine.updates.stopwatch import Stopwatch
from ms_parallel.models.batch import Batch
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.staged import RowSplit, StagedModel
from ms_parallel.operators import Ops
from ms_parallel.pipeline.choice import ScheduleTables
from ms_parallel.pipeline.runtime import Runtime, call_stage
from ms_parallel.split.context.splitter import Splitter
from ms_parallel.split.memory.budget import Budget
from ms_parallel.split.own_model import OwnModelConfig, call_own


class Passes:
    """This process's stages, and how a batch passes through them.

    Args:
        stages: by number.
        config: of the model.
        plan: of the model.
        groups: the layout's processes.
        ops: operators of the heads.
        tables: the schedule.
        splitter: shares out rows over the context axis.
        options: the engine's.
    """

    def __init__(
        self,
        stages: Mapping[int, StagedModel],
        config: ModelConfig,
        plan: ModelPlan,
        groups: Groups,
        *,
        ops: Ops,
        tables: ScheduleTables,
        splitter: Splitter,
        options: EngineOptions,
    ) -> None:
        self.stages, self.config, self.plan, self.groups = stages, config, plan, groups
        self.ops, self.tables, self.splitter, self.options = ops, tables, splitter, options
        self.microbatch_size = options.microbatch_size
        self.own = isinstance(config, OwnModelConfig)
        modules = cast(Mapping[int, nn.Module], stages)
        call = call_own if self.own else call_stage
        self.runtime = Runtime(modules, groups, call, options.sharding)
        self.budget: Budget | None = None
        """What chooses how blocks are recomputed, where memory has a budget."""
        self.fixed: Reproducible | None = None
        """Adds up gradients and losses row by row, where their bits are to be fixed."""
        self.stopwatch: Stopwatch | None = None
        """Times the forwards and backwards of updates, where somebody asks for that."""

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the tensor axis splits a sequence between blocks."""
        return self.groups.layout.tensor if self.plan.split_sequence else 1

    def microbatches(self, batch: Mapping[str, Any], size: int | None = None) -> list[Batch]:
        """Cut this data rank's rows, as many at a time as `microbatch_size` or `size` says.

        Raises:
            ConfigError: there are no rows, the sequence does not divide, or the vocabulary does
                not hold a token.
        """
        size = size or self.microbatch_size
        context = self.groups.layout.context
        return cut_batch(batch, size, self.sequence_parts, context, self.vocabulary)

    @property
    def vocabulary(self) -> int | None:
        """Tokens that the model knows; None for a user's own module that does not say."""
        return self.config.vocab_size or None

    def backward(
        self,
        microbatches: Sequence[Batch],
        loss: Loss | LossWithStatistics,
        weight: float,
        statistics: list[Tensor] | None = None,
        further: list[Tensor] | None = None,
        *,
        scale: float = 1.0,
    ) -> list[Tensor]:
        """Do the forwards and backwards of an update; gradients are left in the parameters.

        Args:
            microbatches: this data rank's rows.
            loss: of each.
            weight: what their sum is divided by.
            statistics: takes those of each microbatch, where the loss has any.
            further: takes each microbatch's share (depths,) of the mean losses of the layers that
                predict further, where the loss asks for them; their gradient comes along.
            scale: what all gradients are multiplied by, and the loss is not.

        Returns:
            Each microbatch's share of the loss; an empty list away from the last stage.
        """
        add = self.fixed.rows.sum if self.fixed else None
        of_depths = divisors(microbatches, depths_of(self.config, loss), self.groups, add)
        logged: dict[int, tuple[Tensor | None, Tensor | None]] = {}

        def finish(hidden: Tensor, microbatch: Batch, row_split: RowSplit | None) -> Tensor:
            output = partial(self.output, row_split=row_split)
            found, others, shares = loss(output(hidden), microbatch), None, None
            if isinstance(found, tuple):
                found, others = found
            mine = found / weight
            if of_depths:
                last = self.stages[len(self.tables.placement) - 1]
                shares = further_shares(last, hidden, microbatch, of_depths, output, row_split)
                mean = cast(HasFurther, loss).mtp_weight * shares.mean()
                mine = mine + (mean - mean.detach())
            logged[numbers[id(microbatch)]] = (others, shares)
            return mine if scale == 1.0 else scale_gradient(mine, scale)

        on_device = [self._to_device(microbatch) for microbatch in microbatches]
        numbers = {id(microbatch): number for number, microbatch in enumerate(on_device)}
        schedule = self.tables.training(len(on_device))
        if self.budget is not None:
            self.budget.begin(on_device)
        row_splits = [self.splitter.split(microbatch) for microbatch in microbatches]
        watch = self.stopwatch and self.stopwatch.of([len(each["tokens"]) for each in on_device])
        with watch or nullcontext():
            losses = self.runtime.run(schedule, on_device, finish, row_splits=row_splits)
        if self.budget is not None:
            self.budget.settle(schedule)
        _hand_on(logged, (statistics, further))
        return losses

    def forward(
        self,
        microbatches: Sequence[Batch],
        function: Callable[[Output, Batch], Tensor],
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
    ) -> list[Tensor]:
        """List `function(output, microbatch)` of each; nothing away from the last stage.

        With caches every context rank has the rows whole.
        """
        whole = caches is not None
        return self.runtime.run(
            self.tables.forwards(len(microbatches)),
            [self._to_device(microbatch) for microbatch in microbatches],
            lambda hidden, microbatch, row_split: function(
                self.output(hidden, row_split), microbatch
            ),
            caches=caches,
            row_splits=[None if whole else self.splitter.split(each) for each in microbatches],
        )

    def share(self, result: Tensor | None) -> Tensor:
        """Share what the last stage made (None elsewhere) with every process of its data rank."""
        shared = self.runtime.mailbox.share(result, self.tables.placement[-1])
        if self.groups.layout.context > 1:  # where all have computed it, bits may differ
            shared = shared.to(self.groups.device).contiguous()
            dist.broadcast(shared, self.groups.peer("context", 0), self.groups.group("context"))
        return shared

    def _to_device(self, batch: Batch) -> Batch:
        device = self.groups.device
        if device.type == "cpu":
            return batch
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}

    def output(self, hidden: Tensor, row_split: RowSplit | None = None) -> Output:
        """Build what a loss is given of the last stage's hidden states."""
        if self.own:
            return LogitsOutput(hidden)
        last = self.stages[len(self.tables.placement) - 1]
        weight = last.head_weight
        return HeadOutput(
            hidden,
            self.fixed.gradients.head(weight) if self.fixed else weight,
            self.ops,
            self.groups,
            heads_of(last, self.options.heads),
            softcap=self.config.final_softcap,
            split=self.sequence_parts > 1,
            row_split=row_split,
            make_logits=None if getattr(last, "plain_head", True) else last.head,
        )


def _hand_on(
    logged: Mapping[int, Sequence[Tensor | None]], to: Sequence[list[Tensor] | None]
) -> None:
    """Append the values of microbatches to each list in their order, whatever that of forwards."""
    for number in sorted(logged):
        for takes, given in zip(to, logged[number], strict=True):
            if takes is not None and given is not None:
                takes.append(given.detach())
