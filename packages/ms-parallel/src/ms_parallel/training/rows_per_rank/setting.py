"""The setting `shares`: equal, measured, or the rows of each data rank."""

from collections.abc import Sequence
from typing import Any, Literal

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.memory.modes import Sharding
from ms_parallel.settings import short_repr

RowsPerRank = Literal["equal", "measured"] | tuple[int, ...]


def as_tuple(value: Any) -> Any:
    """Convert a list, as in run files, to a tuple; return other values unchanged."""
    return tuple(value) if isinstance(value, list) else value


def check_type(instance: object, attribute: Any, value: Any) -> None:
    """Validate the type of the setting `shares`."""
    rows = isinstance(value, tuple) and bool(value) and all(type(item) is int for item in value)
    if value in ("equal", "measured") or (rows and min(value) > 0):
        return
    raise ConfigError(
        "shares must be 'equal', 'measured' or a list of rows per data rank such as [8, 4], got"
        f" {short_repr(value)}"
    )


def check_rows_per_rank(
    shares: RowsPerRank,
    layout: Layout,
    *,
    batch_size: int,
    microbatch_size: int | None,
    sharding: Sharding,
    fixed_schedule: bool,
) -> None:
    """Check that a layout allows different numbers of rows per data rank.

    Processes that exchange weights or tokens in every microbatch need the same number of
    microbatches.

    Args:
        shares: the setting.
        layout: layout of the run.
        batch_size: rows of the global batch.
        microbatch_size: rows per microbatch; None for all rows of a rank.
        sharding: sharding over the data axis.
        fixed_schedule: the schedule is for one number of microbatches.

    Raises:
        ConfigError: the layout does not allow them.
    """
    if shares == "equal":
        return
    ranks = layout.data_ranks
    if isinstance(shares, tuple):
        _check_rows(shares, ranks, batch_size)
        size = microbatch_size or batch_size
        counts = {-(-rows // size) for rows in shares}
    else:
        counts = {1, 2}  # measured speeds may lead to any counts
    if layout.pipeline > 1 and fixed_schedule and ranks > 1:
        raise ConfigError(
            f"shares={short_repr(shares)} gives data ranks different numbers of microbatches, but"
            " the schedule is fixed to one number; use a named schedule such as 1f1b"
        )
    # Data ranks do not share weights, so none waits for another within a step.
    independent = sharding == "replicate" or layout.replicate == layout.token_ranks
    # Weights are gathered for the first microbatch and kept until the last.
    gathers_once = sharding == "zero1" or (sharding == "auto" and layout.pipeline > 1)
    if shares == "measured" and ranks > 1 and not independent:
        too_few = microbatch_size is None or 2 * microbatch_size > batch_size // ranks
        if not gathers_once or too_few:
            reason = (
                "has one microbatch"
                if gathers_once
                else f"gathers weights per microbatch ({sharding=})"
            )
            raise ConfigError(
                "shares='measured' times each data rank separately, which is impossible where a"
                f" rank {reason} and so waits for the others; set sharding to 'replicate', or to"
                " 'zero1' with at least two microbatches per rank, or list the rows of each rank"
            )
    if len(counts) > 1 and ranks > 1 and (layout.expert > 1 or not (independent or gathers_once)):
        if layout.expert > 1:
            payload, remedy = f"tokens (expert={layout.expert})", "set shares to 'equal'"
        else:
            payload = f"weights (sharding={sharding!r})"
            remedy = "set sharding to 'replicate' or 'zero1'"
        raise ConfigError(
            f"shares={short_repr(shares)} gives data ranks different numbers of microbatches, but"
            f" they exchange {payload} in every microbatch; {remedy}, or remove microbatch_size"
        )


def _check_rows(shares: Sequence[int], ranks: int, batch_size: int) -> None:
    if len(shares) != ranks:
        raise ConfigError(
            f"shares must list rows for each of {ranks} data ranks, got {len(shares)} numbers"
        )
    if sum(shares) != batch_size:
        raise ConfigError(
            f"shares {list(shares)} must sum to batch_size={batch_size}, got {sum(shares)}; change"
            " either setting"
        )
