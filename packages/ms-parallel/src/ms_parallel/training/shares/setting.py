"""The setting `shares`: equal, measured, or the rows of each data rank."""

from collections.abc import Sequence
from typing import Any, Literal

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.settings import shown
from ms_parallel.split.data_axis import Sharding

Shares = Literal["equal", "measured"] | tuple[int, ...]


def as_tuple(value: Any) -> Any:
    """Turn a list, as files have it, into a tuple; leave anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def check_kind(instance: object, attribute: Any, value: Any) -> None:
    """Check that a value is of the kind that `shares` takes."""
    rows = isinstance(value, tuple) and bool(value) and all(type(each) is int for each in value)
    if value in ("equal", "measured") or (rows and min(value) > 0):
        return
    raise ConfigError(
        f"shares is {shown(value)}; give 'equal', 'measured', or the rows of each data rank, such"
        " as [8, 4]"
    )


def check_shares(
    shares: Shares,
    layout: Layout,
    *,
    batch_size: int,
    microbatch_size: int | None,
    sharding: Sharding,
    fixed_schedule: bool,
) -> None:
    """Check that data ranks can take unequal shares under a layout.

    Processes that exchange weights or tokens within a microbatch have to make as many of them.

    Args:
        shares: the setting.
        layout: how the processes split the work.
        batch_size: rows of the global batch.
        microbatch_size: rows that pass at once; None for all of a rank.
        sharding: what processes that hold different tokens share out.
        fixed_schedule: whether the schedule is for one number of microbatches.

    Raises:
        ConfigError: they cannot.
    """
    if shares == "equal":
        return
    ranks = layout.readers
    if isinstance(shares, tuple):
        _check_rows(shares, ranks, batch_size)
        size = microbatch_size or batch_size
        counts = {-(-rows // size) for rows in shares}
    else:
        counts = {1, 2}  # any that speeds may ask for
    if layout.pipeline > 1 and fixed_schedule and ranks > 1:
        raise ConfigError(
            f"shares={shown(shares)} gives data ranks unlike numbers of microbatches, and the"
            " schedule is for one number; name a schedule of any number, such as 1f1b"
        )
    alone = sharding == "replicate" or layout.replicate == layout.token_ranks
    once = sharding == "zero1" or (sharding == "auto" and layout.pipeline > 1)
    if shares == "measured" and ranks > 1 and not alone:
        few = microbatch_size is None or 2 * microbatch_size > batch_size // ranks
        if not once or few:
            why = "has one microbatch" if once else f"gathers weights per microbatch ({sharding=})"
            raise ConfigError(
                "shares='measured' times each data rank separately, which is impossible where a"
                f" rank {why} and so waits for the others; set sharding to 'replicate', or to"
                " 'zero1' with at least two microbatches per rank, or list the rows of each rank"
            )
    if len(counts) > 1 and ranks > 1 and (layout.expert > 1 or not (alone or once)):
        if layout.expert > 1:
            exchanged, cure = f"tokens (expert={layout.expert})", "set shares to 'equal'"
        else:
            exchanged = f"weights (sharding={sharding!r})"
            cure = "set sharding to 'replicate' or 'zero1'"
        raise ConfigError(
            f"shares={shown(shares)} gives data ranks different numbers of microbatches, in each of"
            f" which they exchange {exchanged}; {cure}, or remove microbatch_size"
        )


def _check_rows(shares: Sequence[int], ranks: int, batch_size: int) -> None:
    if len(shares) != ranks:
        raise ConfigError(
            f"shares has {len(shares)} numbers of rows and the layout {ranks} data ranks; give one"
            " for each"
        )
    if sum(shares) != batch_size:
        raise ConfigError(
            f"shares {list(shares)} add up to {sum(shares)} rows and batch_size is {batch_size};"
            " make them equal"
        )
