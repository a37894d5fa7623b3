"""Fits a model, its data and its layout to one another, or says what does not fit."""

from pathlib import Path
from typing import Any, Literal

from ms_parallel import checkpoint
from ms_parallel.cluster import process
from ms_parallel.cluster.agreement import first_does
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.balance.settings import balance_of
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.microbatches import check_length
from ms_parallel.engine.optimizer import OptimizerConfig, optimizer_of
from ms_parallel.errors import ConfigError
from ms_parallel.models.family import family_of
from ms_parallel.models.registry import architecture, model_plan
from ms_parallel.pipeline.choice import SEARCH
from ms_parallel.pipeline.layer_split import Choice
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.context.kinds import check_context
from ms_parallel.training.optional import data_package, operators_of
from ms_parallel.training.options import Options
from ms_parallel.training.tokenizer import with_ends
from ms_parallel.weights.load import has_weights

PASSED_ON = (
    "mixed_precision",
    "loss_scale",
    "audit_every",
    "recompute",
    "sharding",
    "offload",
    "context_attention",
    "context_balance",
    "balance",
    "balance_coefficient",
    "balance_bias_rate",
    "router_z_coefficient",
    "seed",
    "device",
)
"""Settings of a run that its engine has under the same names."""
VOCABULARY_MULTIPLE = 64
"""A model's vocabulary is rounded up to it, so that many values of `tensor` divide it."""


def layout_of(options: Options) -> Layout:
    """The layout asked for, or all processes on the data axis."""
    return options.parallel_config or Layout(data=process.world_size())


def fit_model(options: Options, layout: Layout, shards: Path | None) -> Any:
    """The model's configuration, checked against the data, the options and the layout.

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
    _check_sizes(options, layout, config)
    balance_of(options).of(getattr(config, "mixture", None))
    family_of(config).check_layout(config, layout)
    check_context(options.context_attention, config, layout)
    return config if shards is None else with_ends(config, shards, options.model_folder)


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
    rows, size = options.batch_size // layout.readers, options.microbatch_size
    if size is not None and rows % size and options.schedule == SEARCH:
        raise ConfigError(
            f"microbatch_size={size} does not divide the {rows} samples of a data rank, and a"
            f" schedule is searched for microbatches of one size; choose a divisor of {rows}"
        )


def microbatch(options: Options, layout: Layout) -> int | None:
    """Samples that pass at once: as asked, or with a pipeline so few that its stages are busy."""
    if options.microbatch_size is not None or layout.pipeline == 1:
        return options.microbatch_size
    rows = options.batch_size // layout.readers
    if isinstance(options.schedule, Schedule) and rows % options.schedule.microbatches == 0:
        return rows // options.schedule.microbatches
    busy = [n for n in range(1, rows + 1) if rows % n == 0 and rows // n >= 2 * layout.pipeline]
    return max(busy, default=1)


def build_engine(
    options: Options, config: Any, layout: Layout, total: int, found: FoundSchedule | None = None
) -> Engine:
    """The engine of a run of `total` steps; connects the processes."""
    schedule: Choice = options.schedule if options.schedule != SEARCH else "1f1b"
    return Engine(
        config,
        layout,
        optimizer=_optimizer(options, total),
        schedule=found.staged if found else schedule,
        microbatch_size=microbatch(options, layout),
        weights=_weights(options),
        ops=operators_of(options.ops),
        **{name: getattr(options, name) for name in PASSED_ON},
    )


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
    """What the engine begins with: nothing where a checkpoint is loaded next."""
    if first_does(lambda: checkpoint.was_begun(options.output_dir / "checkpoints")):
        return "unset"
    folder = options.model_folder
    return folder if folder is not None and has_weights(folder) else "initial"
