"""A layout whose data axis takes the processes that the other axes leave."""

from collections.abc import Mapping

from attrs import frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError

REST = "rest"
DATA = ("data", "data_parallel")
GROUPING = ("expert", "replicate")
"""Axes that group ranks of data, and can be checked once their number is known."""


@frozen
class RestOnData:
    """The axes that are given; `data` is known once the processes are counted."""

    given: Mapping[str, object]

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "RestOnData | None":
        """Read a table that has `data = "rest"`; return None for any other.

        Raises:
            LayoutError: an axis is unknown, given twice, or no number of ranks.
        """
        if not any(config.get(name) == REST for name in DATA):
            return None
        given = {key: value for key, value in config.items() if value != REST or key not in DATA}
        Layout.from_config({**_apart(given), DATA[0]: 1})
        return cls(given)

    def fill(self, world_size: int) -> Layout:
        """Return the layout of so many processes.

        Raises:
            LayoutError: the other axes do not divide them.
        """
        each = Layout.from_config(_apart(self.given)).world_size
        if world_size % each:
            raise LayoutError(
                f"layout {self} needs a multiple of {each} processes, but {world_size} run; start"
                f" {each * (world_size // each) or each}, or change the other axes"
            )
        return Layout.from_config({**self.given, DATA[0]: world_size // each})

    def __str__(self) -> str:
        named = {key.removesuffix("_parallel"): value for key, value in self.given.items()}
        return ",".join([f"data={REST}", *(f"{axis}={size}" for axis, size in named.items())])


def _apart(given: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in given.items() if k.removesuffix("_parallel") not in GROUPING}
