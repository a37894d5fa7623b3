"""Forwards and backwards of this process's stages, under any layout and in any precision."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.heads import heads_of
from ms_parallel.engine.loss import Loss, LossWithStatistics, Output
from ms_parallel.engine.microbatches import explain_missing_keys, split_batch
from ms_parallel.engine.mtp import MTPLoss, mtp_depths, mtp_divisors, mtp_losses_of
from ms_parallel.engine.options import EngineOptions
from ms_parallel.engine.output import HeadOutput, LogitsOutput
from ms_parallel.engine.reduction import Reduction
from ms_parallel.engine.report import MicrobatchResult
from ms_parallel.engine.stopwatch import NoStopwatch, Stopwatch
from ms_parallel.errors import ModelError
from ms_parallel.memory.budget import Budget
from ms_parallel.models.batch import Batch, media_of
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.staged import RowSplit, StagedModel
from ms_parallel.operators import Ops
from ms_parallel.operators.packed_rows import move_documents
from ms_parallel.optim.loss_scale import scale_gradient
from ms_parallel.pipeline.choice import ScheduleTables
from ms_parallel.pipeline.runtime import Runtime
from ms_parallel.split.context.splitter import ContextSplitter
from ms_parallel.split.own_model import OwnModelConfig, call_own


class StageRunner:
    """Runs batches through this process's stages by the pipeline schedule.

    Args:
        stages: this process's stages by number.
        config: model configuration.
        plan: model plan.
        groups: process groups of the layout.
        ops: operators of the output head.
        tables: pipeline schedules.
        splitter: splits rows over the context axis.
        options: the engine's options.
        budget: picks each block's recomputation under a memory limit; None without a limit.
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
        splitter: ContextSplitter,
        options: EngineOptions,
        budget: Budget | None = None,
    ) -> None:
        self.stages, self.config, self.plan, self.groups = stages, config, plan, groups
        self.ops, self.tables, self.splitter, self.options = ops, tables, splitter, options
        self.budget = budget
        self.microbatch_size = options.microbatch_size
        self.user_module = isinstance(config, OwnModelConfig)
        self.sequence_parts = groups.layout.tensor if plan.split_sequence else 1
        """Number of slices of a sequence between blocks (sequence parallelism)."""
        self.vocabulary: int | None = config.vocab_size or None
        """Vocabulary size; None if unknown (a user-defined module)."""
        modules = cast(Mapping[int, nn.Module], stages)
        calls = {
            # Without logits, the last stage returns hidden states, and the loss applies the head
            # in chunks that bound memory.
            number: partial(call_own, stage) if self.user_module else partial(stage, logits=False)
            for number, stage in modules.items()
        }
        self.runtime = Runtime(modules, groups, calls, options.sharding)
        self.stopwatch: NoStopwatch | Stopwatch = NoStopwatch()
        """Times a step's forwards and backwards, to distribute rows over ranks of unequal speed."""

    def microbatches(self, batch: Mapping[str, Any], size: int | None = None) -> list[Batch]:
        """Split this data rank's rows into microbatches of `size` rows (default `microbatch_size`).

        Raises:
            ConfigError: the batch is empty, its sequence length is not divisible by the axes that
                split it, or a token is outside the vocabulary.
            ModelError: a key is missing, a tensor has the wrong shape or dtype, or the batch has
                media and the model is text-only.
        """
        if not self.user_module and isinstance(batch, Mapping) and media_of(batch):
            raise ModelError(
                f"the batch has images or audio, but {self.config.model_type} is a text-only model;"
                " use a MultimodalModel, or remove them from the data"
            )
        size = size or self.microbatch_size
        context = self.groups.layout.context
        return split_batch(batch, size, self.sequence_parts, context, self.vocabulary)

    def forward_backward(
        self,
        microbatches: Sequence[Batch],
        loss: Loss | LossWithStatistics,
        weight: float,
        reduction: Reduction,
        scale: float = 1.0,
    ) -> list[MicrobatchResult]:
        """Run a step's forwards and backwards; gradients end up where `reduction` collects them.

        Args:
            microbatches: this data rank's rows.
            loss: computes the loss of a microbatch.
            weight: divisor of the summed loss, the loss weight of the global batch.
            reduction: sums gradients and losses.
            scale: factor on all gradients, but not on the reported losses.

        Returns:
            One result per microbatch, in order; empty except on the last stage.
        """
        depths = mtp_depths(self.config, loss)
        # Summed over data ranks before any backward, because the divisors scale the gradients.
        divisors = mtp_divisors(microbatches, depths, reduction.sum_over_rows)
        batches = [self._to_device(microbatch) for microbatch in microbatches]
        # Computed from the CPU copies, so that splitting does not synchronize with the device.
        row_splits = [self.splitter.split(microbatch) for microbatch in microbatches]
        results: dict[int, MicrobatchResult] = {}

        def compute_loss(number: int, hidden: Tensor) -> Tensor:
            """Return the microbatch's loss to differentiate, and store its result."""
            batch, row_split = batches[number], row_splits[number]
            output = partial(self.output, row_split=row_split, reduction=reduction)
            with explain_missing_keys(batch):
                total, metrics = _with_metrics(loss(output(hidden), batch))
            mean = total / weight  # contribution to the mean loss of the global batch
            mtp_losses = mean.new_zeros(0)
            objective = mean
            if depths:
                last = self.stages[len(self.tables.placement) - 1]
                mtp_losses = mtp_losses_of(last, hidden, batch, divisors, output, row_split)
                mtp = cast(MTPLoss, loss).mtp_weight * mtp_losses.mean()
                objective = mean + (mtp - mtp.detach())  # gradient of MTP, but not its value
            results[number] = MicrobatchResult(
                loss=mean.detach(),
                metrics=metrics.detach() / weight,
                mtp_losses=mtp_losses.detach(),
            )
            # Scaling acts in the backward only, so the reported losses are unscaled.
            return objective if scale == 1.0 else scale_gradient(objective, scale)

        schedule = self.tables.training(len(batches))
        if self.budget is not None:
            self.budget.start_step(batches)
        with self.stopwatch.of([len(batch["tokens"]) for batch in batches]):
            self.runtime.run(
                schedule, batches, compute_loss, row_splits=row_splits, on_gradients=reduction.take
            )
        if self.budget is not None:
            self.budget.end_step(schedule)
        # Schedules may finish microbatches out of order.
        return [results[number] for number in sorted(results)]

    def forward(
        self,
        microbatches: Sequence[Batch],
        function: Callable[[Output, Batch], Tensor],
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
    ) -> list[Tensor]:
        """Return `function(output, microbatch)` of each; empty except on the last stage.

        With caches every context rank processes complete rows.
        """
        batches = [self._to_device(microbatch) for microbatch in microbatches]
        has_caches = caches is not None
        row_splits = [None if has_caches else self.splitter.split(rows) for rows in microbatches]

        def apply(number: int, hidden: Tensor) -> Tensor:
            with explain_missing_keys(batches[number]):
                return function(self.output(hidden, row_splits[number]), batches[number])

        return self.runtime.run(
            self.tables.forwards(len(batches)),
            batches,
            apply,
            caches=caches,
            row_splits=row_splits,
        )

    def broadcast_from_last_stage(self, result: Tensor | None) -> Tensor:
        """Broadcast the last stage's result (None elsewhere) to all processes of its data rank."""
        shared = self.runtime.mailbox.broadcast(result, self.tables.placement[-1])
        if self.groups.layout.context > 1:  # context ranks' results may differ in the last bits
            shared = shared.to(self.groups.device).contiguous()
            dist.broadcast(shared, self.groups.peer("context", 0), self.groups.group("context"))
        return shared

    def _to_device(self, batch: Batch) -> Batch:
        device = self.groups.device
        if device.type == "cpu":
            return batch
        return {
            name: move_documents(value, device)
            if name == "documents"
            else value.to(device, non_blocking=True)
            for name, value in batch.items()
        }

    def output(
        self,
        hidden: Tensor,
        row_split: RowSplit | None = None,
        reduction: Reduction | None = None,
    ) -> Output:
        """Wrap the last stage's hidden states for a loss; pass `reduction` in training."""
        if self.user_module:
            return LogitsOutput(hidden, self.ops)
        last = self.stages[len(self.tables.placement) - 1]
        weight = last.head_weight
        return HeadOutput(
            hidden,
            weight if reduction is None else reduction.head_weight(weight),
            self.ops,
            self.groups,
            heads_of(last, self.options.heads),
            softcap=self.config.final_softcap,
            split=self.sequence_parts > 1,
            row_split=row_split,
            make_logits=None if getattr(last, "plain_head", True) else last.head,
        )


def _with_metrics(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a loss (()) and its statistics (M,), M = 0 for a loss without any."""
    return result if isinstance(result, tuple) else (result, result.new_zeros(0))
