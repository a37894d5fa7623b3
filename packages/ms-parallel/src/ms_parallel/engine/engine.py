"""Runs a model under any layout: one object that trainers of every kind ask for work."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import lay_mesh
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import (
    EngineArguments,
    Given,
    build_stages,
    describe,
    sharded_layout,
)
from ms_parallel.engine.balance.balancer import Balancer, ExpertLoad
from ms_parallel.engine.balance.settings import Balance, balance_of
from ms_parallel.engine.further import HasFurther, depths_of, divisors, further_shares
from ms_parallel.engine.generation import Sampling, generate
from ms_parallel.engine.heads import heads_of, thaw_heads
from ms_parallel.engine.loss import Loss, LossWithStatistics, Output
from ms_parallel.engine.microbatches import cut_batch, measure
from ms_parallel.engine.optimizer import learning_rate
from ms_parallel.engine.options import EngineOptions
from ms_parallel.engine.output import HeadOutput, LogitsOutput
from ms_parallel.engine.rules.grouped import GroupedOptimizer
from ms_parallel.engine.state import load_state, state_of
from ms_parallel.engine.trainable import Trainable
from ms_parallel.errors import ConfigError, ModelError, ParallelError
from ms_parallel.files.untrusted import check_path
from ms_parallel.models.batch import Batch
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.family import family_of
from ms_parallel.models.staged import RowSplit
from ms_parallel.models.tokenizer_files import TokenizerFiles
from ms_parallel.models.weight_names import Rules
from ms_parallel.operators import Ops
from ms_parallel.pipeline.choice import Tables
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.pipeline.runtime import Runtime, call_stage
from ms_parallel.signature import takes
from ms_parallel.split.context.kinds import check_context
from ms_parallel.split.context.splitter import ContextLoad, Splitter
from ms_parallel.split.own_model import OwnModelConfig, call_own
from ms_parallel.split.part import drop_gathered, is_whole_here
from ms_parallel.split.precision import warn_of_slow_bfloat16
from ms_parallel.weights.save import save_model


@frozen(kw_only=True)
class Update:
    """What one update did; the same on every process."""

    loss: float
    """Mean loss over the global batch; NaN where nothing had a loss."""
    grad_norm: float
    """Euclidean norm of the whole gradient, before it was clipped; NaN where nothing had a loss."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch."""
    skipped: Literal["no_targets", "nonfinite"] | None = None
    """Why weights and moments are as before: nothing had a loss, or the gradient was not finite;
    None where the update was performed."""
    statistics: Mapping[str, float] = field(factory=dict)
    """The loss's statistics, by name, each divided by the global weight."""
    mtp_losses: tuple[float, ...] = ()
    """Mean loss of each layer that predicts further, over its own targets; 0 where it has none."""
    experts: ExpertLoad | None = None
    """How tokens were shared out over experts; None without any, or where nothing had a loss."""
    context: ContextLoad | None = None
    """How evenly this data rank's last microbatch was shared out over the context axis, if it was;
    the only value that differs between data ranks."""


class Adapters(Protocol):
    """Small weights that are trained beside a model's own."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The model as it was before, while the block runs."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write them; every process calls it."""


class Engine:
    """A model, its optimizer, and the processes that share them.

    Args:
        model: an architecture's name, a configuration, or a folder with a config.json; the weights
            of a folder that has them are read, each process its part. Or a module of your own (see
            `ms_parallel.split.own_model`), which is taken over with its weights: those of the first
            process, on all.
        layout: how the processes split the work; one process by default.

    Raises:
        LayoutError: the layout does not fit the processes or the model.
        LaunchError: the processes were not started as the layout needs.
        ConfigError: a setting cannot be used as given.
        ScheduleError: there is no such schedule, or it is not right.
        ModelError: the folder's model cannot be read.
    """

    @takes(EngineArguments)
    def __init__(self, model: Given, layout: Layout | None = None, **options: Any) -> None:
        self.options = chosen = EngineOptions(**options)
        layout = chosen.groups.layout if chosen.groups else layout or Layout()
        layout = sharded_layout(layout, chosen.sharding)
        self.config, self.plan = describe(model, chosen.plan, layout, chosen.recompute)
        check_context(chosen.context_attention, self.config, layout)
        self.groups = chosen.groups or connect(layout, device=chosen.device)
        if self.groups.layout != layout:
            self.groups = lay_mesh(layout, self.groups.device)
        if chosen.mixed_precision and dist.get_rank() == 0:
            warn_of_slow_bfloat16(self.device)
        self.ops: Ops = chosen.ops or operators
        self.microbatch_size = chosen.microbatch_size
        self.step = 0
        """Updates asked for so far, skipped ones included."""
        self.tables = Tables(chosen.schedule, layout.pipeline)
        self.placement = self.tables.placement
        """Pipeline rank of each stage."""
        self.stages = build_stages(
            model, self.config, self.plan, self.placement, self.tables.layers, self.groups, chosen
        )
        own = isinstance(model, nn.Module)
        call = call_own if own else call_stage
        self.runtime = Runtime(self.stages, self.groups, call, chosen.sharding)
        self.splitter = Splitter(
            self.config,
            self.groups,
            chosen.context_attention,
            chosen.context_balance,
            2 if chosen.mixed_precision else torch.get_default_dtype().itemsize,
        )
        self.trained = self._trainable(frozen_too=not own)
        mixture = getattr(self.config, "mixture", None)
        self.balancer = Balancer(self.stages, mixture, self.groups, balance_of(chosen))
        self.adapters: Adapters | None = None
        """What is trained instead of the model's own weights; see `adapt`."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.groups.device

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What this process trains, by name."""
        return self.trained.parameters

    @property
    def optimizer(self) -> GroupedOptimizer:
        """The optimizer over them."""
        return self.trained.optimizer

    @property
    def data_rank(self) -> int:
        """Which of the groups of processes that read different rows this one is in."""
        return self.groups.place.rank

    @property
    def data_ranks(self) -> int:
        """How many such groups there are."""
        return self.groups.place.count

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the tensor axis splits a sequence between blocks."""
        return self.groups.layout.tensor if self.plan.split_sequence else 1

    @property
    def vocabulary_size(self) -> int | None:
        """Tokens that the model knows; None where a module of your own does not say."""
        return getattr(self.config, "vocab_size", None)

    @property
    def context(self) -> int | None:
        """Positions of the longest row that the model takes; None where there is no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def module(self) -> nn.Module | None:
        """The whole model, where this process holds all of it and nothing of it is split."""
        if self.groups.layout.world_size > 1 or len(self.stages) > 1:
            return None
        (stage,) = self.stages.values()
        return stage if all(map(is_whole_here, stage.parameters())) else None

    def update(self, batch: Mapping[str, Any], loss: Loss | LossWithStatistics) -> Update:
        """One step of the optimizer on the global batch, of which `batch` is this data rank's rows.

        Args:
            batch: tensors or arrays (b, S) as in the Batch seam; all processes of one data rank
                pass the same.
            loss: summed over microbatches, divided once by its weight over the global batch.

        Raises:
            ConfigError: there are no rows, or the sequence does not divide over `tensor`.
            ParallelError: the gradient is not finite and `on_nonfinite="raise"`.
        """
        rows = self.microbatches(batch)
        weight, tokens = measure(rows, loss, self.groups)
        names = loss.statistics if isinstance(loss, LossWithStatistics) else ()
        update = Update(
            loss=nan,
            grad_norm=nan,
            learning_rate=learning_rate(self.step, self.optimizer.config),
            tokens=tokens,
            skipped="no_targets",
            statistics=dict.fromkeys(names, nan),
        )
        if weight > 0.0:
            update = self._update(rows, loss, weight, names, update)
        self.step += 1
        return update

    def _update(
        self,
        rows: Sequence[Batch],
        loss: Loss | LossWithStatistics,
        weight: float,
        names: Sequence[str],
        update: Update,
    ) -> Update:
        """Perform an update of rows that have a loss."""
        statistics: list[Tensor] = []
        further: list[Tensor] = []
        with self.balancer.accounting(update.tokens):
            losses = self.backward(rows, loss, weight, statistics, further)
        load = self.balancer.collect(update.tokens)
        gradients = self.trained.gradients()
        facts = torch.zeros(2 + len(names) + depths_of(self.config, loss), device=self.device)
        if losses and self.groups.place.speaks_for_rows:
            facts[0] = torch.stack(losses).sum()
            if names:
                facts[2 : 2 + len(names)] = torch.stack(statistics).sum(0) / weight
            if further:
                facts[2 + len(names) :] = torch.stack(further).sum(0)
        facts[1] = self.trained.squared_norm(gradients)
        value, square, *means = self.groups.all_reduce(facts).tolist()
        norm = square**0.5
        finite = isfinite(value) and isfinite(norm)
        self.trained.step(gradients if finite else None, norm, update.learning_rate)
        self.balancer.settle(load if finite else None)
        if not finite and self.options.on_nonfinite == "raise":
            raise ParallelError(
                f"update {self.step}: loss {value}, gradient norm {norm}: not finite; weights are "
                "unchanged; lower the learning rate or look at this batch"
            )
        return evolve(
            update,
            loss=value,
            grad_norm=norm,
            skipped=None if finite else "nonfinite",
            statistics=dict(zip(names, means, strict=False)),
            mtp_losses=tuple(means[len(names) :]),
            experts=load,
            context=self.splitter.load,
        )

    def backward(
        self,
        microbatches: Sequence[Batch],
        loss: Loss | LossWithStatistics,
        weight: float,
        statistics: list[Tensor] | None = None,
        further: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Forwards and backwards of an update; gradients are left in the parameters.

        Args:
            microbatches: this data rank's rows.
            loss: of each.
            weight: what their sum is divided by.
            statistics: takes those of each microbatch, where the loss has any.
            further: takes each microbatch's share (depths,) of the mean losses of the layers that
                predict further, where the loss asks for them; their gradient comes along.

        Returns:
            Each microbatch's share of the loss; an empty list away from the last stage.
        """
        of_depths = divisors(microbatches, depths_of(self.config, loss), self.groups)

        def finish(hidden: Tensor, microbatch: Batch, row_split: RowSplit | None) -> Tensor:
            output = partial(self._output, row_split=row_split)
            found = loss(output(hidden), microbatch)
            if isinstance(found, tuple):
                found, others = found
                if statistics is not None:
                    statistics.append(others.detach())
            if not of_depths:
                return found / weight
            last = self.stages[len(self.placement) - 1]
            shares = further_shares(last, hidden, microbatch, of_depths, output, row_split)
            if further is not None:
                further.append(shares.detach())
            mean = cast(HasFurther, loss).mtp_weight * shares.mean()
            return found / weight + (mean - mean.detach())

        on_device = [self._to_device(microbatch) for microbatch in microbatches]
        return self.runtime.run(
            self.tables.training(len(on_device)),
            on_device,
            finish,
            row_splits=[self.splitter.split(microbatch) for microbatch in microbatches],
        )

    def recorded_update(
        self, batch: Mapping[str, Any], loss: Loss | LossWithStatistics
    ) -> tuple[Update, Recorder]:
        """`update`, and a recorder of what this rank computed when; every process calls it.

        `ms_parallel.pipeline.gathering.recorded_step` gathers those of all ranks.
        """
        recorder = self.runtime.recorder = Recorder(self.device)
        try:
            return self.update(batch, loss), recorder
        finally:
            self.runtime.recorder = None

    @torch.no_grad()
    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor]
    ) -> Tensor:
        """`function(output, batch)` of each microbatch, (b, ...), put together.

        Returns:
            The result for this data rank's rows, on every process of that data rank.
        """
        results = self.forward(self.microbatches(batch), function)
        for stage in self.stages.values():
            drop_gathered(stage)
        return self.share(torch.cat(results) if results else None)

    def forward(
        self,
        microbatches: Sequence[Batch],
        function: Callable[[Output, Batch], Tensor],
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
    ) -> list[Tensor]:
        """`function(output, microbatch)` of each; an empty list away from the last stage.

        With caches every context rank has the rows whole.
        """
        whole = caches is not None
        return self.runtime.run(
            self.tables.forwards(len(microbatches)),
            [self._to_device(microbatch) for microbatch in microbatches],
            lambda hidden, microbatch, row_split: function(
                self._output(hidden, row_split), microbatch
            ),
            caches=caches,
            row_splits=[None if whole else self.splitter.split(each) for each in microbatches],
        )

    def share(self, result: Tensor | None) -> Tensor:
        """What the last stage has made (None elsewhere), on every process of its data rank."""
        shared = self.runtime.mailbox.share(result, self.placement[-1])
        if self.groups.layout.context > 1:  # where all have computed it, bits may differ
            shared = shared.to(self.device).contiguous()
            dist.broadcast(shared, self.groups.peer("context", 0), self.groups.group("context"))
        return shared

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all data ranks, in their order; each gives as many."""
        if self.data_ranks == 1:
            return rows
        mine = rows.contiguous().to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.data_ranks)]
        dist.all_gather(parts, mine, group=self.groups.group("rows"))
        return torch.cat(parts).to(rows.device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_token: int | Collection[int] | Literal["eos"] | None = "eos",
        **sampling: Any,
    ) -> list[list[int]]:
        """Continue each of this data rank's prompts; see `ms_parallel.engine.generation`.

        Args:
            prompts: tokens of each prompt, at least one.
            max_new_tokens: how many to write at most.
            stop_token: ends a row: one token or any of several; by default those that the model's
                configuration names as `eos_token_id`. None lets each row run to max_new_tokens.
            sampling: fields of `Sampling`: temperature, top_k, top_p, min_p, seed.

        Returns:
            The new tokens of each row, without the prompt, on every process of the data rank.
        """
        return generate(
            self,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(**sampling),
            stops=self._stops(stop_token),
        )

    def _stops(self, stop_token: int | Collection[int] | str | None) -> Collection[int]:
        chosen: Any = self.config.eos_token_id if stop_token == "eos" else stop_token
        return () if chosen is None else (chosen,) if isinstance(chosen, int) else tuple(chosen)

    def adapt(self, make: Callable[[Mapping[int, nn.Module]], Adapters]) -> None:
        """Train small weights beside the model's own, which are frozen, from now on.

        Args:
            make: takes this process's stages by number, freezes them and puts adapters into them,
                in place; what it returns is `adapters`. Extra heads stay trained.

        Raises:
            ConfigError: the layout splits matrices, sequences or experts, or a rank has several
                stages.
        """
        layout = self.groups.layout
        several = len(set(self.placement)) < len(self.placement)
        if max(layout.tensor, layout.context, layout.expert) > 1 or several:
            raise ConfigError(
                "adapters are trained over data and pipeline with one stage a rank; leave tensor,"
                " context and expert at 1 in the layout, and choose a schedule such as 1f1b"
            )
        self.adapters = make(self.stages)
        for stage in self.stages.values():
            thaw_heads(stage, self.options.heads)
        self.trained = self._trainable(frozen_too=False)
        # The routers are frozen with the rest: what they choose is counted alone.
        self.balancer.balance = Balance(method="none", coefficient=0.0)

    def save(
        self, folder: str | Path, *, tokenizer: str | Path | TokenizerFiles | None = None
    ) -> None:
        """Write the model to a folder that `load_model` and transformers read; all processes call.

        Args:
            folder: see `save_model`.
            tokenizer: whose files go beside the model.

        Raises:
            ModelError: it is a module of your own, or the folder cannot be written.
            NonFiniteError: a weight is NaN or infinite.
        """
        check_path("folder", folder, error=ModelError, written="folder")
        if isinstance(tokenizer, str | Path):
            check_path("tokenizer", tokenizer, error=ModelError)
        if isinstance(self.config, OwnModelConfig):
            raise ModelError(
                f"a {self.config.model_type} of your own is saved by your own code; take"
                " engine.state_dict()"
            )
        save_model(list(self.stages.values()), folder, tokenizer=tokenizer)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, moments and counters by name, ready for torch.distributed.checkpoint."""
        return state_of(self.trained, self.step, self.balancer.state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave; another layout's goes through the checkpoint first.

        Raises:
            CheckpointError: names or shapes are not this engine's.
        """
        self.step = load_state(self.trained, state, self.balancer.state)

    def _trainable(self, *, frozen_too: bool) -> Trainable:
        return Trainable(
            self.stages,
            self.plan,
            self.placement,
            self.groups,
            self.options.optimizer,
            weights=self._weight_rules,
            frozen_too=frozen_too,
            offload=self.options.offload == "moments",
        )

    def _weight_rules(self) -> Rules:
        if isinstance(self.config, OwnModelConfig):
            return {}
        return family_of(self.config).weights(self.config)

    def microbatches(self, batch: Mapping[str, Any], size: int | None = None) -> list[Batch]:
        """This data rank's rows, as many at a time as `microbatch_size` or `size` says.

        Raises:
            ConfigError: there are no rows, or the sequence does not divide.
        """
        context = self.groups.layout.context
        return cut_batch(batch, size or self.microbatch_size, self.sequence_parts, context)

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def _output(self, hidden: Tensor, row_split: RowSplit | None = None) -> Output:
        if isinstance(self.config, OwnModelConfig):
            return LogitsOutput(hidden)
        last = self.stages[len(self.placement) - 1]
        heads = heads_of(last, self.options.heads)
        return HeadOutput(
            hidden,
            last.head_weight,
            self.ops,
            self.groups,
            heads,
            softcap=self.config.final_softcap,
            split=self.sequence_parts > 1,
            row_split=row_split,
            make_logits=None if getattr(last, "plain_head", True) else last.head,
        )
