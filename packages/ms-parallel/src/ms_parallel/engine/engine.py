"""Training and inference of a model under any parallel layout; all trainers build on it."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.arguments import check_callable, check_type, shown
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import create_groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.adapters import (
    Adapters,
    SplitAdapters,
    check_adaptable,
    split_adapters,
)
from ms_parallel.engine.assembly import (
    EngineArguments,
    ModelSource,
    build_float32_stages,
    build_stages,
    check_devices,
    load_multimodal,
    resolve_model,
    sharded_layout,
)
from ms_parallel.engine.auditor import Auditor, NoAuditor
from ms_parallel.engine.balance.balancer import ExpertBalancer
from ms_parallel.engine.balance.settings import BalanceSettings, balance_of
from ms_parallel.engine.generation import Sampling, generate, stop_tokens
from ms_parallel.engine.heads import thaw_heads
from ms_parallel.engine.loss import Loss, LossWithStatistics, Output
from ms_parallel.engine.mtp import mtp_depths
from ms_parallel.engine.options import EngineOptions
from ms_parallel.engine.reduction import Reduction, SummedReduction
from ms_parallel.engine.report import Skipped, StepReport, StepTotals
from ms_parallel.engine.reproducible.check import check_reproducible, separate_tied_pair
from ms_parallel.engine.reproducible.reduction import OrderedReduction
from ms_parallel.engine.row_check import RowCheck
from ms_parallel.engine.settings import check_audit
from ms_parallel.engine.stage_runner import StageRunner
from ms_parallel.engine.state import SCALE, align_replicas, load_state, state_of
from ms_parallel.engine.trainable import Trainable
from ms_parallel.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    ModelError,
    ParallelError,
)
from ms_parallel.files.untrusted import check_path
from ms_parallel.host_copy import HostCopy
from ms_parallel.memory.budget import Budget
from ms_parallel.memory.modes import ACTIVATIONS, MOMENTS, budget_bytes
from ms_parallel.models.batch import Batch
from ms_parallel.models.family import family_of
from ms_parallel.models.huggingface.multimodal import MultimodalModel, is_multimodal
from ms_parallel.models.staged import StagedModel
from ms_parallel.models.tokenizer_files import TokenizerFiles
from ms_parallel.models.weight_names import WeightRules
from ms_parallel.operators import Ops
from ms_parallel.optim.clipping import StepLimits
from ms_parallel.optim.grouped import GroupedOptimizer
from ms_parallel.optim.loss_scale import LossScaler
from ms_parallel.optim.optimizer import learning_rate
from ms_parallel.pipeline.choice import ScheduleTables
from ms_parallel.pipeline.recorder import ComputationRecorder
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.signature import takes
from ms_parallel.split.compiled import check_compiled, compile_blocks, compiles_by_default
from ms_parallel.split.context.kinds import check_context
from ms_parallel.split.context.splitter import ContextSplitter
from ms_parallel.split.float8 import check_float8
from ms_parallel.split.own_model import OwnModelConfig, check_accepts_cache, warn_without_documents
from ms_parallel.split.part import drop_gathered, is_plain_tensor
from ms_parallel.split.precision import warn_of_slow_bfloat16
from ms_parallel.split.precision_choice import precision_name
from ms_parallel.weights.multimodal import save_multimodal
from ms_parallel.weights.save import save_model

logger = logging.getLogger(__name__)

NO_LIMITS = StepLimits()


class Engine:
    """A model and its optimizer, distributed over the processes of a layout.

    Args:
        model: name of an architecture, a configuration, or a folder with a config.json. Each rank
            reads its part of the folder's weights, if the folder has weights; the model of a folder
            with images or audio is a `MultimodalModel`. Or your own nn.Module (see
            `ms_parallel.split.own_model`); all ranks start with the weights of rank 0.
        layout: parallel layout. None: a single process.

    Raises:
        LayoutError: the layout does not fit the processes or the model.
        LaunchError: the processes were not started as the layout requires.
        ConfigError: an invalid setting.
        ScheduleError: an unknown or invalid schedule.
        ModelError: the folder's model cannot be read.
    """

    @takes(EngineArguments)
    def __init__(self, model: ModelSource, layout: Layout | None = None, **options: Any) -> None:
        self.options = settings = EngineOptions(**options)
        check_type("layout", layout, Layout, "a Layout", error=LayoutError, optional=True)
        layout = settings.groups.layout if settings.groups else layout or Layout()
        layout = sharded_layout(layout, settings.sharding)
        if isinstance(model, str | Path) and is_multimodal(model):
            model = load_multimodal(model, settings)
        # All checks that need no communication come before `connect`: a bad setting then fails
        # at once on every rank, and none waits for another.
        self.config, self.plan = resolve_model(model, settings.plan, layout, settings.recompute)
        if settings.reproducible:
            check_reproducible(
                layout,
                self.plan,
                self.config,
                settings.float8,
                prepared=settings.prepare is not None,
            )
        check_context(settings.context_attention, self.config, layout)
        check_devices(
            settings.groups.devices if settings.groups else settings.device, layout, settings
        )
        if user_module := isinstance(model, nn.Module):
            check_audit(settings, "a module of your own, which cannot be built a second time")
        self.groups = settings.groups or connect(layout, device=settings.device)
        if isinstance(model, nn.Module) and dist.get_rank() == 0:
            warn_without_documents(model)
        # `sharding` may ask for other replicas than the groups that were passed.
        if self.groups.layout != layout:
            self.groups = create_groups(layout, self.device, self.groups.devices)
        if settings.mixed_precision is True and dist.get_rank() == 0:
            warn_of_slow_bfloat16(self.device)
        self.ops: Ops = settings.ops or operators
        self.step_count = 0
        """Steps so far, including skipped ones."""
        self.tables = ScheduleTables(settings.schedule, layout.pipeline)
        self.placement = self.tables.placement
        """Pipeline rank of each stage."""
        self.compiled = self._compiles(layout)
        """Whether the training of blocks is compiled."""
        self.stages = build_stages(
            model,
            self.config,
            self.plan,
            self.placement,
            self.tables.layers,
            self.groups,
            settings,
            compiled=self.compiled,
        )
        if self.compiled:
            flex = self.device.type == "cuda" and self.ops is operators
            for stage in cast(Mapping[int, nn.Module], self.stages).values():
                compile_blocks(stage, self.plan, flex_attention=flex)
        self.splitter = ContextSplitter(
            self.config,
            self.groups,
            settings.context_attention,
            settings.context_balance,
            2 if settings.mixed_precision else torch.get_default_dtype().itemsize,
        )
        budget = budget_bytes(settings.recompute)
        modules = cast(Mapping[int, nn.Module], self.stages)
        self.runner = self._runner(
            self.stages, None if budget is None else Budget(modules, self.groups, budget)
        )
        self.runner.runtime.offload = settings.offload in ACTIVATIONS and self.device.type != "cpu"
        if settings.offload in ACTIVATIONS and not self.runner.runtime.offload:
            logger.warning(
                "offload=%r has no effect on activations on a CPU: they are in host memory already",
                settings.offload,
            )
        self.trained = self._trainable(include_frozen=not user_module)
        self.reduction = self._reduction()
        mixture = getattr(self.config, "mixture", None)
        self.balancer = ExpertBalancer(self.stages, mixture, self.groups, balance_of(settings))
        self.row_check = RowCheck(self.groups)
        self.scaler = LossScaler(settings.scaling)
        self.auditor = self._auditor() if settings.audit_every else NoAuditor()
        self.adapters: Adapters | None = None
        """Adapters that are trained instead of the model's weights; see `adapt`."""

    def _compiles(self, layout: Layout) -> bool:
        """Return whether blocks are compiled; raise if they cannot be as the user asks.

        Raises:
            ConfigError: compile=True and the model, layout or another setting forbids it, or the
                schedule forbids float8.
        """
        settings = self.options
        schedule = self.tables.choice
        # A schedule chosen by name is built for each step; 4 microbatches per rank serve as a
        # sample.
        if not isinstance(schedule, Schedule):
            schedule = self.tables.training(4 * layout.pipeline)
        check_float8(settings.float8, schedule)
        if settings.compile is False:
            return False
        if settings.compile == "auto":
            return compiles_by_default(self.config, layout, settings, schedule, self.device)
        check_compiled(self.config, layout, settings, schedule)
        return True

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self.groups.device

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Local shards of the trainable parameters, by name."""
        return self.trained.parameters

    @property
    def optimizer(self) -> GroupedOptimizer:
        """Optimizer of the trainable parameters."""
        return self.trained.optimizer

    @property
    def data_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.groups.place.rank

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.groups.place.count

    @property
    def row_parts(self) -> int:
        """Number of parts that a sequence is split into; it must divide the sequence length."""
        return self.groups.layout.row_parts

    @property
    def vocabulary_size(self) -> int | None:
        """Vocabulary size; None if your own module's configuration lacks one."""
        return getattr(self.config, "vocab_size", None)

    @property
    def context(self) -> int | None:
        """Maximum sequence length of the model; None if unlimited."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def module(self) -> nn.Module | None:
        """The complete model; None if it is split over stages or processes."""
        if self.groups.layout.world_size > 1 or len(self.stages) > 1:
            return None
        (stage,) = self.stages.values()
        return stage if all(map(is_plain_tensor, stage.parameters())) else None

    def step(
        self,
        batch: Mapping[str, Any],
        loss: Loss | LossWithStatistics,
        *,
        limits: StepLimits = NO_LIMITS,
    ) -> StepReport:
        """Take one optimizer step on this data rank's rows of the global batch.

        Args:
            batch: tensors or arrays (b, S) of the Batch interface. All processes of a data rank
                must pass the same rows, and data ranks different ones; this is checked.
            loss: loss summed over microbatches, then divided by its weight in the global batch.
            limits: largest loss and gradient norm; a step with larger ones is skipped.

        Raises:
            ConfigError: the batch is empty, the sequence length is not divisible by `tensor`, data
                ranks have the same rows, or processes of one data rank have different rows.
            ParallelError: the loss or gradient is not finite and `on_nonfinite="raise"`.
        """
        if not hasattr(loss, "weight"):
            raise ConfigError(f"loss must be a Loss, got {shown(loss)}")
        check_type("limits", limits, StepLimits, "StepLimits", error=ConfigError)
        microbatches = self.runner.microbatches(batch, self.reduction.microbatch_size)
        # The divisor of the loss must be known before the forward pass: one all-gather of counts.
        counts = self.reduction.count(microbatches, loss)
        tokens = counts.tokens
        self.row_check.check_counts(counts.local, counts.by_data_rank)
        rate = learning_rate(self.optimizer.update_count, self.optimizer.config)
        scale = self.scaler.factor
        loss_scale = scale if self.scaler.settings else None
        metrics = loss.statistics if isinstance(loss, LossWithStatistics) else ()
        if counts.weight == 0.0:  # no targets on any rank: nothing to compute
            self.step_count += 1
            return StepReport(
                learning_rate=rate,
                tokens=tokens,
                skipped="no_targets",
                loss_scale=loss_scale,
                statistics=dict.fromkeys(metrics, nan),
            )
        with self.balancer.count_tokens(tokens, scale), self.reduction.numerics():
            results = self.runner.forward_backward(
                microbatches, loss, counts.weight, self.reduction, scale
            )
        router_sums = self.balancer.reduce()
        # Unscaled before the norm, so that clipping and reports see true gradients.
        gradients = self.scaler.unscale(self.reduction.gradients())
        mtp = mtp_depths(self.config, loss)
        # One all-reduce.
        sums = self.reduction.totals(results, len(metrics), mtp, gradients, self.row_check.terms())
        copies = HostCopy(sums, *router_sums)
        # Queued before the host knows the sums, so the device is never idle. Not with an audit,
        # which needs the weights before the update, or suspicious rows, which may end the run.
        is_queued = not (
            self.row_check.suspicion or self.auditor.is_due(self.step_count + 1)
        ) and self.trained.queue(gradients, sums, limits, rate)
        # The only host synchronization of the step.
        host_sums, *router_sums_on_host = copies.wait()
        totals = StepTotals.of(host_sums, len(metrics))
        load = self.balancer.load_of(router_sums_on_host, tokens)
        try:
            self.row_check.check_totals(totals.row_terms)
        except ConfigError:
            # Gradients of wrong rows must not enter a later step if the caller continues.
            self.trained.zero_grad()
            raise
        skipped = self._skip_reason(totals, limits)
        if totals.grad_norm == 0.0 and self.step_count == 0 and dist.get_rank() == 0:
            logger.warning(
                "the first gradient is exactly 0, so the model will not train; check the loss"
                " weights, frozen parameters and initial weights"
            )
        # Before the update, since an audit needs the weights that gave these gradients.
        audit = self.auditor.audit(
            self.step_count + 1, microbatches, loss, counts, totals, gradients
        )
        if is_queued and not any(totals.row_terms):
            self.optimizer.update_count += skipped is None
        else:
            # None skips the update, but steps, counters and hooks advance on all ranks alike.
            self.trained.apply(None if skipped else gradients, totals.grad_norm, rate)
        self.balancer.update_bias(None if skipped else load)
        self.trained.zero_grad()
        # The other reasons to skip say nothing about the loss scale.
        if skipped in (None, "overflow"):
            self.scaler.adjust(overflow=skipped is not None)
        if skipped == "nonfinite" and self.options.on_nonfinite == "raise":
            raise ParallelError(
                f"update {self.step_count}: loss {totals.loss} and gradient norm"
                f" {totals.grad_norm} are not finite; weights are unchanged; lower the learning"
                " rate or inspect this batch"
            )
        self.step_count += 1
        return StepReport(
            loss=totals.loss,
            grad_norm=totals.grad_norm,
            learning_rate=rate,
            tokens=tokens,
            skipped=skipped,
            loss_scale=loss_scale,
            statistics=dict(zip(metrics, totals.metrics, strict=True)),
            mtp_losses=totals.mtp_losses,
            experts=load,
            context=self.splitter.load,
            audit=audit,
        )

    def _skip_reason(self, totals: StepTotals, limits: StepLimits) -> Skipped | None:
        """Return the reason to skip the step, or None; the same on all ranks, as totals are."""
        if not (isfinite(totals.loss) and isfinite(totals.grad_norm)):
            return "overflow" if self.scaler.may_overflow(totals.loss) else "nonfinite"
        return None if limits.allow(totals.loss, totals.grad_norm) else "refused"

    def record_step(
        self,
        batch: Mapping[str, Any],
        loss: Loss | LossWithStatistics,
        *,
        limits: StepLimits = NO_LIMITS,
    ) -> tuple[StepReport, ComputationRecorder]:
        """Take a step and record the timeline of this rank's computations. All processes call it.

        `ms_parallel.pipeline.recorder.recorded_step` gathers the recordings of all ranks.
        """
        recorder = self.runner.runtime.recorder = ComputationRecorder(self.device)
        try:
            return self.step(batch, loss, limits=limits), recorder
        finally:
            self.runner.runtime.recorder = None

    @torch.no_grad()
    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor]
    ) -> Tensor:
        """Apply `function(output, batch)` to each microbatch and concatenate the results.

        Returns:
            Results (b, ...) for this data rank's rows, on every process of the data rank.

        Raises:
            ConfigError: processes of one data rank have different rows.
        """
        check_callable("function", function, error=ConfigError)
        microbatches = self.runner.microbatches(batch)
        self.row_check.compare_within(microbatches)
        results = self.runner.forward(microbatches, function)
        # No backward follows that would free gathered weights.
        for stage in self.stages.values():
            drop_gathered(stage)
        return self.runner.broadcast_from_last_stage(torch.cat(results) if results else None)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all data ranks in rank order; all must have the same number."""
        if self.data_ranks == 1:
            return rows
        local = rows.contiguous().to(self.groups.message_device)
        parts = [torch.empty_like(local) for _ in range(self.data_ranks)]
        dist.all_gather(parts, local, group=self.groups.group("rows"))
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
            prompts: token ids of each prompt, at least one per prompt.
            max_new_tokens: maximum number of new tokens per prompt.
            stop_token: token or tokens that end a sequence. "eos": the `eos_token_id` of the
                model's configuration. None: always generate max_new_tokens.
            sampling: fields of `Sampling`: temperature, top_k, top_p, min_p, seed.

        Returns:
            The new tokens of each prompt, without the prompt, on every process of the data rank.

        Raises:
            ConfigError: processes of one data rank have different prompts, or a prompt is empty.
        """
        if self.runner.user_module:
            for stage in cast(Mapping[int, nn.Module], self.stages).values():
                check_accepts_cache(stage)
        return generate(
            self.runner,
            prompts,
            compare=self.row_check.compare_within,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(**sampling),
            stops=stop_tokens(self.config, stop_token),
        )

    def adapt(self, make: Callable[[Mapping[int, nn.Module]], Adapters]) -> None:
        """Freeze the model's weights and train adapters from now on.

        Args:
            make: function that takes this process's stages by number, freezes them, inserts
                adapters in place and returns them. Extra heads stay trainable.

        Raises:
            ConfigError: a rank has several stages, or the layout splits weights and the adapters
                are not `SplitAdapters`.
        """
        check_callable("make", make, error=ConfigError)
        check_audit(self.options, "adapters, which a second model would lack")
        self.adapters = make(self.stages)
        check_adaptable(self.groups.layout, self.placement, self.adapters)
        if isinstance(self.adapters, SplitAdapters):
            styles = self.adapters.styles
            self.plan = evolve(self.plan, tensor={**styles, **self.plan.tensor})
            split_adapters(self.stages, styles, self.plan, self.groups)
        for stage in self.stages.values():
            # Heads were frozen with the rest of the model.
            thaw_heads(stage, self.options.heads)
        # The set of trained parameters has changed, so everything derived from it is rebuilt.
        self.trained = self._trainable(include_frozen=False)
        self.reduction = self._reduction()
        # Routers are frozen too: their choices are counted, but not balanced.
        self.balancer.balance = BalanceSettings(method="none", coefficient=0.0)

    def save(
        self,
        folder: str | Path,
        *,
        tokenizer: str | Path | TokenizerFiles | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Save the model to a folder for `load_model` and transformers. All processes call it.

        Args:
            folder: output folder; see `save_model`.
            tokenizer: tokenizer or folder whose tokenizer files are copied.
            dtype: dtype of the saved parameters. None: unchanged.

        Raises:
            ModelError: the model is your own module, or the folder cannot be written.
            NonFiniteError: a weight is NaN or infinite.
        """
        check_path("folder", folder, error=ModelError, written="folder")
        if isinstance(tokenizer, str | Path):
            check_path("tokenizer", tokenizer, error=ModelError)
        stage = cast(nn.Module | None, self.stages.get(0))
        if isinstance(stage, MultimodalModel):
            save_multimodal(stage, Path(folder), tokenizer=tokenizer, dtype=dtype)
            return
        if isinstance(self.config, OwnModelConfig):
            raise ModelError(
                f"save() writes Hugging Face folders, and {self.config.model_type} is your own"
                " module; save engine.state_dict() instead"
            )
        save_model(list(self.stages.values()), folder, tokenizer=tokenizer, dtype=dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, optimizer state and counters for torch.distributed.checkpoint.

        With mixed device types all processes must call it, since it synchronizes replicas.
        """
        extra_state = self._extra_state()
        state = state_of(self.trained, self.step_count, extra_state)
        align_replicas(state, self.trained, extra_state, self.groups)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict` of the same layout; checkpoints convert between layouts.

        Raises:
            CheckpointError: names or shapes are not this engine's.
        """
        check_type("state", state, Mapping, "a result of state_dict()", error=CheckpointError)
        extra_state = self._extra_state()
        self.step_count = load_state(self.trained, state, extra_state)
        # `load_state` has copied the saved values into these tensors.
        self.scaler.load(extra_state[SCALE])

    def _extra_state(self) -> dict[str, Tensor]:
        """State besides weights and optimizer state that the next step depends on."""
        return {**self.balancer.state, SCALE: self.scaler.state}

    def _auditor(self) -> Auditor:
        layers, name = self.tables.layers, precision_name(self.options.mixed_precision)
        name = name if self.options.float8 == "none" else "float8"

        def build() -> StageRunner:
            stages = build_float32_stages(
                self.config, self.placement, layers, self.groups, self.options
            )
            return self._runner(stages)

        every = self.options.audit_every or 0
        return Auditor(self.stages, self.trained, self.balancer, build, name, every)

    def _runner(
        self, stages: Mapping[int, StagedModel], budget: Budget | None = None
    ) -> StageRunner:
        return StageRunner(
            stages,
            self.config,
            self.plan,
            self.groups,
            ops=self.ops,
            tables=self.tables,
            splitter=self.splitter,
            options=self.options,
            budget=budget,
        )

    def _trainable(self, *, include_frozen: bool) -> Trainable:
        return Trainable(
            self.stages,
            self.plan,
            self.placement,
            self.groups,
            self.options.optimizer,
            weights=self._weight_rules,
            include_frozen=include_frozen,
            offload=self.options.offload in MOMENTS,
        )

    def _reduction(self) -> Reduction:
        """Choose how gradients and losses are summed: fast, or in a fixed order (reproducible)."""
        if not self.options.reproducible:
            return SummedReduction(self.trained)
        prepared = self.options.prepare is not None
        copy = separate_tied_pair(self.plan, self.config, self.placement, prepared)
        return OrderedReduction(self.stages, self.trained, copy)

    def _weight_rules(self) -> WeightRules:
        if isinstance(self.config, OwnModelConfig):
            return {}
        return family_of(self.config).weights(self.config)
