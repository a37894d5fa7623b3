"""Checks a model, its dataset, options and layout against one another; builds the engine."""

from pathlib import Path
from typing import Any, Literal

import torch
from attrs import fields

from ms_parallel import checkpoint
from ms_parallel.cluster import process
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.layout import Layout, Place
from ms_parallel.cluster.partial_layout import PartialLayout
from ms_parallel.engine.assembly import check_devices, sharded_layout
from ms_parallel.engine.balance.settings import balance_of
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.microbatches import check_length
from ms_parallel.engine.reproducible.check import check_reproducible
from ms_parallel.engine.settings import EngineSettings
from ms_parallel.errors import ConfigError
from ms_parallel.events import OnEvent
from ms_parallel.models.family import family_of
from ms_parallel.models.registry import architecture, model_plan
from ms_parallel.optim.optimizer import OptimizerConfig, optimizer_of
from ms_parallel.pipeline.choice import SEARCH
from ms_parallel.pipeline.layer_split import ScheduleChoice
from ms_parallel.planner.searched_schedule import SearchedSchedule
from ms_parallel.schedules.generators.registry import GENERATORS
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.context.kinds import check_context
from ms_parallel.training.dataset import stream_source
from ms_parallel.training.optional import data_package, operators_of
from ms_parallel.training.options import AUTO, Options
from ms_parallel.training.rows_per_rank.assignment import RowAssignment
from ms_parallel.training.rows_per_rank.setting import check_rows_per_rank
from ms_parallel.training.tokenizer import with_ends
from ms_parallel.used_settings import UsedIf, check_used
from ms_parallel.weights.load import has_weights

GIB = 1 << 30
VOCABULARY_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of this, so that tensor parallelism divides it."""
MAX_TOKENS = 1 << 24
"""Maximum tokens of the microbatch whose document boundaries are read from the dataset."""


def layout_of(options: Options) -> Layout:
    """Return the requested layout; all ranks on data if unset or planned later."""
    requested = options.parallel_config
    if isinstance(requested, PartialLayout):
        return requested.fill(process.world_size())
    if requested is None or requested == AUTO:
        return Layout(data=process.world_size())
    return requested


def fit_model(options: Options, layout: Layout, shards: Path | None) -> Any:
    """Build the model's configuration and check it against the data, options and layout.

    Args:
        options: options of the run.
        layout: layout of the run.
        shards: dataset that sets the vocabulary of a model without one. None: not built
            yet, so `vocab_size` does.

    Raises:
        ConfigError: the vocabulary or sequence_length does not fit.
        LayoutError: the layout does not fit the model.
    """
    has_vocabulary = "vocab_size" in options.model_config or options.model_folder is not None
    tokens = (
        options.vocab_size if shards is None else data_package().inspect(shards).vocabulary_size
    )
    overrides = dict(options.model_config)
    if not has_vocabulary:
        overrides["vocab_size"] = -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    config = architecture(options.model_arch, overrides)
    if shards is not None and config.vocab_size < tokens:
        raise ConfigError(
            f"the model's vocabulary of {config.vocab_size} does not match the shards in"
            f" {shards}, which have {tokens} tokens; set vocab_size of model_config to at least"
            f" {tokens}, or build the shards with the model's tokenizer"
        )
    check_fit(options, layout, config)
    check_devices(options.devices, sharded_layout(layout, options.sharding), options)
    return config if shards is None else with_ends(config, shards, options.model_folder)


def check_fit(options: Options, layout: Layout, config: Any) -> None:
    """Check a model's configuration against the options and the layout.

    Raises:
        ConfigError: sequence_length, batch_size or a setting does not fit.
        LayoutError: the layout does not fit the model.
    """
    _check_sizes(options, layout, config)
    balance_of(options).of(getattr(config, "mixture", None))
    if options.mtp_weight and not config.mtp_layers:  # 0 is met by a model without such layers
        rule = UsedIf("mtp_weight", "by models with layers for multi-token prediction")
        check_used(options, (rule,), error=ConfigError)
    family_of(config).check_layout(config, layout)
    check_context(options.context_attention, config, layout)
    if options.reproducible:
        check_reproducible(layout, model_plan(config), config, options.float8, prepared=False)


def _check_sizes(options: Options, layout: Layout, config: Any) -> None:
    length = options.sequence_length
    max_positions = getattr(config, "max_position_embeddings", length)  # Transformer-XL: no limit
    if max_positions is not None and length > max_positions:
        raise ConfigError(
            f"sequence_length={length} is longer than the model's {max_positions} positions; lower"
            " it, or raise max_position_embeddings of model_config"
        )
    tensor = layout.tensor if model_plan(config).split_sequence else 1
    check_length("sequence_length", length, tensor=tensor, context=layout.context)
    if options.batch_size % layout.data_ranks:
        raise ConfigError(
            f"batch_size={options.batch_size} does not divide over data={layout.data_ranks}; use a"
            f" multiple of {layout.data_ranks}"
        )
    check_rows_per_rank(
        options.shares,
        layout,
        batch_size=options.batch_size,
        microbatch_size=microbatch(options, layout),
        sharding=options.sharding,
        fixed_schedule=not (isinstance(options.schedule, str) and options.schedule in GENERATORS),
    )
    rows, size = options.batch_size // layout.data_ranks, options.microbatch_size
    if isinstance(size, int) and rows % size and options.schedule == SEARCH:
        raise ConfigError(
            f"microbatch_size={size} does not divide the {rows} samples of a data rank, and"
            f" schedule='search' needs microbatches of equal size; use a divisor of {rows}"
        )


def first_documents(options: Options, rows: int, shards: Path | None) -> torch.Tensor | None:
    """Document ids (rows, S) int32 of the dataset's first rows; None without a dataset.

    Raises:
        ConfigError: the rows have more than `MAX_TOKENS` tokens.
    """
    if shards is None:
        return None
    if rows * options.sequence_length > MAX_TOKENS:
        raise ConfigError(
            f"a microbatch of {rows:,} rows of {options.sequence_length:,} tokens exceeds"
            f" {MAX_TOKENS:,} tokens; lower batch_size, or set microbatch_size"
        )
    stream = data_package().TokenStream(
        stream_source(shards, options),
        sequence_length=options.sequence_length,
        batch_size=rows,
        seed=options.seed,
    )
    return torch.as_tensor(next(stream)["documents"])


def microbatch(options: Options, layout: Layout) -> int | None:
    """Return the microbatch size in rows; None for all rows at once.

    By default a pipeline gets the largest size that leaves two microbatches per stage. It is 1 if
    training must be bitwise reproducible.
    """
    if options.reproducible:
        return 1
    size = options.microbatch_size
    if isinstance(size, int):
        return size
    if layout.pipeline == 1:
        return None
    rows = options.batch_size // layout.data_ranks
    # A schedule table fixes the number of microbatches.
    if isinstance(options.schedule, Schedule) and rows % options.schedule.microbatches == 0:
        return rows // options.schedule.microbatches
    sizes = [n for n in range(1, rows + 1) if rows % n == 0 and rows // n >= 2 * layout.pipeline]
    return max(sizes, default=1)


def row_assignment(options: Options, layout: Layout, place: Place, emit: OnEvent) -> RowAssignment:
    """Choose the initial rows per data rank and the minimum of each.

    With sharded weights the minimum is two microbatches, as ranks are timed between them; with a
    pipeline it is one microbatch per stage.
    """
    size = microbatch(options, layout) or 1
    sharded = sharded_layout(layout, options.sharding).shards > 1
    minimum = max(2 * size if sharded else 1, layout.pipeline * size if layout.pipeline > 1 else 1)
    return RowAssignment(
        options.shares,
        options.batch_size,
        rank=place.rank,
        count=place.count,
        minimum=minimum,
        emit=emit,
    )


def build_engine(
    options: Options,
    config: Any,
    layout: Layout,
    total: int,
    searched: SearchedSchedule | None = None,
) -> Engine:
    """Connect the processes and build the engine for a run of `total` steps."""
    return Engine(
        config,
        layout,
        weights=_weights(options),
        **engine_settings(options, layout, total, searched),
    )


def engine_settings(
    options: Options, layout: Layout, total: int, searched: SearchedSchedule | None = None
) -> dict[str, Any]:
    """Keyword arguments of the run's `Engine`, except for its weights."""
    # 1F1B stands in until a search has a result.
    schedule: ScheduleChoice = options.schedule if options.schedule != SEARCH else "1f1b"
    return {
        "optimizer": _optimizer(options, total),
        "schedule": searched.staged if searched else schedule,
        "microbatch_size": microbatch(options, layout),
        "ops": operators_of(options.ops),
        **{setting.name: getattr(options, setting.name) for setting in fields(EngineSettings)},
        "device": options.wanted_device,
    }


def memory_arguments(
    options: Options, layout: Layout, shards: Path | None, rows: int | None = None
) -> dict[str, Any]:
    """Keyword arguments with which `predict_memory` predicts this run.

    Args:
        options: options of the run.
        layout: layout of the run, for any number of processes.
        shards: dataset, if it exists already; its first rows give the document boundaries.
        rows: microbatch size. None: from the options.

    Raises:
        ConfigError: sizes do not fit together.
        LayoutError: the layout does not fit the model.
    """
    layout = sharded_layout(layout, options.sharding)
    shares = options.shares
    total_rows = (
        max(shares) if isinstance(shares, tuple) else options.batch_size // layout.data_ranks
    )
    rows = rows or microbatch(options, layout) or total_rows
    return {
        "model": fit_model(options, layout, shards),
        "layout": layout,
        "rows": rows,
        "sequence_length": options.sequence_length,
        "microbatches": -(-total_rows // rows),
        "documents": first_documents(options, rows, shards),
        "loss": NextTokenLoss(
            mtp_weight=options.mtp_weight, z_loss_coefficient=options.z_loss_coefficient
        ),
        **engine_settings(options, layout, 2),  # number of steps: any
        "microbatch_size": rows,
    }


def memory_cap(options: Options, layout: Layout) -> int | tuple[int, ...] | None:
    """Limit on activation bytes per rank, or one limit for each pipeline rank; None if not set.

    Raises:
        ConfigError: the number of limits differs from the number of pipeline ranks.
    """
    limits = options.schedule_memory_gib
    if not isinstance(limits, tuple):
        return None if limits is None else int(limits * GIB)
    if len(limits) != layout.pipeline:
        raise ConfigError(
            f"schedule_memory_gib has {len(limits)} numbers but pipeline={layout.pipeline}; use"
            " one number per pipeline rank, or one for all"
        )
    return tuple(int(limit * GIB) for limit in limits)


def _optimizer(options: Options, total: int) -> OptimizerConfig:
    warmup = total // 20 if options.warmup_steps is None else options.warmup_steps
    return optimizer_of(
        options.optimizer,
        learning_rate=options.learning_rate,
        warmup_steps=min(warmup, total - 1),  # at least one step after it
        decay=options.learning_rate_decay,
        decay_steps=total,
        final_ratio=options.final_learning_rate_ratio,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        otherwise={"betas": options.betas, "eps": options.eps},
    )


def _weights(options: Options) -> Literal["initial", "unset"] | Path:
    """Choose the engine's initial weights; "unset" if a checkpoint will be loaded."""
    if run_on_rank_zero(lambda: checkpoint.was_begun(options.output_dir / "checkpoints")):
        return "unset"
    folder = options.model_folder
    return folder if folder is not None and has_weights(folder) else "initial"
