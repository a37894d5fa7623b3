"""Fits a model, its data and its layout to one another, or says what does not fit."""

from pathlib import Path
from typing import Any, Literal

import torch
from attrs import fields

from ms_parallel import checkpoint
from ms_parallel.cluster import process
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.layout import Layout, Place
from ms_parallel.cluster.rest import RestOnData
from ms_parallel.engine.assembly import check_devices, sharded_layout
from ms_parallel.engine.balance.settings import balance_of
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.microbatches import check_length
from ms_parallel.engine.optimizer import OptimizerConfig, optimizer_of
from ms_parallel.engine.reproducible.check import check_reproducible
from ms_parallel.engine.settings import EngineSettings
from ms_parallel.errors import ConfigError
from ms_parallel.events import OnEvent
from ms_parallel.models.family import family_of
from ms_parallel.models.registry import architecture, model_plan
from ms_parallel.pipeline.choice import SEARCH
from ms_parallel.pipeline.layer_split import Choice
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.schedules.generators.registry import GENERATORS
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.context.kinds import check_context
from ms_parallel.training.optional import data_package, operators_of
from ms_parallel.training.options import AUTO, Options
from ms_parallel.training.shares.row_shares import RowShares
from ms_parallel.training.shares.setting import check_shares
from ms_parallel.training.tokenizer import with_ends
from ms_parallel.weights.load import has_weights

GIB = 1 << 30
VOCABULARY_MULTIPLE = 64
"""A model's vocabulary is rounded up to it, so that many values of `tensor` divide it."""
MOST_TOKENS = 1 << 24
"""Tokens of a microbatch whose documents are read to say what it holds."""


def layout_of(options: Options) -> Layout:
    """Return the layout asked for; without one, or while it is to be chosen, all ranks on data."""
    chosen = options.parallel_config
    if isinstance(chosen, RestOnData):
        return chosen.fill(process.world_size())
    if chosen is None or chosen == AUTO:
        return Layout(data=process.world_size())
    return chosen


def fit_model(options: Options, layout: Layout, shards: Path | None) -> Any:
    """Build the model's configuration; check it against the data, the options and the layout.

    Args:
        options: what was asked for.
        layout: how the model is split.
        shards: the dataset, whose vocabulary a model takes that names none; None if there is
            none yet, and vocab_size counts.

    Raises:
        ConfigError: the vocabulary, or sequence_length, does not fit.
        LayoutError: the layout does not fit the model.
    """
    named = "vocab_size" in options.model_config or options.model_folder is not None
    tokens = (
        options.vocab_size if shards is None else data_package().inspect(shards).vocabulary_size
    )
    overrides = dict(options.model_config)
    if not named:
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
    family_of(config).check_layout(config, layout)
    check_context(options.context_attention, config, layout)
    if options.reproducible:
        check_reproducible(layout, model_plan(config), config, prepared=False)


def _check_sizes(options: Options, layout: Layout, config: Any) -> None:
    length = options.sequence_length
    most = getattr(config, "max_position_embeddings", length)  # Transformer-XL has no end
    if most is not None and length > most:
        raise ConfigError(
            f"sequence_length={length} is longer than the model's {most} positions; lower it, or"
            " raise max_position_embeddings of model_config"
        )
    tensor = layout.tensor if model_plan(config).split_sequence else 1
    check_length("sequence_length", length, tensor=tensor, context=layout.context)
    if options.batch_size % layout.readers:
        raise ConfigError(
            f"batch_size={options.batch_size} does not divide over data={layout.readers}; choose a"
            f" multiple of {layout.readers}"
        )
    check_shares(
        options.shares,
        layout,
        batch_size=options.batch_size,
        microbatch_size=microbatch(options, layout),
        sharding=options.sharding,
        fixed_schedule=not (isinstance(options.schedule, str) and options.schedule in GENERATORS),
    )
    rows, size = options.batch_size // layout.readers, options.microbatch_size
    if isinstance(size, int) and rows % size and options.schedule == SEARCH:
        raise ConfigError(
            f"microbatch_size={size} does not divide the {rows} samples of a data rank, and a"
            f" schedule is searched for microbatches of one size; choose a divisor of {rows}"
        )


def first_documents(options: Options, rows: int, shards: Path | None) -> torch.Tensor | None:
    """Read the documents (rows, S) int32 of a dataset's first rows; None where there is none yet.

    Raises:
        ConfigError: the rows have more tokens than are read for it.
    """
    if shards is None:
        return None
    if rows * options.sequence_length > MOST_TOKENS:
        raise ConfigError(
            f"a microbatch of {rows:,} rows of {options.sequence_length:,} tokens is longer than"
            f" {MOST_TOKENS:,} tokens; lower batch_size, or give a microbatch_size"
        )
    stream = data_package().TokenStream(
        shards, sequence_length=options.sequence_length, batch_size=rows, seed=options.seed
    )
    return torch.as_tensor(next(stream)["documents"])


def microbatch(options: Options, layout: Layout) -> int | None:
    """Return the samples of a pass: as asked, or in a pipeline so few that its stages are busy.

    It is one where weights are to be reproduced.
    """
    if options.reproducible:
        return 1
    size = options.microbatch_size
    if isinstance(size, int):
        return size
    if layout.pipeline == 1:
        return None
    rows = options.batch_size // layout.readers
    if isinstance(options.schedule, Schedule) and rows % options.schedule.microbatches == 0:
        return rows // options.schedule.microbatches
    busy = [n for n in range(1, rows + 1) if rows % n == 0 and rows // n >= 2 * layout.pipeline]
    return max(busy, default=1)


def row_shares(options: Options, layout: Layout, place: Place, emit: OnEvent) -> RowShares:
    """Choose the rows that data ranks begin with, and the least that each keeps.

    The least is two microbatches where weights are sharded, as the time is taken between them, and
    with a pipeline enough to keep its stages busy.
    """
    size = microbatch(options, layout) or 1
    sharded = sharded_layout(layout, options.sharding).shards > 1
    least = max(2 * size if sharded else 1, layout.pipeline * size if layout.pipeline > 1 else 1)
    return RowShares(
        options.shares,
        options.batch_size,
        rank=place.rank,
        count=place.count,
        least=least,
        emit=emit,
    )


def build_engine(
    options: Options, config: Any, layout: Layout, total: int, found: FoundSchedule | None = None
) -> Engine:
    """Build the engine of a run of `total` steps, and connect the processes."""
    return Engine(
        config, layout, weights=_weights(options), **engine_settings(options, layout, total, found)
    )


def engine_settings(
    options: Options, layout: Layout, total: int, found: FoundSchedule | None = None
) -> dict[str, Any]:
    """Collect the options of a run's engine, its weights apart."""
    schedule: Choice = options.schedule if options.schedule != SEARCH else "1f1b"
    return {
        "optimizer": _optimizer(options, total),
        "schedule": found.staged if found else schedule,
        "microbatch_size": microbatch(options, layout),
        "ops": operators_of(options.ops),
        **{each.name: getattr(options, each.name) for each in fields(EngineSettings)},
        "device": options.wanted_device,
    }


def memory_question(
    options: Options, layout: Layout, shards: Path | None, rows: int | None = None
) -> dict[str, Any]:
    """Collect the arguments with which `predict_memory` says what a run holds.

    Args:
        options: the run's.
        layout: how it is split, over any number of processes.
        shards: the dataset, if it is there already; rows are packed as its first ones are.
        rows: of a microbatch; as the options say by default.

    Raises:
        ConfigError: sizes do not fit one another.
        LayoutError: the layout does not fit the model.
    """
    layout = sharded_layout(layout, options.sharding)
    given = options.shares
    whole = max(given) if isinstance(given, tuple) else options.batch_size // layout.readers
    rows = rows or microbatch(options, layout) or whole
    return {
        "model": fit_model(options, layout, shards),
        "layout": layout,
        "rows": rows,
        "sequence_length": options.sequence_length,
        "microbatches": -(-whole // rows),
        "documents": first_documents(options, rows, shards),
        "loss": NextTokenLoss(mtp_weight=options.mtp_weight, z_coefficient=options.z_coefficient),
        **engine_settings(options, layout, 2),
        "microbatch_size": rows,
    }


def memory_cap(options: Options, layout: Layout) -> int | tuple[int, ...] | None:
    """Return the most bytes of activations on a rank, or on each; None where nobody says.

    Raises:
        ConfigError: there is a number for each of more or fewer ranks.
    """
    given = options.schedule_memory_gib
    if not isinstance(given, tuple):
        return None if given is None else int(given * GIB)
    if len(given) != layout.pipeline:
        raise ConfigError(
            f"schedule_memory_gib has {len(given)} numbers and pipeline={layout.pipeline}; give"
            " one for each rank, or one for all"
        )
    return tuple(int(each * GIB) for each in given)


def _optimizer(options: Options, total: int) -> OptimizerConfig:
    warmup = total // 20 if options.warmup_steps is None else options.warmup_steps
    return optimizer_of(
        options.optimizer,
        learning_rate=options.learning_rate,
        warmup_steps=min(warmup, total - 1),
        decay=options.learning_rate_decay,
        decay_steps=total,
        final_ratio=options.final_learning_rate_ratio,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        otherwise={"betas": options.betas, "epsilon": options.epsilon},
    )


def _weights(options: Options) -> Literal["initial", "unset"] | Path:
    """Choose what the engine begins with: nothing where a checkpoint is loaded next."""
    if run_on_rank_zero(lambda: checkpoint.was_begun(options.output_dir / "checkpoints")):
        return "unset"
    folder = options.model_folder
    return folder if folder is not None and has_weights(folder) else "initial"
