"""Device of each rank in runs with several kinds of devices."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError, LayoutError

DEVICE_TYPES = ("cpu", "cuda", "npu", "xpu", "hpu", "mtia", "mps", "maia")
NAME = re.compile(r"([a-z]{1,32})(:[0-9]{1,3})?")
RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")
MAX_RANKS = 1 << 20


@frozen
class Devices:
    """Device names such as `cpu`, `npu` or `cuda:1`, in rank order.

    A name without an index is the next free device of its kind on that machine.
    """

    names: tuple[str, ...] = field()

    @classmethod
    def of(cls, table: Mapping[str, int | str | Sequence[int | str]]) -> "Devices":
        """Parse a table of devices and their ranks.

        Args:
            table: ranks by device name: a rank, several as in `"0-3,8"`, or a list of these.

        Raises:
            ConfigError: a name is not a device, or a rank is repeated or missing.
        """
        if not isinstance(table, Mapping) or not table:
            raise ConfigError(
                f'devices must be a table of devices and their ranks, such as cpu = "0", got'
                f" {_shown(table)}"
            )
        names_by_rank: dict[int, str] = {}
        for name, ranks in table.items():
            _check_name(name)
            for rank in _ranks(name, ranks):
                if rank in names_by_rank:
                    first = (
                        f"both {names_by_rank[rank]!r} and {name!r}"
                        if names_by_rank[rank] != name
                        else name
                    )
                    raise ConfigError(
                        f"devices names rank {rank} twice, under {first}; name each rank once"
                    )
                names_by_rank[rank] = name
        # n distinct ranks are 0 to n-1 unless one below n is missing.
        for rank in range(len(names_by_rank)):
            if rank not in names_by_rank:
                raise ConfigError(
                    f"devices names ranks up to {max(names_by_rank)} but not rank {rank}; add rank"
                    f" {rank}"
                )
        return cls(tuple(names_by_rank[rank] for rank in range(len(names_by_rank))))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each rank's device."""
        return tuple(name.partition(":")[0] for name in self.names)

    @property
    def are_mixed(self) -> bool:
        """Whether there are several kinds."""
        return len(set(self.kinds)) > 1

    def check_world(self, processes: int) -> None:
        """Check that the numbers of devices and processes are equal.

        Raises:
            LayoutError: they are not.
        """
        if len(self.names) != processes:
            raise LayoutError(
                f"devices names {len(self.names)} ranks but the layout has {processes}; name ranks"
                f" 0 to {processes - 1}"
            )

    def of_rank(self, rank: int, local_rank: int) -> str:
        """Device name of a rank, with its index.

        Args:
            rank: global rank.
            local_rank: rank on its machine; ranks of a machine are consecutive.
        """
        name = self.names[rank]
        if name == "cpu" or ":" in name:
            return name
        # Earlier ranks of this machine have taken the first devices of their kind.
        earlier = self.kinds[rank - local_rank : rank]
        return f"{name}:{earlier.count(name)}"


def devices_of(value: Any) -> Devices | None:
    """Convert a table to `Devices`; None and `Devices` are returned unchanged."""
    return value if value is None or isinstance(value, Devices) else Devices.of(value)


def _check_name(name: Any) -> None:
    from ms_parallel.torch_private import privateuse1_name  # imported here to keep `--help` fast

    known_kinds = (*DEVICE_TYPES, privateuse1_name())
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(f"devices: {_shown(name)} is not a device; use a name such as 'npu:0'")
    device_type, number = match.groups()
    if device_type not in known_kinds:
        raise ConfigError(
            f"devices: {name!r} is not a known kind of device; {_nearest(device_type)}"
        )
    if device_type == "cpu" and number is not None:
        raise ConfigError(f"devices: {name!r} is not a device, as a machine has one CPU; use 'cpu'")


def _ranks(name: str, selection: int | str | Sequence[int | str]) -> list[int]:
    """Parse the ranks of a device."""
    parts: list[Any] = (
        list(selection)
        if isinstance(selection, Sequence) and not isinstance(selection, str)
        else [selection]
    )
    ranks: list[int] = []
    for part in [piece.strip() for item in parts for piece in str(item).split(",")]:
        match = RANGE.fullmatch(part)
        # Invalid text becomes an empty range, which is rejected below.
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first or last >= MAX_RANKS:
            raise ConfigError(
                f"devices: ranks of {name!r} must be numbers such as 0, '0-3' or [0, 2], got"
                f" {_shown(selection)}"
            )
        ranks += range(first, last + 1)
    if not ranks:
        raise ConfigError(f"devices: {name!r} has no ranks; add one, or remove the device")
    return ranks


def _nearest(device_type: str) -> str:
    close_matches = get_close_matches(device_type, DEVICE_TYPES, n=1, cutoff=0.4)
    return (
        f"did you mean {close_matches[0]!r}?"
        if close_matches
        else f"known: {', '.join(DEVICE_TYPES)}"
    )


def _shown(value: object) -> str:
    return repr(value)[:80]
