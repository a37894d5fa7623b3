"""Layouts with `data = "rest"`: the data axis takes all remaining processes."""

from collections.abc import Mapping

from attrs import frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError

REST = "rest"
DATA = ("data", "data_parallel")
GROUPING = ("expert", "replicate")
"""Axes that group data ranks, and are checked once the number of processes is known."""


@frozen
class PartialLayout:
    """Layout without a data size, which follows from the number of processes."""

    axes: Mapping[str, object]

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "PartialLayout | None":
        """Parse a table with `data = "rest"`; None for other tables.

        Raises:
            LayoutError: an axis is unknown, repeated, or not a number of ranks.
        """
        if not any(config.get(name) == REST for name in DATA):
            return None
        axes = {key: value for key, value in config.items() if value != REST or key not in DATA}
        # Validates names and sizes now; `fill` checks divisibility.
        Layout.from_config({**_without_grouping(axes), DATA[0]: 1})
        return cls(axes)

    def fill(self, world_size: int) -> Layout:
        """Return the layout for a number of processes.

        Raises:
            LayoutError: the other axes do not divide it.
        """
        other_ranks = Layout.from_config(_without_grouping(self.axes)).world_size
        if world_size % other_ranks:
            raise LayoutError(
                f"layout {self} needs a multiple of {other_ranks} processes, but {world_size} run;"
                f" start {other_ranks * (world_size // other_ranks) or other_ranks}, or change the"
                " other axes"
            )
        return Layout.from_config({**self.axes, DATA[0]: world_size // other_ranks})

    def __str__(self) -> str:
        named = {key.removesuffix("_parallel"): value for key, value in self.axes.items()}
        return ",".join([f"data={REST}", *(f"{axis}={size}" for axis, size in named.items())])


def _without_grouping(axes: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in axes.items() if k.removesuffix("_parallel") not in GROUPING}
