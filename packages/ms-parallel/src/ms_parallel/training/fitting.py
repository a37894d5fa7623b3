"""A model, its data and its layout made to fit one another, or a line that says what does not."""

from pathlib import Path
from typing import Any

from ms_parallel.cluster.agreement import first_does
from ms_parallel.cluster.groups import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.optimizer import AdamWConfig
from ms_parallel.errors import ConfigError
from ms_parallel.models import architecture
from ms_parallel.operators import Ops
from ms_parallel.pipeline.choice import SEARCH, Choice
from ms_parallel.planner.found_schedule import FILE, FoundSchedule, read_found, write_found
from ms_parallel.planner.tuning import conditions_of, search_schedule
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.training.dataset import data_package
from ms_parallel.training.options import Options
from ms_parallel.training.tokenizer import with_ends

__all__ = ["build_engine", "find_schedule", "fit_model", "microbatch"]

GIB = 1 << 30
VOCABULARY_MULTIPLE = 64
"""A model's vocabulary is rounded up to it, so that many values of `tensor` divide it."""


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
    layout.check_model(config.shape)
    return config if shards is None else with_ends(config, shards, options.model_folder)


def _check_sizes(options: Options, layout: Layout, config: Any) -> None:
    length = options.sequence_length
    most = getattr(config, "max_position_embeddings", length)  # Transformer-XL has no end
    if length > most:
        raise ConfigError(
            f"sequence_length={length} is longer than the model's {most} positions; lower it, or"
            " raise max_position_embeddings of model_config"
        )
    if length % layout.tensor:
        raise ConfigError(
            f"sequence_length={length} does not divide over tensor={layout.tensor}; choose a"
            f" multiple of {layout.tensor}"
        )
    if options.batch_size % layout.data:
        raise ConfigError(
            f"batch_size={options.batch_size} does not divide over data={layout.data}; choose a"
            f" multiple of {layout.data}"
        )
    rows, size = options.batch_size // layout.data, options.microbatch_size
    if size is not None and rows % size and options.schedule == SEARCH:
        raise ConfigError(
            f"microbatch_size={size} does not divide the {rows} samples of a data rank, and a"
            f" schedule is searched for microbatches of one size; choose a divisor of {rows}"
        )


def microbatch(options: Options, layout: Layout) -> int | None:
    """Samples that pass at once: as asked, or with a pipeline so few that its stages are busy."""
    if options.microbatch_size is not None or layout.pipeline == 1:
        return options.microbatch_size
    rows = options.batch_size // layout.data
    if isinstance(options.schedule, Schedule) and rows % options.schedule.microbatches == 0:
        return rows // options.schedule.microbatches
    busy = [n for n in range(1, rows + 1) if rows % n == 0 and rows // n >= 2 * layout.pipeline]
    return max(busy, default=1)


def find_schedule(options: Options, config: Any, layout: Layout) -> FoundSchedule | None:
    """The schedule that was found for this run, now or when it began; None if none is to be found.

    All processes call this; it connects them.

    Raises:
        ConfigError: the file that the run began with is damaged.
        ScheduleError: schedule_memory_gib is below the least that works.
    """
    if options.schedule != SEARCH or layout.pipeline == 1:
        return None
    groups, rows = connect(layout, device=options.device), options.batch_size // layout.data
    cap = None
    if options.schedule_memory_gib is not None:
        cap = int(options.schedule_memory_gib * GIB)
    size = microbatch(options, layout) or rows
    own: dict[str, Any] = {
        "mixed_precision": options.mixed_precision,
        "recompute": options.recompute,
    }
    conditions = conditions_of(config, groups, rows, options.sequence_length, size, cap, own)
    path = options.output_dir / FILE
    known = first_does(lambda: read_found(path))
    if known is not None and known.conditions == conditions:
        return known
    found = search_schedule(
        config,
        groups,
        rows=rows,
        sequence_length=options.sequence_length,
        microbatch_size=size,
        memory_cap_bytes=cap,
        ops=_ops(options.ops),
        **own,
    )
    first_does(lambda: write_found(path, found))
    return found


def build_engine(
    options: Options, config: Any, layout: Layout, total: int, found: FoundSchedule | None = None
) -> Engine:
    """The engine of a run of `total` steps; connects the processes."""
    schedule: Choice = options.schedule if options.schedule != SEARCH else "1f1b"
    warmup = total // 20 if options.warmup_steps is None else options.warmup_steps
    return Engine(
        config,
        layout,
        optimizer=AdamWConfig(
            learning_rate=options.learning_rate,
            warmup_steps=min(warmup, total - 1),
            decay_steps=total,
            final_ratio=options.final_learning_rate_ratio,
            betas=options.betas,  # type: ignore[arg-type]  # mypy misreads tuple as a converter
            epsilon=options.epsilon,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        ),
        schedule=found.staged if found else schedule,
        microbatch_size=microbatch(options, layout),
        mixed_precision=options.mixed_precision,
        recompute=options.recompute,  # type: ignore[arg-type]
        seed=options.seed,
        device=options.device,
        ops=_ops(options.ops),
    )


def _ops(name: str) -> Ops | None:
    if name == "torch":
        return None
    try:
        import ms_kernels
    except ImportError as error:
        raise ConfigError(
            "ops='ms_kernels' needs ms-kernels; install it: pip install 'ms-parallel[kernels]'"
        ) from error
    return ms_kernels
